"""On-policy distillation's teacher: a server that scores tokens, and the check that both models share a tokenizer.

A teacher that is loaded beside the policy is an ordinary frozen model (``trainer/actor_critic.py``).
"""

import asyncio
import logging
import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rl_async.configs.schema.algorithm import TeacherConfig
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import ConfigError, UserError
from rl_async.files import UNDECODABLE
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.model_client import Poster, read_api_key
from rl_async.trainer.packing import Tensors

log = logging.getLogger("rl_async.trainer")

KEY = "algorithm.teacher.endpoint"
# How many tokens of the vocabulary a server is asked for to compare tokenizers.
COMPARED_TOKENS = 256


class _Logprob(msgspec.Struct):
    logprob: float


class _Scored(msgspec.Struct):
    # For each token of the prompt after the first, log-probabilities by the token's id.
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _Completion(msgspec.Struct):
    choices: list[_Scored]


class _Text(msgspec.Struct):
    prompt: str


class TeacherEndpoint:
    """A model that a vLLM server has. It gives the log-probability of each token of a row, at temperature 1.

    Raises ConfigError if the environment lacks the API key.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._api_key = read_api_key(config.api_key_env, f"{KEY}.api_key_env")

    def score(self, batches: Sequence[Tensors]) -> list[Tensor]:
        """Return log-probabilities [B, T-1] of each micro-batch's tokens, on the host; 0 in rows that do not train.

        Waits for the server until each row's deadline, ``timeout_s``. Raises UserError when a row got no answer, and if
        rows show images, which the server would not see.
        """
        if any(batch.images is not None for batch in batches):
            raise UserError(f"{KEY} gets tokens alone, and rows show images; use algorithm.teacher.path")
        return asyncio.run(self._score(batches))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of tokens by the server's tokenizer. Raises UserError if it does not answer."""
        return asyncio.run(self._detokenize(ids))

    async def _score(self, batches: Sequence[Tensors]) -> list[Tensor]:
        poster = self._poster(f"{self._config.url.rstrip('/')}/completions")
        found = [torch.zeros(batch.mask.shape) for batch in batches]
        try:
            async with asyncio.TaskGroup() as rows:
                for batch, into in zip(batches, found, strict=True):
                    for row in batch.mask.any(1).nonzero().flatten().tolist():
                        ids = batch.tokens[row, : int(batch.lengths[row])].tolist()
                        rows.create_task(self._row(poster, ids, into[row]))
        except* ScorerFailed as failed:
            raise UserError(f"{KEY}: {failed.exceptions[0]}") from failed
        finally:
            await poster.close()
        return found

    async def _row(self, poster: Poster, ids: list[int], into: Tensor) -> None:
        """Write the log-probabilities of ``ids`` after the first into a row [T-1]."""
        body = {"model": self._config.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        values = read_scores(await poster.post(body | self._config.extra_body), ids, poster.url)
        into[: len(values)] = torch.tensor(values)

    async def _detokenize(self, ids: Sequence[int]) -> str:
        poster = self._poster(f"{self._config.url.rstrip('/').removesuffix('/v1')}/detokenize")
        try:
            answer = await poster.post({"model": self._config.model, "tokens": list(ids)})
            return msgspec.json.decode(answer, type=_Text).prompt
        except ScorerFailed as failed:
            raise UserError(f"{KEY}: {failed}") from failed
        except UNDECODABLE as error:
            raise UserError(f"{KEY}: {poster.url} did not answer with a text: {error}") from error
        finally:
            await poster.close()

    def _poster(self, url: str) -> Poster:
        config = self._config
        return Poster(
            url,
            section=KEY,
            timeout_s=config.timeout_s,
            attempts=config.attempts,
            backoff_s=config.backoff_s,
            max_concurrent=config.max_concurrent,
            api_key=self._api_key,
            tell=lambda text: log.warning("%s: %s", KEY, text),
        )


def read_scores(raw: bytes, ids: Sequence[int], url: str) -> list[float]:
    """Decode the log-probabilities of ``ids`` after the first. Raises ScorerFailed unless there is one for each."""
    try:
        completion = msgspec.json.decode(raw, type=_Completion)
    except UNDECODABLE as error:
        raise ScorerFailed(
            f"{url} did not answer with prompt_logprobs, as vLLM does for a prompt of tokens: {error}"
        ) from error
    given = completion.choices[0].prompt_logprobs[1:] if completion.choices else []
    values = [entry[token].logprob for token, entry in zip(ids[1:], given, strict=False) if entry and token in entry]
    if len(values) != len(ids) - 1 or len(given) != len(values) or not all(map(math.isfinite, values)):
        raise ScorerFailed(f"{url} gave {len(values)} log-probabilities for the {len(ids) - 1} tokens after the first")
    return values


def check_tokenizer(teacher: TeacherConfig, policy: str) -> None:
    """Raise ConfigError if the teacher numbers tokens in another way than the policy in folder ``policy``.

    A teacher may have more tokens. Of a server's tokenizer, some hundred tokens are compared.
    """
    ours = AutoTokenizer.from_pretrained(policy, trust_remote_code=False)
    remedy = "a teacher scores the policy's tokens one by one; use one with the policy's tokenizer"
    if teacher.endpoint is not None:
        ids = sorted(ours.get_vocab().values())
        ids = ids[:: -(-len(ids) // COMPARED_TOKENS)]
        if (text := TeacherEndpoint(teacher.endpoint).detokenize(ids)) != ours.decode(ids):
            raise ConfigError(f"{KEY}: the server's tokenizer reads tokens {ids[:3]}... as {text[:40]!r}...; {remedy}")
        return
    assert teacher.path is not None
    theirs = AutoTokenizer.from_pretrained(teacher.path, trust_remote_code=False).get_vocab()
    for token, number in sorted(ours.get_vocab().items(), key=lambda pair: pair[1]):
        if theirs.get(token) != number:
            its = theirs.get(token, "unknown")
            raise ConfigError(
                f"algorithm.teacher.path: token {token!r} is number {number} of the policy and {its} of "
                f"{teacher.path}; {remedy}"
            )
