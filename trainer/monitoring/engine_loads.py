"""Reports what the engines do as metrics ``engine/...`` of a step, without waiting for them."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from rl_async.concurrency import gather_or_cancel, in_daemon_thread
from rl_async.errors import EngineError
from rl_async.messages import EngineList, EngineRecord
from rl_async.rollout_server.api import EngineLoad, EngineTokens

EVERY_S = 2.0  # at most so often
ANSWER_S = 2.0


class LoadClient(Protocol):
    """What is used here of an engine's client."""

    async def load(self) -> EngineLoad: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Observation:
    """The loads of the engines that answered, by id, at a time of a monotonic clock."""

    at: float
    loads: Mapping[str, EngineLoad]


class EngineLoads:
    """Asks every engine of ``directory()`` for its load between two steps, in a thread.

    The answers are those of the metrics of the next step that finds them complete; a step without any has no
    ``engine/...``.
    """

    def __init__(
        self,
        directory: Callable[[], EngineList],
        connect: Callable[[EngineRecord], LoadClient],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._connect, self._clock = directory, connect, clock
        self._pending: Future[Observation] | None = None
        self._last = Observation(-EVERY_S, {})

    def metrics(self) -> dict[str, float]:
        """Return the metrics of answers that have come, and ask again if it is time. Raises QueueLost."""
        found: dict[str, float] = {}
        if self._pending is not None and self._pending.done():
            observed, self._pending = self._pending.result(), None
            found = engine_metrics(self._last, observed)
            self._last = observed
        if self._pending is None and self._clock() - self._last.at >= EVERY_S:
            engines = self._directory().engines
            self._pending = in_daemon_thread(lambda: asyncio.run(self._observe(engines)), "engine loads")
        return found

    async def _observe(self, engines: list[EngineRecord]) -> Observation:
        loads = await gather_or_cancel(*(self._load(record) for record in engines))
        answered = {record.engine_id: load for record, load in zip(engines, loads, strict=True) if load is not None}
        return Observation(self._clock(), answered)

    async def _load(self, record: EngineRecord) -> EngineLoad | None:
        """Return None for an engine that does not answer in time, which others notice."""
        client = self._connect(record)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await client.load()
        except (EngineError, TimeoutError):
            return None
        finally:
            await client.close()


def engine_metrics(before: Observation, now: Observation) -> dict[str, float]:
    """Return the engines' state at ``now``, and what they did since ``before``; nothing if none answered.

    Sums over engines, but the mean of ``engine/cache_usage``, and of ``engine/prefix_hit_rate`` over tokens. Engines
    that were not there before, or do not count tokens or preemptions, are left out of what happened since.
    """
    loads = list(now.loads.values())
    if not loads:
        return {}
    found = {
        "engine/answering": float(len(loads)),
        "engine/running": float(sum(load.running for load in loads)),
        "engine/waiting": float(sum(load.waiting for load in loads)),
        "engine/cache_usage": sum(load.cache_usage for load in loads) / len(loads),
    }
    pairs = [(before.loads[engine], load) for engine, load in now.loads.items() if engine in before.loads]
    if not pairs:
        return found
    counts = [(old.preemptions, new.preemptions) for old, new in pairs]
    counted = [new - old for old, new in counts if old is not None and new is not None]
    if counted:
        found["engine/preemptions"] = float(sum(counted))
    tokens = [(old.tokens, new.tokens) for old, new in pairs if old.tokens is not None and new.tokens is not None]
    return found | _token_metrics(tokens, now.at - before.at)


def _token_metrics(pairs: list[tuple[EngineTokens, EngineTokens]], seconds: float) -> dict[str, float]:
    if not pairs:
        return {}
    looked_up = sum(new.looked_up - old.looked_up for old, new in pairs)
    rates = {
        "engine/prompt_tokens_per_s": sum(new.prompt - old.prompt for old, new in pairs) / seconds,
        "engine/sampled_tokens_per_s": sum(new.sampled - old.sampled for old, new in pairs) / seconds,
    }
    if looked_up:
        rates["engine/prefix_hit_rate"] = sum(new.found - old.found for old, new in pairs) / looked_up
    return rates
