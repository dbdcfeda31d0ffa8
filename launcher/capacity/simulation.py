"""A run as a discrete-event simulation: the real queue (``Store``) on a simulated clock, engines and a trainer that
only take time.

Consumes settings, costs and recorded episodes; produces what ``metrics.jsonl`` would say. Pure: no clock, no files, and
the same seed gives the same run. An engine is a batched server: each running sequence gains one token per iteration,
whose length depends on how many run.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from rl_async.errors import ProtocolError, UserError
from rl_async.launcher.capacity.costs import Costs, EpisodeShape
from rl_async.messages import LeasedGroup, Refused, Reserved, TrajectoryHeader, Version, VersionRun
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.state.store import Store
from rl_async.transfer_queue.state.tasks import Counted

WORKER = "simulated"


class DeviceSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How devices are divided between engines and trainer ranks. Colocated, both have all of them and take turns."""

    engines: int
    ranks: int
    colocated: bool
    max_batch: int  # sequences decoded at once per engine
    concurrency: int  # concurrent conversations of all workers


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps after the first ``warm`` ones."""

    step_s: float
    tokens_per_s: float
    trainer_idle: float  # share of time in which it waits for a batch
    engine_idle: float  # share of time in which an engine decodes nothing
    staleness_mean: float  # of the first token of a row
    staleness_max: float


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
    count has grown by its length.
    """

    def __init__(self, clock: SimulatedClock, costs: Costs, max_batch: int) -> None:
        self._clock, self._costs, self._max_batch = clock, costs, max_batch
        self._running: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._tokens, self._since, self._plan, self._added = 0.0, 0.0, 0, 0
        self.paused = False
        self.busy_s = 0.0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self, tokens: int, done: Callable[[], None]) -> None:
        """Decode ``tokens``, now or when there is room."""
        self._advance()
        self._waiting.append((tokens, done))
        self._refill()

    def pause(self, on: bool) -> None:
        """Stop decoding and keep the sequences, or resume."""
        self._advance()
        self.paused = on
        self._refill()

    def _advance(self) -> None:
        now = self._clock.now
        if self._running and not self.paused:
            self._tokens += (now - self._since) / self._costs.iteration_s(len(self._running))
            self.busy_s += now - self._since
        self._since = now

    def _refill(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            tokens, done = self._waiting.popleft()
            self._added += 1
            heapq.heappush(self._running, (self._tokens + tokens, self._added, done))
        self._plan += 1
        if self._running and not self.paused:
            left = (self._running[0][0] - self._tokens) * self._costs.iteration_s(len(self._running))
            plan = self._plan
            self._clock.after(left, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return  # the batch has changed since
        self._advance()
        ended = []
        while self._running and self._running[0][0] <= self._tokens + 1e-6:
            ended.append(heapq.heappop(self._running)[2])
        self._refill()
        for done in ended:
            done()


class Pool:
    """Engines with least-loaded routing. ``_by_load`` is a heap that also holds outdated entries."""

    def __init__(self, clock: SimulatedClock, costs: Costs, layout: DeviceSplit) -> None:
        self._engines = [SimulatedEngine(clock, costs, layout.max_batch) for _ in range(layout.engines)]
        self._by_load = [(0, number) for number in range(layout.engines)]

    def add(self, tokens: int, done: Callable[[], None]) -> None:
        """Decode ``tokens`` on the least-loaded engine."""
        while self._by_load[0][0] != self._engines[self._by_load[0][1]].load:
            heapq.heappop(self._by_load)
        load, number = self._by_load[0]
        heapq.heapreplace(self._by_load, (load + 1, number))

        def ended() -> None:
            heapq.heappush(self._by_load, (self._engines[number].load, number))
            done()

        self._engines[number].add(tokens, ended)

    def pause(self, on: bool) -> None:
        """Stop decoding on all engines, or resume."""
        for engine in self._engines:
            engine.pause(on)

    def busy_s(self) -> float:
        """Return the busy seconds of an engine, averaged over the engines."""
        return sum(engine.busy_s for engine in self._engines) / len(self._engines)


class Simulation:
    """A simulated run: the queue's ``Store`` with simulated engines, workers and trainer."""

    def __init__(
        self,
        settings: QueueSettings,
        layout: DeviceSplit,
        costs: Costs,
        episodes: Sequence[EpisodeShape],
        seed: int = 0,
    ) -> None:
        self._settings, self._layout, self._costs, self._episodes = settings, layout, costs, episodes
        self._random = random.Random(seed)
        self._clock = SimulatedClock()
        self._store = Store(settings, Counted(), [], lambda transition: None)
        self._engines = Pool(self._clock, costs, layout)
        self._live, self._ready = 0, 0  # conversations; complete groups that are in no batch
        self._missing: dict[int, int] = {}  # samples, by group
        self._step, self._published = 0, 0
        self._waiting_since: float | None = None
        self._ends: list[float] = []
        self._waits: list[float] = []
        self._busy: list[float] = []  # seconds of an engine, at the end of each step
        self._tokens: list[int] = []
        self._staleness: list[list[int]] = []

    def run(self, warm: int = 2) -> SimulationResult:
        """Train all steps. Raises ProtocolError if the run stalls before that."""
        if self._settings.steps <= warm + 1:
            raise UserError(f"a simulated run needs at least {warm + 2} steps")
        self._publish()
        while len(self._ends) < self._settings.steps:
            if not self._clock.step():
                raise ProtocolError(f"the simulated run stalls at step {self._step}")
        first, last = self._ends[warm - 1], self._ends[-1]
        rows = [age for ages in self._staleness[warm:] for age in ages]
        busy = (self._busy[-1] - self._busy[warm - 1]) / (last - first)
        return SimulationResult(
            step_s=(last - first) / (len(self._ends) - warm),
            tokens_per_s=sum(self._tokens[warm:]) / (last - first),
            trainer_idle=sum(self._waits[warm:]) / (last - first),
            engine_idle=1 - busy,
            staleness_mean=sum(rows) / len(rows),
            staleness_max=max(rows),
        )

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._step < self._settings.steps:
            self._waiting_since = self._clock.now
            self._reserve()

    def _reserve(self) -> None:
        if self._waiting_since is None or self._ready < self._settings.batch_groups:
            return
        reply = self._store.batches.reserve(self._step, self._clock.now)
        if not isinstance(reply, Reserved):
            return  # tried again when a group is ready
        self._ready -= self._settings.batch_groups
        self._waits.append(self._clock.now - self._waiting_since)
        self._waiting_since = None
        tokens = sum(header.tokens for header in reply.headers)
        self._tokens.append(tokens)
        self._staleness.append([self._step - header.versions[0].version.step for header in reply.headers])
        if self._layout.colocated:
            self._engines.pause(True)
        self._clock.after(tokens * self._costs.train_token_s / self._layout.ranks, self._trained)

    def _trained(self) -> None:
        self._store.batches.commit(self._step)
        self._engines.pause(True)  # for the weights
        self._clock.after(self._costs.sync_s, self._synced)

    def _synced(self) -> None:
        self._step += 1
        self._published = self._step
        self._publish()
        self._store.retire(self._step)

    def _publish(self) -> None:
        self._store.publish(Version(0, self._published), [])
        self._engines.pause(False)
        self._lease()
        self._clock.after(
            self._costs.other_s if self._step else 0.0, self._end_step if self._step else self._begin_step
        )

    def _end_step(self) -> None:
        self._ends.append(self._clock.now)
        self._busy.append(self._engines.busy_s())
        self._begin_step()

    # --- the workers ------------------------------------------------------------------------------------------------

    def _lease(self) -> None:
        room = (self._layout.concurrency - self._live) // self._settings.group_size
        if room <= 0:
            return
        self._store.delivery.renew(WORKER, self._clock.now)
        for group in self._store.delivery.lease(WORKER, room, self._clock.now).groups:
            self._missing[group.group_id] = len(group.samples)
            for sample in group.samples:
                self._live += 1
                self._play(group, sample, self._random.choice(self._episodes), 0, self._published)

    def _play(self, group: LeasedGroup, sample: int, episode: EpisodeShape, turn: int, version: int) -> None:
        """Play a turn (time to the first token, its tokens, its tools), then the next one."""
        if turn == episode.turns:
            self._put(group, sample, episode, version)
            return
        tokens = episode.sampled // episode.turns + (turn < episode.sampled % episode.turns)
        outside = episode.outside_s / episode.turns

        def generated() -> None:
            self._clock.after(outside, lambda: self._play(group, sample, episode, turn + 1, version))

        def prefilled() -> None:
            self._engines.add(max(1, tokens), generated)

        self._clock.after(self._costs.turn_s, prefilled)

    def _put(self, group: LeasedGroup, sample: int, episode: EpisodeShape, version: int) -> None:
        header = TrajectoryHeader(
            group_id=group.group_id,
            sample=sample,
            attempt=group.attempt,
            partition=group.partition,
            episode_id=f"{group.group_id}.{sample}",
            segment=0,
            tokens=episode.tokens,
            sampled=episode.sampled,
            reward=float(sample % 2),  # so that no group has equal rewards
            finish_reason="stop",
            versions=[VersionRun(Version(0, version), 0, episode.sampled)],
            tokens_hash="",
        )
        answer = self._store.delivery.put(WORKER, [header], self._clock.now)
        if isinstance(answer, Refused):
            raise ProtocolError(f"the queue refused group {group.group_id}: {answer.reason}")
        self._live -= 1
        self._missing[group.group_id] -= 1
        if not self._missing[group.group_id]:
            del self._missing[group.group_id]
            self._ready += 1
            self._reserve()
            self._lease()
