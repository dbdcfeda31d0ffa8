"""On-policy distillation's teachers: what each reads, servers that score tokens, and the check of their tokenizers.

    rows of a micro-batch ──by data source, behind a hint──> Reading ──model or server──> back in the rows' places

A teacher that is loaded beside the policy is an ordinary frozen model (``trainer/actor_critic.py``).
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jinja2
import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import ConfigError, UserError
from rl_async.files import UNDECODABLE
from rl_async.messages import Trajectory
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.model_client import Poster, read_api_key
from rl_async.template_tokens import MISFITS, TemplateTokens, bounded, ending
from rl_async.trainer.algorithms.losses import Teaching
from rl_async.trainer.backend import Reference
from rl_async.trainer.batches import MicroBatch
from rl_async.trainer.packing import Reading, Tensors, collate, empty_tensors

log = logging.getLogger("rl_async.trainer")

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
    """A model that a vLLM server has, under the config key ``key``. It scores tokens at temperature 1.

    Raises ConfigError if the environment lacks the API key.
    """

    def __init__(self, config: EndpointConfig, key: str = "algorithm.teacher.endpoint") -> None:
        self._config, self.key = config, key
        self._api_key = read_api_key(config.api_key_env, f"{key}.api_key_env")

    def score(self, batches: Sequence[Tensors]) -> list[Tensor]:
        """Return log-probabilities [B, T-1] of each micro-batch's tokens, on the host; 0 in rows that do not train.

        Waits for the server until each row's deadline, ``timeout_s``. Raises UserError when a row got no answer, and if
        rows show images, which the server would not see.
        """
        found = [torch.zeros(batch.mask.shape) for batch in batches]

        def write(batch: int, row: int, ids: list[int], entries: list[dict[int, _Logprob]]) -> None:
            found[batch][row, : len(entries)] = torch.tensor(
                [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True)]
            )

        self._ask(batches, 0, write)
        return found

    def likeliest(self, batches: Sequence[Tensors], count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the log-probabilities of the ``count`` likeliest tokens in each place, [B, T-1, count], and them.

        Both are on the host. Rows that do not train have the first tokens of the vocabulary, all alike. Waits and
        raises as ``score`` does.
        """
        shapes = [(*batch.mask.shape, count) for batch in batches]
        found = [torch.full(shape, -math.log(count + 1)) for shape in shapes]
        tokens = [torch.arange(count).expand(shape).clone() for shape in shapes]

        def write(batch: int, row: int, ids: list[int], entries: list[dict[int, _Logprob]]) -> None:
            for place, entry in enumerate(entries):
                best = sorted(entry.items(), key=lambda pair: -pair[1].logprob)[:count]
                if len(best) < count:
                    raise ScorerFailed(f"the server gave {len(best)} log-probabilities of a token, not {count}")
                tokens[batch][row, place] = torch.tensor([token for token, _ in best])
                found[batch][row, place] = torch.tensor([value.logprob for _, value in best])

        self._ask(batches, count, write)
        return list(zip(found, tokens, strict=True))

    def _ask(self, batches: Sequence[Tensors], count: int, write: "_Write") -> None:
        if any(batch.images is not None for batch in batches):
            raise UserError(f"{self.key} gets tokens alone, and rows show images; use algorithm.teacher.path")
        asyncio.run(self._score(batches, count, write))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of tokens by the server's tokenizer. Raises UserError if it does not answer."""
        return asyncio.run(self._detokenize(ids))

    async def _score(self, batches: Sequence[Tensors], count: int, write: "_Write") -> None:
        poster = self._poster(f"{self._config.url.rstrip('/')}/completions")

        async def ask(number: int, row: int, ids: list[int]) -> None:
            body = {"model": self._config.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": count}
            answer = await poster.post(body | self._config.extra_body)
            write(number, row, ids, read_scores(answer, ids, poster.url))

        try:
            async with asyncio.TaskGroup() as rows:
                for number, batch in enumerate(batches):
                    for row in batch.mask.any(1).nonzero().flatten().tolist():
                        rows.create_task(ask(number, row, batch.tokens[row, : int(batch.lengths[row])].tolist()))
        except* ScorerFailed as failed:
            raise UserError(f"{self.key}: {failed.exceptions[0]}") from failed
        finally:
            await poster.close()

    async def _detokenize(self, ids: Sequence[int]) -> str:
        poster = self._poster(f"{self._config.url.rstrip('/').removesuffix('/v1')}/detokenize")
        try:
            answer = await poster.post({"model": self._config.model, "tokens": list(ids)})
            return msgspec.json.decode(answer, type=_Text).prompt
        except ScorerFailed as failed:
            raise UserError(f"{self.key}: {failed}") from failed
        except UNDECODABLE as error:
            raise UserError(f"{self.key}: {poster.url} did not answer with a text: {error}") from error
        finally:
            await poster.close()

    def _poster(self, url: str) -> Poster:
        config = self._config
        return Poster(
            url,
            section=self.key,
            timeout_s=config.timeout_s,
            attempts=config.attempts,
            backoff_s=config.backoff_s,
            max_concurrent=config.max_concurrent,
            api_key=self._api_key,
            tell=lambda text: log.warning("%s: %s", self.key, text),
        )


# Takes the numbers of a micro-batch and of a row in it, the row's tokens, and the scores of those after the first.
_Write = Callable[[int, int, list[int], list[dict[int, _Logprob]]], None]


def read_scores(raw: bytes, ids: Sequence[int], url: str) -> list[dict[int, _Logprob]]:
    """Decode the log-probabilities at each of ``ids`` after the first, by token; that of the token itself is there.

    Raises ScorerFailed unless there is one for each, and all are finite.
    """
    try:
        completion = msgspec.json.decode(raw, type=_Completion)
    except UNDECODABLE as error:
        raise ScorerFailed(
            f"{url} did not answer with prompt_logprobs, as vLLM does for a prompt of tokens: {error}"
        ) from error
    given = completion.choices[0].prompt_logprobs[1:] if completion.choices else []
    found = [entry for token, entry in zip(ids[1:], given, strict=False) if entry and token in entry]
    finite = all(math.isfinite(value.logprob) for entry in found for value in entry.values())
    if len(found) != len(ids) - 1 or len(given) != len(found) or not finite:
        raise ScorerFailed(f"{url} gave {len(found)} log-probabilities for the {len(ids) - 1} tokens after the first")
    return found


# --- What teachers read


class Hints:
    """Prints a hint as a system message in front of a row, as the chat template of the model in ``folder`` does.

    The row itself stays as it was sampled, whatever tools and turns it has (as prime-rl's ``opsd`` does it). Raises
    ConfigError if the template prints no system message alone.
    """

    def __init__(self, hint: str, folder: str) -> None:
        self._hint = hint
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        self._tokenizer, self._tokens = tokenizer, TemplateTokens(tokenizer)
        self._printed("")

    def before(self, row: Trajectory) -> Trajectory:
        """Return the row behind its hint. A token that begins every text stands once."""
        filled = {"ground_truth": row.ground_truth, "feedback": "\n".join(row.reward_reasons.values())}
        text = re.sub(r"{(ground_truth|feedback)}", lambda match: filled[match[1]], self._hint)
        hint = np.array(self._printed(text), np.int32)
        begins = self._tokenizer.bos_token_id
        again = bool(len(hint)) and begins is not None and hint[0] == begins == row.token_ids[0]
        rest = slice(int(again), None)
        return msgspec.structs.replace(
            row,
            token_ids=np.concatenate([hint, row.token_ids[rest]]),
            loss_mask=np.concatenate([np.zeros(len(hint), bool), row.loss_mask[rest]]),
        )

    def _printed(self, text: str) -> list[int]:
        message = self._tokens.escape([{"role": "system", "content": text}])
        try:
            with ending(self._tokenizer):
                printed = str(self._tokenizer.apply_chat_template(message, tokenize=False))
        except (jinja2.TemplateError, *MISFITS) as error:
            raise ConfigError(
                f"algorithm.teacher.hint: the chat template of {self._tokenizer.name_or_path} prints no system message "
                f"alone ({error}); leave it out"
            ) from error
        return self._tokens.encode(bounded(self._tokenizer, printed))


# A server's answer about a micro-batch, as ``score`` or ``likeliest`` returns it.
Answer = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Teachers:
    """The teachers by data source, that of all other sources under the name "", and the hints that they read."""

    models: Mapping[str, Reference | TeacherEndpoint]
    hints: Hints | None = None
    top_k: int | None = None
    # Whether a row of a source without a teacher is refused.
    all_rows: bool = True

    @property
    def loaded(self) -> list[Reference]:
        """Those that are loaded beside the policy."""
        return [model for model in self.models.values() if not isinstance(model, TeacherEndpoint)]

    def read(self, rows: Sequence[Trajectory], tensors: Tensors) -> dict[str, Reading]:
        """Divide a micro-batch of ``rows``, which are in ``tensors``, among the teachers.

        Raises UserError for a row without a teacher, and for one with images that would get a hint or that several
        teachers would have to share.
        """
        names = [row.data_source if row.data_source in self.models else "" for row in rows]
        missing = next((row for row, name in zip(rows, names, strict=True) if name not in self.models), None)
        if missing is not None and self.all_rows:
            raise UserError(
                f"algorithm.teacher.by_source has no teacher for the data source {missing.data_source!r} of task "
                f"{missing.task_id}; name one, give algorithm.teacher.path, or set algorithm.teacher.rewards"
            )
        if self.hints is None and set(names) == {*self.models} and len(self.models) == 1:
            places = torch.arange(len(rows))
            return {names[0]: Reading(tensors, places, torch.zeros_like(places))}
        if any(row.media for row in rows):
            raise UserError(
                "rows show images, which algorithm.teacher.hint and by_source cannot move; use a path alone"
            )
        device, found = str(tensors.tokens.device), {}
        for name in self.models:
            own = [(place, row) for place, row in enumerate(rows) if names[place] == name]
            read = [row if self.hints is None else self.hints.before(row) for _, row in own]
            places = torch.tensor([place for place, _ in own], dtype=torch.int64)
            collated = collate(read, device=device) if read else empty_tensors(device)
            if read:
                # Rows that train nothing need no scores.
                collated.mask &= tensors.mask[places.to(device)].any(1)[:, None]
            shift = [len(new.token_ids) - len(old.token_ids) for new, (_, old) in zip(read, own, strict=True)]
            found[name] = Reading(collated, places, torch.tensor(shift, dtype=torch.int64))
        return found

    def ask(self, micros: Sequence[MicroBatch]) -> list[dict[str, Answer]]:
        """Return what the servers say about each micro-batch, by source: scores, or the ``top_k`` likeliest tokens."""
        found: list[dict[str, Answer]] = [{} for _ in micros]
        for name, model in self.models.items():
            if isinstance(model, TeacherEndpoint):
                read = [micro.readings[name].tensors for micro in micros]
                answers: Sequence[Answer] = (
                    model.score(read) if self.top_k is None else model.likeliest(read, self.top_k)
                )
                for into, answer in zip(found, answers, strict=True):
                    into[name] = answer
        return found

    def logprobs(self, micro: MicroBatch, answers: Mapping[str, Answer]) -> Tensor:
        """Return log-probabilities of a micro-batch's tokens, [B, T-1] on the host; a collective.

        Infinity stands in rows that no teacher reads.
        """
        parts = dict[str, Tensor]()
        for name, model in self.models.items():
            read = micro.readings[name]
            scored = answers[name] if isinstance(model, TeacherEndpoint) else model.forward(read.tensors).logprobs
            assert isinstance(scored, Tensor)
            parts[name] = read.aligned(scored.cpu(), micro.tensors.mask.shape[1])
        whole = torch.full(micro.tensors.mask.shape, torch.inf, dtype=next(iter(parts.values())).dtype)
        for name, part in parts.items():
            whole[micro.readings[name].places] = part
        return whole

    def divergence(
        self,
        micro: MicroBatch,
        answers: Mapping[str, Answer],
        logprobs: Tensor,
        measure: Callable[[Tensor, Teaching], Tensor],
    ) -> Tensor:
        """Return the divergence of the policy's ``logprobs`` [B, T-1, V], 0 in rows that no teacher reads.

        A collective. Raises UserError if a server names a token that the policy does not have.
        """
        width, first = logprobs.shape[1], logprobs[..., 0]
        # 0 everywhere, yet with a gradient, which every rank's backward pass needs.
        found = torch.where(torch.zeros_like(first, dtype=torch.bool), first, 0.0)
        for name, model in self.models.items():
            read = micro.readings[name]
            places = read.places.to(logprobs.device)
            if isinstance(model, TeacherEndpoint):
                values, tokens = (read.aligned(part, width) for part in answers[name])
                if len(places) and tokens.max() >= logprobs.shape[-1]:
                    raise UserError(
                        f"{model.key}: the server named token {int(tokens.max())}, and the policy has "
                        f"{logprobs.shape[-1]}; use a teacher with the policy's tokenizer"
                    )
                teaching: Teaching = values.to(logprobs), tokens.to(logprobs.device)
            else:
                whole = model.forward(read.tensors, frozenset({"distribution"})).distribution
                assert whole is not None
                teaching = read.aligned(whole, width)
            if len(places):
                found = found.index_put((places,), measure(logprobs[places], teaching))
        return found


def check_tokenizers(paths: Mapping[str, str], endpoints: Mapping[str, EndpointConfig], policy: str) -> None:
    """Raise ConfigError if a teacher numbers tokens in another way than the policy in folder ``policy``.

    The teachers come by their config keys. A teacher may have more tokens. Of a server's tokenizer, some hundred tokens
    are compared.
    """
    ours = AutoTokenizer.from_pretrained(policy, trust_remote_code=False)
    remedy = "a teacher scores the policy's tokens one by one; use one with the policy's tokenizer"
    for key, endpoint in endpoints.items():
        ids = sorted(ours.get_vocab().values())
        ids = ids[:: -(-len(ids) // COMPARED_TOKENS)]
        if (text := TeacherEndpoint(endpoint, key).detokenize(ids)) != ours.decode(ids):
            raise ConfigError(f"{key}: the server's tokenizer reads tokens {ids[:3]}... as {text[:40]!r}...; {remedy}")
    for key, path in paths.items():
        theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False).get_vocab()
        for token, number in sorted(ours.get_vocab().items(), key=lambda pair: pair[1]):
            if theirs.get(token) != number:
                its = theirs.get(token, "unknown")
                raise ConfigError(
                    f"{key}: token {token!r} is number {number} of the policy and {its} of {path}; {remedy}"
                )
