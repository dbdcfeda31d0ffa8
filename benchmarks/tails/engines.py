"""A simulated engine behind the pool's own interface: how long tokens take, without a model.

An iteration gives every running sequence a token and takes ITERATION_S * (1 + running / SATURATED), so that a sequence
alone is decoded twice as fast as one of a full batch. A weight update pauses the engine; what runs goes on afterwards
with the new weights, or has ended before if the engine is drained first.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Callable

from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import EngineLoad, GenerateRequest, GenerateResult

MAX_BATCH = 32  # sequences that are decoded at once
SATURATED = 32  # at so many, an iteration takes twice as long as with one
ITERATION_S = 0.01
TOKEN, LOGPROB = 7, -1.0


def iteration_s(running: int) -> float:
    """Seconds of an iteration that gives each running sequence a token."""
    return ITERATION_S * (1 + running / SATURATED)


CAPACITY = MAX_BATCH / iteration_s(MAX_BATCH)  # tokens per second of a full batch


class _Answer:
    """An answer of a known length that is being sampled."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.began = 0.0  # the engine's iterations when it began
        self.future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()


class Engine:
    """Counts iterations as a fraction of time, and computes when the next sequence ends; nothing happens in between."""

    def __init__(self, tokens_of: Callable[[str], int]) -> None:
        """``tokens_of`` tells the length of the answer to a request, by the request's id."""
        self._tokens_of, self._loop = tokens_of, asyncio.get_running_loop()
        self._waiting: deque[_Answer] = deque()
        self._running: list[tuple[float, int, _Answer]] = []  # a heap, by the iteration in which they end
        self._iterations, self._at, self._order = 0.0, self._loop.time(), 0
        self._versions = [(0.0, Version())]  # with the iteration from which on each sampled
        self._timer: asyncio.TimerHandle | None = None
        self._paused, self._draining = False, False
        self._empty = asyncio.Event()
        self.sampled = 0.0  # tokens since the start

    async def stream(self, request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]:
        """Yield the whole answer when it has been sampled."""
        answer = _Answer(self._tokens_of(request.request_id))
        self._waiting.append(answer)
        self._go_on()
        yield await answer.future

    async def load(self) -> EngineLoad:
        """Report how many requests are here."""
        return EngineLoad(running=len(self._running), waiting=len(self._waiting), cache_usage=0.1)

    async def is_sleeping(self) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def drain(self) -> None:
        """Begin no sequence, and wait until those that run have ended."""
        self._draining = True
        while self._running:
            self._empty.clear()
            await self._empty.wait()

    def pause(self) -> None:
        """Stop where it is."""
        self.advance()
        self._paused = True
        self._go_on()

    def resume(self, version: Version) -> None:
        """Go on, with these weights."""
        self.advance()
        self._versions.append((self._iterations, version))
        self._paused = self._draining = False
        self._go_on()

    def advance(self) -> None:
        """Count what was sampled until now."""
        now = self._loop.time()
        if self._running and not self._paused:
            iterations = (now - self._at) / iteration_s(len(self._running))
            self._iterations += iterations
            self.sampled += iterations * len(self._running)
        self._at = now

    def _go_on(self) -> None:
        """Answer what has ended, begin what waits, and come again when the next sequence ends."""
        self.advance()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._running and self._running[0][0] <= self._iterations + 1e-6:
            self._finish(heapq.heappop(self._running)[2])
        if self._paused:
            return
        while self._waiting and len(self._running) < MAX_BATCH and not self._draining:
            answer = self._waiting.popleft()
            answer.began = self._iterations
            self._order += 1
            heapq.heappush(self._running, (self._iterations + answer.tokens, self._order, answer))
        if self._running:
            left = self._running[0][0] - self._iterations
            self._timer = self._loop.call_later(left * iteration_s(len(self._running)), self._go_on)
        else:
            self._empty.set()

    def _finish(self, answer: _Answer) -> None:
        runs: list[VersionRun] = []
        ends = [since for since, _ in self._versions[1:]] + [self._iterations]
        for (since, version), end in zip(self._versions, ends, strict=True):
            first, last = (min(answer.tokens, max(0, round(at - answer.began))) for at in (since, end))
            if last > first:
                runs.append(VersionRun(version, first, last))
        if not answer.future.done():
            tokens = answer.tokens
            answer.future.set_result(
                GenerateResult(
                    token_ids=[TOKEN] * tokens, logprobs=[LOGPROB] * tokens, versions=runs, finish_reason="stop"
                )
            )
