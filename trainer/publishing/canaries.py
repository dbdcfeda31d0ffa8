"""Draws short samples from every engine after a publication, while the trainer waits for its next batch."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_async.concurrency import gather_or_cancel, in_daemon_thread
from rl_async.errors import EngineError
from rl_async.messages import EngineList, EngineRecord, Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, Generator

PROMPT_TOKENS = 8

log = logging.getLogger("rl_async.mismatch")


class CanaryEngine(Generator, Protocol):
    """An engine client as canaries need it: it generates, and can be closed."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Canary:
    """A sample of one engine: ``logprobs`` belong to the last ``len(logprobs)`` tokens of ``token_ids``.

    ``experts`` [tokens, layers, k] are those that the first tokens went through, if the engine records them.
    """

    engine_id: str
    token_ids: list[int]
    logprobs: list[float]
    experts: np.ndarray | None = None


class Canaries:
    """Has each engine of ``directory()`` sample ``tokens`` tokens after a random prompt of ids below ``vocabulary``."""

    def __init__(
        self,
        directory: Callable[[], EngineList],
        connect: Callable[[EngineRecord], CanaryEngine],
        *,
        vocabulary: int,
        tokens: int,
        temperature: float,
        timeout_s: float,
    ) -> None:
        self._directory, self._connect, self._vocabulary = directory, connect, vocabulary
        self._tokens, self._sampling, self._timeout_s = tokens, Sampling(temperature=temperature), timeout_s
        self._pending: Future[list[Canary]] | None = None
        self.requested = 0  # engines that the latest ``send`` addressed

    def send(self, version: Version) -> None:
        """Start sampling, in a thread, on the engines that serve exactly this version. Raises QueueLost."""
        engines = [record for record in self._directory().engines if record.version == version]
        self.requested = len(engines)
        self._pending = in_daemon_thread(lambda: asyncio.run(self._sample_all(engines, version)), "canaries")

    def collect(self) -> list[Canary]:
        """Return the samples since ``send``, none without one. Blocks until all engines answered or timed out."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else []

    async def _sample_all(self, engines: Sequence[EngineRecord], version: Version) -> list[Canary]:
        answers = await gather_or_cancel(*(self._sample(record, version) for record in engines))
        return [canary for canary in answers if canary is not None]

    async def _sample(self, record: EngineRecord, version: Version) -> Canary | None:
        """Return None for an engine that is lost or busy beyond the deadline, which others notice."""
        prompt = np.random.default_rng([version.lineage, version.step]).integers(0, self._vocabulary, PROMPT_TOKENS)
        request = GenerateRequest(
            request_id=f"canary-{version}",
            token_ids=prompt.tolist(),
            sampling=self._sampling,
            max_tokens=self._tokens,
            stop_token_ids=[],
            min_version=version,
        )
        engine = self._connect(record)
        try:
            async with asyncio.timeout(self._timeout_s):
                got = await engine.generate(request, session="")
        except (EngineError, TimeoutError) as error:
            log.warning(
                "engine %s returned no tokens to compare: %s", record.engine_id, str(error) or type(error).__name__
            )
            return None
        finally:
            await engine.close()
        if not got.token_ids:  # aborted before its first token
            return None
        experts = None if got.routes is None else got.routes.experts
        return Canary(record.engine_id, request.token_ids + got.token_ids, got.logprobs, experts)
