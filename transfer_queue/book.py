"""The groups by state with the counts that every part of the store keeps in step. No decisions are taken here."""

import heapq
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from rl_async.messages import Version
from rl_async.transfer_queue.groups import EVAL, EVAL_GROUPS, TRAIN, Group, State
from rl_async.transfer_queue.leases import Leases
from rl_async.transfer_queue.policy import Load, QueueSettings
from rl_async.transfer_queue.transitions import GroupReady, Transition

_UNRESERVED = (State.WAITING, State.LEASED, State.READY)
_LAST = 1 << 62
_FIRST_GUESS_BYTES = 1 << 10  # of a sample, until one has been seen


class _Place(NamedTuple):
    """A waiting group's place in line: what was begun before what was not, then by step, then by age."""

    unleased: bool
    step: int
    group_id: int


class Book:
    """All groups in memory. Every operation costs O(log n) or O(samples of one group)."""

    def __init__(self, settings: QueueSettings, emit: Callable[[Transition], None]) -> None:
        self.settings = settings
        self.emit = emit
        self.groups: dict[int, Group] = {}
        self.open: dict[int, Group] = {}  # training groups in no batch yet
        self.leases = Leases(settings.lease_s)
        self.counters: Counter[str] = Counter({"refilled": 0} if settings.max_refills else {})
        self.lineage = 0
        self.published: Version | None = None  # nothing is admitted or leased without one
        self.max_staleness = settings.max_staleness  # for which groups are admitted; the trainer may tighten it
        self.alive = 0  # training groups that hold a slot
        self.next_group = 0
        self.next_eval_group = EVAL_GROUPS
        self.given_up = 0  # training groups dropped or dead-lettered
        self.refills_left = settings.refill_allowance  # groups without signal that may still be given up
        self.finished = False
        self.payload_bytes = 0
        self._outstanding = 0  # samples still to come
        self._largest_bytes = _FIRST_GUESS_BYTES
        self._states: Counter[tuple[str, State]] = Counter()
        self._unleased = 0  # open groups of which no token exists or ever existed
        self._lines: dict[str, list[_Place]] = {TRAIN: [], EVAL: []}  # heaps of waiting groups

    def count(self, state: State) -> int:
        """Training groups in this state."""
        return self._states[TRAIN, state]

    @property
    def active(self) -> int:
        """Training groups that hold a slot and whose tokens have an age: all but those never leased."""
        return self.alive - self._unleased

    def load(self) -> Load:
        """What admission looks at."""
        return Load(
            slots=self.settings.slots_at(self.max_staleness),
            alive=self.alive,
            unreserved=len(self.open),
            kept=self.next_group - self.given_up,
            expected_bytes=self.payload_bytes + self._outstanding * self._largest_bytes,
            group_bytes=self.settings.group_size * self._largest_bytes,
        )

    def add(self, group: Group) -> None:
        """Take in a group none of whose samples is here; a training group takes a slot."""
        self.groups[group.group_id] = group
        self._states[group.partition, group.state] += 1
        self._outstanding += len(group.samples)
        if group.partition == TRAIN:
            self.open[group.group_id] = group
            self.alive += 1
            self._unleased += 1
        self._queue(group)

    def move(self, group: Group, state: State) -> None:
        """Change a group's state and every index that depends on it."""
        self._states[group.partition, group.state] -= 1
        self._states[group.partition, state] += 1
        group.state = state
        if group.partition == TRAIN:
            if state in _UNRESERVED:
                self.open[group.group_id] = group
            else:
                self.open.pop(group.group_id, None)
        self._queue(group)

    def settle(self, group: Group) -> None:
        """After a change of its samples: WAITING, LEASED, or READY, which is announced once."""
        state = group.progress()
        if state is group.state:
            return
        self.move(group, state)
        if state is State.READY:
            steps = [run.version.step for header in group.headers() for run in header.versions]
            group.oldest = min(steps, default=group.oldest)
            self.emit(GroupReady(group=group.group_id, partition=group.partition))

    def stored(self, nbytes: int) -> None:
        """A sample whose rows have this size together has come."""
        self.payload_bytes += nbytes
        self._outstanding -= 1
        self._largest_bytes = max(self._largest_bytes, nbytes)

    def sample_given_up(self) -> None:
        """A sample will never come."""
        self._outstanding -= 1

    def remove(self, group: Group) -> None:
        """Forget a group, its leases and its bytes. Slots are the caller's business."""
        for index, sample in enumerate(group.samples):
            if sample.worker is not None:
                self.leases.end(sample.worker, group.group_id, index)
            if sample.here:
                self.payload_bytes -= sample.nbytes
            elif not sample.dead:
                self._outstanding -= 1
        self._states[group.partition, group.state] -= 1
        self.groups.pop(group.group_id)
        if self.open.pop(group.group_id, None) is not None and group.oldest is None:
            self._unleased -= 1

    def give_up(self, group: Group) -> None:
        """Forget a training group for good; its slot and its place in the run are free for another task."""
        self.remove(group)
        self.alive -= 1
        self.given_up += 1

    def head(self, partition: str) -> Group | None:
        """The waiting group that is to be leased first; it stays in line."""
        line = self._lines[partition]
        while line:
            group = self.groups.get(line[0].group_id)
            if group is not None and group.state is State.WAITING:
                return group
            heapq.heappop(line)  # given up, or its samples came, while it waited
            if group is not None:
                group.queued = False
        return None

    def take(self, group: Group, weights_step: int) -> None:
        """The head of its line leaves it, to be generated from weights of ``weights_step`` or newer."""
        heapq.heappop(self._lines[group.partition])
        group.queued = False
        if group.oldest is None and group.partition == TRAIN:
            self._unleased -= 1
        if group.oldest is None or group.untouched():
            group.oldest = weights_step
        else:
            group.oldest = min(group.oldest, weights_step)

    def _queue(self, group: Group) -> None:
        if group.state is State.WAITING and not group.queued:
            group.queued = True
            step = _LAST if group.pinned is None else group.pinned
            heapq.heappush(self._lines[group.partition], _Place(group.oldest is None, step, group.group_id))
