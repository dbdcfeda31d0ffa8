"""One generation: its request, its result, and the Protocol by which agent loops ask for it.

Every consumer of an engine has a narrow Protocol of its own: agent loops generate (``Generator`` below), the pool
streams and probes (``pool.py``), the weight-sync coordinator updates (``weight_sync/protocol.py``). The clients in
``vllm/`` and ``sglang/`` implement all of them.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from rl_async.messages import Sampling, Version, VersionRun

PauseMode = Literal["keep", "wait", "abort"]
FinishReason = Literal["stop", "length", "abort"]
Heard = Callable[[Sequence[int]], None]  # called with all tokens sampled so far, whenever there are more


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as token ids, and how to continue it. ``max_tokens`` bounds the sampled tokens of this request.

    With a ``json_schema`` (JSON text) engines mask tokens that would break it: the answer fits it unless it is cut
    short, and log-probabilities are those of the masked distribution, renormalised.
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    seed: int | None = None
    min_version: Version = Version()
    json_schema: str = ""  # empty: any text
    routed_from: int = 0  # the first token whose experts are wanted, of those that the engine records
    traceparent: str = ""  # the span (W3C) below which the engine adds its own; empty: it adds none


class Routes(msgspec.Struct, frozen=True):
    """The experts of a mixture that the tokens from ``start`` on went through, counted from the prompt's first one.

    ``experts`` is uint8 or uint16 [tokens, layers, k]. The last sampled token was not fed to the model and has none.
    """

    start: int
    experts: np.ndarray


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: ``token_ids`` and ``logprobs`` have one entry per sampled token, the stop token included.

    ``versions`` covers ``[0, len(token_ids))`` in order. ``finish_reason`` is ``abort`` for a request that was given
    up, whose result is what had been sampled by then, and for every part of a stream but the last, which alone may have
    ``routes``, of prompt and answer.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionRun]
    finish_reason: FinishReason
    engine: str = ""  # id of the one that sampled last; a pool names it
    routes: Routes | None = None  # None: the engine records none


class EngineTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens since the engine's start."""

    prompt: int
    sampled: int
    looked_up: int  # tokens of prompts, by those engines that look for them in the cache
    found: int  # of these, in the cache


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine reports to be, over all its clients."""

    running: int  # requests that are decoded
    waiting: int
    cache_usage: float  # share of the KV cache in use, 0 to 1
    preemptions: int | None = None  # since the start, those by a pause included; of an engine that counts them
    preempted: int | None = None  # requests that wait now after a preemption; of an engine that tells
    tokens: EngineTokens | None = None  # of an engine that counts them

    @property
    def requests(self) -> int:
        """Requests that are decoded or wait."""
        return self.running + self.waiting


class Generator(Protocol):
    """What an agent loop samples from: one engine, a pool of them, or an engine in its own process."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample a continuation. ``session`` names the conversation, for stickiness.

        Raises EngineRejected for a request that no engine will accept, EngineLost when none could serve it in time.
        """
        ...


class StreamingGenerator(Protocol):
    """A Generator that reports tokens while they are sampled."""

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        """Sample a continuation, as a Generator does."""
        ...
