"""Short samples from every engine, drawn after a publication while the trainer waits for its next batch."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_async.errors import EngineError
from rl_async.messages import EngineList, EngineRecord, Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.threads import in_daemon_thread

PROMPT_TOKENS = 8

log = logging.getLogger("rl_async.mismatch")


class Engine(Protocol):
    """What is needed of an engine client."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Canary:
    """What one engine sampled: ``logprobs`` are those of the last ``len(logprobs)`` of ``token_ids``."""

    engine_id: str
    token_ids: list[int]
    logprobs: list[float]


class Canaries:
    """Asks every engine of ``directory()`` for ``tokens`` tokens after a prompt of random ones below ``vocabulary``."""

    def __init__(
        self,
        directory: Callable[[], EngineList],
        connect: Callable[[EngineRecord], Engine],
        *,
        vocabulary: int,
        tokens: int,
        temperature: float,
        timeout_s: float,
    ) -> None:
        self._directory, self._connect, self._vocabulary = directory, connect, vocabulary
        self._tokens, self._sampling, self._timeout_s = tokens, Sampling(temperature=temperature), timeout_s
        self._asked: Future[list[Canary]] | None = None
        self.asked = 0  # engines, by the latest ``send``

    def send(self, version: Version) -> None:
        """Ask the engines that serve exactly this version, in a thread of its own. Raises QueueLost."""
        engines = [record for record in self._directory().engines if record.version == version]
        self.asked = len(engines)
        self._asked = in_daemon_thread(lambda: asyncio.run(self._ask_all(engines, version)), "canaries")

    def collect(self) -> list[Canary]:
        """Of the engines that answered since ``send``; none if nobody was asked. Waits until the deadline."""
        asked, self._asked = self._asked, None
        return asked.result() if asked is not None else []

    async def _ask_all(self, engines: Sequence[EngineRecord], version: Version) -> list[Canary]:
        answers = await asyncio.gather(*(self._ask(record, version) for record in engines))
        return [canary for canary in answers if canary is not None]

    async def _ask(self, record: EngineRecord, version: Version) -> Canary | None:
        """None for an engine that is lost or busy beyond the deadline: that is noticed elsewhere."""
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
            log.warning("%s sampled no tokens to compare: %s", record.engine_id, error or type(error).__name__)
            return None
        finally:
            await engine.close()
        if not got.token_ids:  # given up at once
            return None
        return Canary(record.engine_id, request.token_ids + got.token_ids, got.logprobs)
