"""One generation: its request, its result, and the Protocol by which agent loops ask for it.

Every consumer of an engine has a narrow Protocol of its own: agent loops generate (``Generator`` below), the pool
streams and probes (``pool.py``), the weight-sync coordinator updates (``weight_sync/protocol.py``). The clients in
``vllm/`` and ``sglang/`` implement all of them.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

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


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: ``token_ids`` and ``logprobs`` have one entry per sampled token, the stop token included.

    ``versions`` covers ``[0, len(token_ids))`` in order. ``finish_reason`` is ``abort`` for a request that was given
    up, whose result is what had been sampled by then, and for every part of a stream but the last.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionRun]
    finish_reason: FinishReason


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine reports to be, over all its clients."""

    requests: int  # running and waiting
    cache_usage: float  # share of the KV cache in use, 0 to 1
    preemptions: int  # requests preempted since the start, those preempted by a pause included


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
