"""The scorer ``reward_model``: a sequence classifier with one label, behind vLLM's ``/classify``.

The conversation is rendered here, by the reward model's own chat template, and sent as token ids, so that the run's own
server and any engine score the same tokens; training uses the same rendering. The reward is the classifier's raw
output, without an activation. AutoTokenizer would import torch, so this uses PreTrainedTokenizerFast.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async import tracing
from rl_async.concurrency import gather_or_cancel, off_loop
from rl_async.configs.schema.reward import RewardModelConfig
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE
from rl_async.messages import Turn
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.model_client import Poster, read_api_key
from rl_async.template_tokens import TemplateTokens, read_tokenizer

Message = dict[str, Any]


def load_tokenizer(path: str, key: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder. Raises ConfigError, naming ``key``, if it or its chat template is missing."""
    # Transformers would look for a missing folder on the Hub.
    if not Path(path).is_dir():
        raise ConfigError(f"{key}: there is no folder {path}")
    try:
        tokenizer = read_tokenizer(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {path} has no usable tokenizer: {error}") from error
    if not tokenizer.chat_template:
        raise ConfigError(f"{key}: the tokenizer in {path} has no chat template; save one with it")
    return tokenizer


def as_messages(turns: Sequence[Turn]) -> list[Message]:
    """Convert an episode's turns to chat messages."""
    return [{"role": turn.role, "content": turn.text} for turn in turns]


class ConversationEncoder:
    """Encodes finished conversations by the tokenizer's chat template; only the template writes special tokens.

    The policy's text is untrusted, too: it must not forge turns for the model that grades it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._tokens = tokenizer, TemplateTokens(tokenizer)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Encode one conversation; no special tokens are added."""
        escaped = [self._tokens.escape(message) for message in messages]
        return self._tokens.encode(str(self._tokenizer.apply_chat_template(escaped, tokenize=False)))


# With their pauses, the attempts span more than a minute, the time that a restarting server needs.
ATTEMPTS = 12
BACKOFF_S = 0.25


class _Classify(msgspec.Struct):
    """vLLM's request for one sequence; without ``use_activation`` it returns the logit instead of its sigmoid."""

    model: str
    input: list[int]
    use_activation: bool = False


class _Item(msgspec.Struct):
    probs: list[float]


class _Classified(msgspec.Struct):
    data: list[_Item]


class RewardModel:
    """The client of one server. If the config names none, ``url`` and ``token`` are those of the run's own server.

    Raises ConfigError if there is neither, if the environment lacks the API key, or the tokenizer cannot be used.
    """

    def __init__(self, config: RewardModelConfig, url: str, token: str = "") -> None:
        base = config.url or url
        if not base:
            raise ConfigError("reward.model.url: no server runs the reward model here; give the URL of one")
        self._name, self._is_own = config.name or config.path, not config.url
        self._steps = config.steps
        self._encoder = ConversationEncoder(load_tokenizer(config.path, "reward.model.path"))
        self._poster = Poster(
            f"{base.rstrip('/')}/classify",
            section="reward.model",
            timeout_s=config.timeout_s,
            attempts=ATTEMPTS,
            backoff_s=BACKOFF_S,
            max_concurrent=config.max_concurrent,
            api_key=read_api_key(config.api_key_env, "reward.model.api_key_env") if config.url else token,
        )

    async def score(self, conversation: Conversation) -> Score:
        """Return the model's output for the whole conversation. Raises ScorerFailed.

        With ``reward.model.steps`` its ``turns`` are the differences between outputs after one turn of the policy and
        the next, the first to 0: rewards that shape by a potential, whose sum stays the whole output (Ng et al., 1999).
        """
        turns = conversation.turns
        ends = [place + 1 for place, turn in enumerate(turns) if turn.role == "assistant"]
        if not self._steps or len(ends) < 2:
            return Score(await self._output(turns))
        outputs = await gather_or_cancel(*(self._output(turns[:end]) for end in [*ends[:-1], len(turns)]))
        return Score(outputs[-1], turns=tuple(b - a for a, b in pairwise([0.0, *outputs[:-1]])))

    async def _output(self, turns: Sequence[Turn]) -> float:
        size = sum(len(turn.text) for turn in turns)
        token_ids = await off_loop(size, self._encoder.ids, as_messages(turns))
        above = tracing.above() if self._is_own else ""
        raw = await self._poster.post(_Classify(self._name, token_ids), {tracing.HEADER: above} if above else None)
        try:
            data = msgspec.json.decode(raw, type=_Classified).data
        except UNDECODABLE as error:
            raise ScorerFailed(f"{self._poster.url} did not answer with a classification: {error}") from error
        if len(data) != 1 or len(data[0].probs) != 1 or not math.isfinite(data[0].probs[0]):
            raise ScorerFailed(f"{self._poster.url} answered {data!r:.200}, not one number; has the model one label?")
        return data[0].probs[0]

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._poster.close()
