"""What the system needs from any rollout engine, and the request and result of one generation.

Three narrow Protocols, one per consumer: agent loops generate, the weight-sync coordinator updates, the launcher and
the pool probe. ``vllm.py`` implements all three over HTTP; the embedded engine serves the same dialect.
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

    ``versions`` covers ``[0, len(token_ids))`` in order. ``abort`` returns what was sampled so far.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionRun]
    finish_reason: FinishReason


class Generator(Protocol):
    """What an agent loop sees: it cannot tell where generation runs."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample a continuation. ``session`` names the conversation, for stickiness.

        Raises EngineRejected for a request that no engine will take, EngineLost when none could serve it in time.
        """
        ...
