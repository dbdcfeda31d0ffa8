"""A simulated clock, and engines on it that only take time.

An engine is a batched server: each running sequence gains one token per iteration, whose length depends on how many
run.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable

from rl_async.launcher.capacity.costs import Costs

_TOKEN_ROUNDING = 1e-6  # a sequence that lacks this little of its last token has ended

_Running = tuple[float, int, Callable[[], None]]  # where its tokens end, its turn among equals, what follows


class SimulatedClock:
    """A clock that jumps from one scheduled action to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` in ``seconds``; of two at the same time, the one scheduled first runs first."""
        self._count += 1
        heapq.heappush(self._due, (self.now + max(0.0, seconds), self._count, action))

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._due:
            return False
        self.now, _, action = heapq.heappop(self._due)
        action()
        return True


class SimulatedEngine:
    """A batch of sequences that gain tokens together.

    ``_tokens`` counts the tokens that a sequence would have gained since the start, so that a sequence ends when the
    count has grown by its length. At most one scheduled action of an engine is in force: a sequence that joins makes
    the others slower, so what was scheduled before that comes too early, and is scheduled again when it comes.
    """

    def __init__(
        self, clock: SimulatedClock, costs: Costs, max_batch: int, left: Callable[[], None] = lambda: None
    ) -> None:
        """``left`` is called when sequences have ended, before their own actions."""
        self._clock, self._max_batch, self._left = clock, max_batch, left
        self._base_s, self._sequence_s = costs.iteration_base_s, costs.iteration_sequence_s
        self._running: list[_Running] = []
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._tokens, self._since, self._added = 0.0, 0.0, 0
        self._due = math.inf  # of the scheduled action that is in force
        self.load = 0  # sequences, waiting ones among them
        self.paused = False
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which it has decoded until now."""
        self._advance()
        return self._busy_s

    def add(self, tokens: int, done: Callable[[], None]) -> None:
        """Decode ``tokens``, now or when there is room."""
        self.load += 1
        if len(self._running) < self._max_batch:
            self._advance()
            if self._start(tokens, done) is self._running[0]:
                self._schedule()  # else the first one ends later than scheduled, not earlier
        else:
            self._waiting.append((tokens, done))

    def pause(self, on: bool) -> None:
        """Stop decoding and keep the sequences, or resume."""
        self._advance()
        self.paused = on
        self._schedule()

    def _start(self, tokens: int, done: Callable[[], None]) -> _Running:
        self._added += 1
        started = (self._tokens + tokens, self._added, done)
        heapq.heappush(self._running, started)
        return started

    def _advance(self) -> None:
        now = self._clock.now
        if now == self._since:
            return
        if self._running and not self.paused:
            passed = now - self._since
            self._tokens += passed / (self._base_s + self._sequence_s * len(self._running))
            self._busy_s += passed
        self._since = now

    def _schedule(self) -> None:
        """Have the end of the first sequence looked at no later than when it comes."""
        if not self._running or self.paused:
            return
        now, tokens = self._clock.now, self._running[0][0] - self._tokens
        due = now + tokens * (self._base_s + self._sequence_s * len(self._running))
        due = max(due, math.nextafter(now, math.inf))  # so that time passes even if rounding leaves less
        if due < self._due:
            self._due = due
            self._clock.after(due - now, lambda: self._look(due))

    def _look(self, due: float) -> None:
        """End the sequences that have all their tokens by now."""
        if due != self._due:
            return  # an earlier look was scheduled since
        self._due = math.inf
        self._advance()
        if self.paused or not self._running:
            return
        ended = []
        while self._running and self._running[0][0] <= self._tokens + _TOKEN_ROUNDING:
            ended.append(heapq.heappop(self._running)[2])
        self.load -= len(ended)
        while self._waiting and len(self._running) < self._max_batch:
            self._start(*self._waiting.popleft())
        self._schedule()
        if ended:
            self._left()
        for done in ended:
            done()


class Pool:
    """Engines with least-loaded routing. ``_by_load`` is a heap that also holds outdated entries."""

    def __init__(self, clock: SimulatedClock, costs: Costs, engines: int, max_batch: int) -> None:
        self._by_load = [(0, number) for number in range(engines)]
        self._engines = [
            SimulatedEngine(clock, costs, max_batch, lambda number=number: self._note(number))  # type: ignore[misc]
            for number in range(engines)
        ]

    def _note(self, number: int) -> None:
        heapq.heappush(self._by_load, (self._engines[number].load, number))

    def add(self, tokens: int, done: Callable[[], None]) -> None:
        """Decode ``tokens`` on the least-loaded engine."""
        while self._by_load[0][0] != self._engines[self._by_load[0][1]].load:
            heapq.heappop(self._by_load)
        load, number = self._by_load[0]
        heapq.heapreplace(self._by_load, (load + 1, number))
        self._engines[number].add(tokens, done)

    def pause(self, on: bool) -> None:
        """Stop decoding on all engines, or resume."""
        for engine in self._engines:
            engine.pause(on)

    def busy_s(self) -> float:
        """Return the busy seconds of an engine, averaged over the engines."""
        return sum(engine.busy_s for engine in self._engines) / len(self._engines)
