"""What the system needs from any rollout engine, and the request and result of one generation.

Narrow Protocols, one per consumer: agent loops generate (below), the pool streams and probes (``pool.py``), the
weight-sync coordinator updates (``weight_sync/protocol.py``). ``vllm.py`` implements all of them over HTTP; the
embedded engine serves the same dialect.
"""

from typing import Literal, Protocol

import msgspec

from rl_async.messages import Sampling, Version, VersionRun

PauseMode = Literal["keep", "wait", "abort"]
FinishReason = Literal["stop", "length", "abort"]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids in. ``max_tokens`` bounds the sampled tokens of this request."""

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]
    seed: int | None = None
    min_version: Version = Version()


class GenerateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids out: ``token_ids`` and ``logprobs`` have one entry per sampled token, the stop token included.

    ``versions`` covers ``[0, len(token_ids))`` in order. ``abort``: this is what was sampled so far; a part of a stream
    has that reason too while more is to come.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionRun]
    finish_reason: FinishReason


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an engine says it is, over all its clients."""

    requests: int  # running and waiting
    cache_usage: float  # share of the KV cache in use, 0 to 1
    preemptions: int  # requests put back since the start; paused engines count theirs too


class Generator(Protocol):
    """What an agent loop sees: it cannot tell where generation runs."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample a continuation. ``session`` names the conversation, for stickiness.

        Raises EngineRejected for a request that no engine will take, EngineLost when none could serve it in time.
        """
        ...
