"""A run as a discrete-event simulation: the real queue (``Store``) on a simulated clock, engines and a trainer that
only take time.

Consumes settings, costs and recorded episodes; produces what ``metrics.jsonl`` would say. Pure: no clock, no files, and
the same seed gives the same run. A group is one sample of the store, handed over with the group's last conversation:
what the store decides depends on groups alone, and this makes a simulation several times as fast.
"""

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from rl_async.errors import ProtocolError, UserError
from rl_async.launcher.capacity.costs import Costs, EpisodeShape
from rl_async.launcher.capacity.engines import Pool, SimulatedClock
from rl_async.messages import LeasedGroup, Refused, Reserved, TrajectoryHeader, Version, VersionRun
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.store import Store

WORKER = "simulated"


class DeviceSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How devices are divided between engines and trainer ranks. Colocated, both have all of them and take turns."""

    engines: int
    ranks: int
    colocated: bool
    max_batch: int  # sequences decoded at once per engine
    concurrency: int  # concurrent conversations of all workers


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps that are measured."""

    step_s: float
    tokens_per_s: float
    trainer_idle: float  # share of time in which it waits for a batch
    engine_idle: float  # share of time in which an engine decodes nothing
    staleness_mean: float  # of the first token of a row
    staleness_max: float


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
        """``settings`` are the run's; its groups all have a signal."""
        self._settings, self._layout, self._costs, self._episodes = settings, layout, costs, episodes
        self._random = random.Random(seed)
        self._clock = SimulatedClock()
        whole = msgspec.structs.replace(settings, group_size=1, max_refills=0)
        self._store = Store(whole, Counted(), [], lambda transition: None)
        self._engines = Pool(self._clock, costs, layout.engines, layout.max_batch)
        self._live = 0  # conversations
        self._step, self._published = 0, 0
        self._waiting_since: float | None = None
        self._ends: list[float] = []
        self._waits: list[float] = []
        self._busy: list[float] = []  # seconds of an engine, at the end of each step
        self._tokens: list[int] = []
        self._staleness: list[list[int]] = []  # of the groups of each step

    def run(self, warm: int = 2, measured: int | None = None) -> SimulationResult:
        """Train ``measured`` steps after the first ``warm`` ones, or all others, and return means over them.

        Where fewer than all are measured, engines do not run out of groups towards the end, as they do in a run.
        Raises ProtocolError if the run stalls before that.
        """
        steps = self._settings.steps if measured is None else warm + measured
        if not 1 <= warm < steps - 1 or steps > self._settings.steps:
            raise UserError(f"a simulated run needs at least {warm + 2} steps")
        self._publish()
        with _uncollected():
            while len(self._ends) < steps:
                if not self._clock.step():
                    raise ProtocolError(f"the simulated run stalls at step {self._step}")
        first, last = self._ends[warm - 1], self._ends[-1]
        ages = [age for of_step in self._staleness[warm:steps] for age in of_step]
        busy = (self._busy[-1] - self._busy[warm - 1]) / (last - first)
        return SimulationResult(
            step_s=(last - first) / (steps - warm),
            tokens_per_s=sum(self._tokens[warm:steps]) / (last - first),
            trainer_idle=sum(self._waits[warm:steps]) / (last - first),
            engine_idle=1 - busy,
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(ages),
        )

    # --- the trainer ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._step < self._settings.steps:
            self._waiting_since = self._clock.now
            self._reserve()

    def _reserve(self) -> None:
        if self._waiting_since is None or self._store.batches.is_short(self._step):
            return
        reply = self._store.batches.reserve(self._step, self._clock.now)
        if not isinstance(reply, Reserved):
            return  # tried again when a group is ready
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
        size = self._settings.group_size
        room = (self._layout.concurrency - self._live) // size
        if room <= 0:
            return
        self._store.delivery.renew(WORKER, self._clock.now)
        for leased in self._store.delivery.lease(WORKER, room, self._clock.now).groups:
            self._live += size
            group = _Group(leased, self._published, self._random.choices(self._episodes, k=size))
            self._clock.after(self._costs.turn_s, partial(self._begin, group))

    def _begin(self, group: "_Group") -> None:
        """Decode the first turns of a group, whose prompts have been read."""
        ended = partial(self._ended, group)  # one for all, since these are most of a simulation's work
        for episode in group.episodes:
            if episode.turns == 1 and not episode.outside_s:
                self._engines.add(max(1, episode.sampled), ended)
            else:
                self._decode(group, episode, 0)

    def _decode(self, group: "_Group", episode: EpisodeShape, turn: int) -> None:
        tokens = episode.sampled // episode.turns + (turn < episode.sampled % episode.turns)
        self._engines.add(max(1, tokens), partial(self._decoded, group, episode, turn))

    def _decoded(self, group: "_Group", episode: EpisodeShape, turn: int) -> None:
        """Go on after a turn: its tools, and the time to the first token of the next one; or the end."""
        last = turn + 1 == episode.turns
        seconds = episode.outside_s / episode.turns + (0.0 if last else self._costs.turn_s)
        following = partial(self._ended, group) if last else partial(self._decode, group, episode, turn + 1)
        if seconds:
            self._clock.after(seconds, following)
        else:
            following()

    def _ended(self, group: "_Group") -> None:
        self._live -= 1
        group.missing -= 1
        if not group.missing:
            self._put(group)
            self._reserve()
            self._lease()

    def _put(self, group: "_Group") -> None:
        leased = group.leased
        sampled = sum(episode.sampled for episode in group.episodes)
        header = TrajectoryHeader(
            group_id=leased.group_id,
            sample=0,
            attempt=leased.attempt,
            partition=leased.partition,
            episode_id=str(leased.group_id),
            segment=0,
            tokens=sum(episode.tokens for episode in group.episodes),
            sampled=sampled,
            reward=0.0,
            finish_reason="stop",
            versions=[VersionRun(Version(0, group.version), 0, sampled)],
            tokens_hash="",
        )
        answer = self._store.delivery.put(WORKER, [header], self._clock.now)
        if isinstance(answer, Refused):
            raise ProtocolError(f"the queue refused group {leased.group_id}: {answer.reason}")


class _Group:
    """A leased group whose conversations are played."""

    __slots__ = ("episodes", "leased", "missing", "version")

    def __init__(self, leased: LeasedGroup, version: int, episodes: Sequence[EpisodeShape]) -> None:
        self.leased, self.version, self.episodes = leased, version, episodes
        self.missing = len(episodes)  # conversations that have not ended


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave cyclic garbage for later: a simulation makes none, and looking for it takes most of a large one's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
