"""The records of the store, and the book that keeps all groups by state with their counts. It takes no decisions."""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from rl_async.messages import DeadLetter, LeasedGroup, Refused, Task, TrajectoryHeader, Version
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import Occupancy, QueueSettings

# Group ids of evaluations count from here.
EVAL_GROUPS = 1 << 40
TRAIN, EVAL = "train", "eval"
# The newest answers to requests for leases.
GRANTS_KEPT = 4096


class State(StrEnum):
    """WAITING -> LEASED -> READY -> RESERVED -> COMMITTED; a group whose samples are lost goes back to WAITING.

    A WAITING group has samples that no worker holds; of a LEASED one, workers hold every missing sample.
    """

    WAITING = "waiting"
    LEASED = "leased"
    READY = "ready"
    RESERVED = "reserved"
    COMMITTED = "committed"

    # Enum's hash is written in Python, and every move of a group looks states up.
    __hash__ = str.__hash__


class Sample(msgspec.Struct, gc=False):
    """One episode. ``attempt`` is that of its newest lease and fences all older ones.

    ``worker`` is generating it now. ``headers`` are those of its rows, empty until they are handed over. Only samples
    of evaluations can be ``dead``, which means given up.
    """

    attempt: int = -1
    failures: int = 0
    worker: str | None = None
    headers: list[TrajectoryHeader] = []
    dead: bool = False

    @property
    def here(self) -> bool:
        """Whether the sample was handed over."""
        return bool(self.headers)

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads handed over."""
        return sum([header.nbytes for header in self.headers])


class Group(msgspec.Struct, gc=False):
    """A task with its samples, one episode each.

    ``leases`` counts the leases given; it is the next one's attempt number. ``oldest`` is the step of the oldest
    weights that any token may come from. A group ``pinned`` to a step belongs to that step's batch.
    """

    group_id: int
    task: Task
    partition: str
    samples: list[Sample]
    state: State = State.WAITING
    leases: int = 0
    oldest: int | None = None
    pinned: int | None = None

    def missing(self) -> list[int]:
        """The samples that need a worker."""
        # Without Sample's properties, since this runs at every lease, over all samples.
        return [index for index, s in enumerate(self.samples) if s.worker is None and not s.headers and not s.dead]

    def is_at(self, index: int, attempt: int) -> bool:
        """Whether this is the newest attempt at one of its samples."""
        return 0 <= index < len(self.samples) and self.samples[index].attempt == attempt

    def untouched(self) -> bool:
        """Whether no token of the group exists or is being generated."""
        return all(sample.worker is None and not sample.here for sample in self.samples)

    def progress(self) -> State:
        """The state that the samples imply: WAITING, LEASED or READY."""
        leased = False
        # A plain loop, since this runs at every put, over all samples of the group.
        for sample in self.samples:
            if sample.worker is not None:
                leased = True
            elif not sample.headers and not sample.dead:
                return State.WAITING
        return State.LEASED if leased else State.READY

    def lacks_rows(self) -> bool:
        """Whether a sample was not handed over."""
        return any(not sample.headers for sample in self.samples)

    def headers(self) -> list[TrajectoryHeader]:
        """Headers of the rows handed over, by sample and segment."""
        return [header for sample in self.samples for header in sample.headers]


class OpenCounts:
    """Counts the groups that are in no batch: pinned ones, and others that were begun, by the step of their oldest
    token."""

    def __init__(self) -> None:
        self.pinned = 0
        self.unfinished: dict[int, int] = {}
        self.ready: dict[int, int] = {}

    def count(self, group: Group, by: int) -> None:
        """Add ``by`` to the number of groups like this one."""
        if group.pinned is not None:
            self.pinned += by
        elif group.oldest is not None:
            counts = self.ready if group.state is State.READY else self.unfinished
            number = counts.get(group.oldest, 0) + by
            if number:
                counts[group.oldest] = number
            else:
                del counts[group.oldest]


# --- leases ----------------------------------------------------------------------------------------------------------


class Lost(NamedTuple):
    """The leases of a lost worker: samples by group."""

    worker: str
    held: dict[int, list[int]]


class Leases:
    """Samples by worker and group. Times are the caller's, in seconds, never decreasing."""

    def __init__(self, lease_s: float, max_lease_s: float) -> None:
        self._lease_s, self._max_lease_s = lease_s, max_lease_s
        # By worker, least recently heard first.
        self._heard: OrderedDict[str, float] = OrderedDict()
        # By worker, group and sample: when the lease was given, or last listed by its worker.
        self._held: dict[str, dict[int, dict[int, float]]] = {}
        # By worker and group, oldest first.
        self._since: OrderedDict[tuple[str, int], float] = OrderedDict()

    @property
    def workers(self) -> int:
        """The number of workers heard of within the lease time."""
        return len(self._heard)

    def names(self) -> list[str]:
        """Return the workers heard of within the lease time, by name."""
        return sorted(self._heard)

    def held(self, worker: str) -> dict[int, int]:
        """Return how many samples of each group the worker holds."""
        return {group: len(samples) for group, samples in self._held.get(worker, {}).items()}

    def hears(self, worker: str) -> bool:
        """Whether the worker was heard of within the lease time."""
        return worker in self._heard

    def hear(self, worker: str, now: float) -> None:
        """Note a sign of life of the worker."""
        self._heard[worker] = now
        self._heard.move_to_end(worker)

    def give(self, worker: str, group: int, samples: list[int], now: float) -> None:
        """Lease these samples to a worker that was just heard of."""
        self._held.setdefault(worker, {}).setdefault(group, {}).update(dict.fromkeys(samples, now))
        self._since.setdefault((worker, group), now)

    def revive(self, now: float) -> None:
        """Restart all times after a replay, which has none: every holder was heard of, and got its leases, just now."""
        for worker, held in self._held.items():
            self.hear(worker, now)
            for group, samples in held.items():
                held[group] = dict.fromkeys(samples, now)
        self._since = OrderedDict.fromkeys(self._since, now)

    def end(self, worker: str, group: int, sample: int) -> None:
        held = self._held.get(worker)
        samples = None if held is None else held.get(group)
        if samples is not None:
            samples.pop(sample, None)
            if not samples:
                self._forget(worker, group)

    def _forget(self, worker: str, group: int) -> None:
        self._since.pop((worker, group), None)
        held = self._held.get(worker)
        if held is not None:
            held.pop(group, None)
            if not held:
                del self._held[worker]

    def holding(self) -> list[Lost]:
        """All leases, by worker."""
        return [self._lost(worker) for worker in self._held]

    def expired(self, now: float) -> list[Lost]:
        """Forget the workers that were silent for too long; return their leases, which the caller must end."""
        lost: list[Lost] = []
        while self._heard:
            worker, heard = next(iter(self._heard.items()))
            if now - heard < self._lease_s:
                break
            del self._heard[worker]
            if worker in self._held:
                lost.append(self._lost(worker))
        return lost

    def forgotten(self, worker: str, listed: Collection[tuple[int, int]], now: float) -> Lost:
        """The leases that the worker has not ``listed`` as (group, sample) for the lease time.

        A renewal may cross the answer that gives a lease, and therefore does not end a young one.
        """
        lost: dict[int, list[int]] = {}
        for group, samples in self._held.get(worker, {}).items():
            for sample, known in samples.items():
                if (group, sample) in listed:
                    samples[sample] = now
                elif now - known >= self._lease_s:
                    lost.setdefault(group, []).append(sample)
        return Lost(worker, lost)

    def overdue(self, now: float) -> list[Lost]:
        """The leases that have outlasted the longest allowed time."""
        lost: list[Lost] = []
        for (worker, group), since in self._since.items():
            if now - since < self._max_lease_s:
                break
            lost.append(Lost(worker, {group: sorted(self._held[worker][group])}))
        return lost

    def _lost(self, worker: str) -> Lost:
        return Lost(worker, {group: sorted(samples) for group, samples in self._held[worker].items()})

    def age(self, worker: str, group: int, now: float) -> float:
        """Seconds since the worker took the group; 0 if it has not."""
        return now - self._since.get((worker, group), now)

    def oldest(self) -> tuple[str, int] | None:
        """The (worker, group) of the oldest lease; None without leases."""
        return next(iter(self._since), None)

    def oldest_s(self, now: float) -> float:
        """Age of the oldest lease in seconds; 0 without one."""
        return now - next(iter(self._since.values()), now)


# --- answers to requests for leases ----------------------------------------------------------------------------------


class Lent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One group of the answer to a request for leases."""

    group: int
    attempt: int
    samples: list[int]
    min_version: Version
    traced: list[int] = []


def leased_group(group: Group, lent: Lent) -> LeasedGroup:
    """The part of a group that its worker gets."""
    return LeasedGroup(
        group_id=group.group_id,
        partition=group.partition,
        attempt=lent.attempt,
        samples=lent.samples,
        task=group.task,
        min_version=lent.min_version,
        traced=lent.traced,
    )


class Grant(msgspec.Struct, kw_only=True, gc=False):
    """The answer to one request for leases, and its worker."""

    request: bytes
    worker: str
    lent: list[Lent] = []


class Grants:
    """The newest answers by request id, oldest first."""

    def __init__(self) -> None:
        self._grants: OrderedDict[bytes, Grant] = OrderedDict()

    def get(self, request: bytes) -> Grant | None:
        """The answer to a request, if it is remembered."""
        return self._grants.get(request)

    def give(self, request: bytes, worker: str, lent: Lent) -> None:
        """Add a group to the answer of a request. Requests without an id are not remembered."""
        if not request:
            return
        self._grants.setdefault(request, Grant(request=request, worker=worker)).lent.append(lent)
        if len(self._grants) > GRANTS_KEPT:
            self._grants.popitem(last=False)

    def void(self, request: bytes) -> None:
        """Forget the answer to a request."""
        self._grants.pop(request, None)

    def dump(self) -> list[Grant]:
        """All remembered answers, oldest first, for a dump."""
        return list(self._grants.values())

    def load(self, grants: list[Grant]) -> None:
        """Restore the answers of a dump."""
        self._grants = OrderedDict((grant.request, grant) for grant in grants)


_UNRESERVED = (State.WAITING, State.LEASED, State.READY)
# The line of training groups that certain steps wait for.
PINNED = "pinned"
_FIRST, _LAST = -1, 1 << 62
# The newest dead letters are kept; all are counted.
DEAD_LETTERS_KEPT = 256
# Characters of a dead letter's error in a status.
ERROR_SHOWN = 400
# The assumed size of a sample until one is stored.
_FIRST_GUESS_BYTES = 1 << 10


class _LinePosition(NamedTuple):
    """A waiting group's position in its line: by pinned step, then begun groups before others, then by age.

    Groups that a reserved batch has lost come first of all.
    """

    step: int
    unleased: bool
    group_id: int


class BookState(msgspec.Struct, kw_only=True):
    """The dump of the book: the groups, and all that cannot be derived from them."""

    groups: list[Group]
    counters: dict[str, int]
    lineage: int
    published: Version | None
    max_staleness: int
    alive: int
    next_group: int
    next_eval_group: int
    given_up: int
    refills_left: int
    finished: bool
    cursor: bytes
    largest_bytes: int
    dead_letters: list[DeadLetter] = []
    submitted: list[Task] = []
    submissions: list[bytes] = []
    draining: bool = False
    measured: dict[str, float] = {}
    regenerating: list[int] = msgspec.field(name="mending", default_factory=list)


class Book:
    """All groups in memory. Every operation costs O(log n) or O(samples of one group)."""

    def __init__(self, settings: QueueSettings, cursor: bytes) -> None:
        self.settings = settings
        # Chooses the samples of a lease (group, samples, attempt) whose episodes are traced.
        self.traced: Callable[[int, Sequence[int], int], list[int]] = lambda group, samples, attempt: []
        # The time of the newest tick or lease, or of a replay.
        self.now = 0.0
        self.groups: dict[int, Group] = {}
        # Training groups in no batch yet.
        self.open: dict[int, Group] = {}
        self.open_counts = OpenCounts()
        # Reserved groups whose payloads were lost.
        self.regenerating: set[int] = set()
        # When each group came into its state, or into this process.
        self.since: dict[int, float] = {}
        # Oldest first.
        self.dead_letters: dict[int, DeadLetter] = {}
        # Submitted tasks, which are admitted before the source's, and the newest requests that submitted some.
        self.submitted: deque[Task] = deque()
        self.submissions: OrderedDict[bytes, None] = OrderedDict()
        # Stops admission.
        self.draining = False
        self.leases = Leases(settings.lease_s, settings.max_lease_s)
        self.counters: Counter[str] = Counter({"refilled": 0} if settings.max_refills else {})
        # These count requests without effect, and samples that were put, since this process started.
        self.unjournaled_counters: Counter[str] = Counter()
        self.scored = self.unscored = 0
        self.lineage = 0
        # Without a published version nothing is admitted or leased.
        self.published: Version | None = None
        # The bound of admission, which the trainer may tighten.
        self.max_staleness = settings.max_staleness
        # Training groups that hold a slot.
        self.alive = 0
        # The first step without a batch.
        self.next_step = 0
        self.next_group = 0
        self.next_eval_group = EVAL_GROUPS
        # Training groups that were dropped or dead-lettered.
        self.given_up = 0
        # Groups without signal that may still be dropped.
        self.refills_left = settings.refill_allowance
        self.finished = False
        # With a curriculum, the mean reward of each task's newest complete group.
        self.measured: dict[str, float] = {}
        # The task source's cursor after the last admitted group.
        self.cursor = cursor
        self.payload_bytes = 0
        # Samples that are not handed over yet.
        self._outstanding = 0
        self._largest_bytes = _FIRST_GUESS_BYTES
        self._states: Counter[tuple[str, State]] = Counter()
        # Open groups that were never leased.
        self._unleased = 0
        # Heaps of waiting groups, and the ids in them.
        self._lines: dict[str, list[_LinePosition]] = {PINNED: [], TRAIN: [], EVAL: []}
        self._queued: set[int] = set()

    def fence(self, lineage: int | None) -> Refused | None:
        """Refuse a trainer of another lineage than the newest. Other clients have no lineage."""
        if lineage is None or lineage == self.lineage:
            return None
        reason = f"this is lineage {self.lineage}, and the trainer of lineage {lineage} has not resumed"
        return self.replaced(lineage) or Refused(code="wrong_lineage", reason=reason)

    def replaced(self, lineage: int) -> Refused | None:
        """Refuse a trainer of an older lineage than the newest."""
        if lineage >= self.lineage:
            return None
        reason = f"the trainer of lineage {lineage} was replaced by one of lineage {self.lineage}"
        return Refused(code=wire.REPLACED, reason=reason)

    def count(self, state: State) -> int:
        """The number of training groups in this state."""
        return self._states[TRAIN, state]

    @property
    def waiting(self) -> int:
        """Groups that wait for a worker, held-out ones among them."""
        return self._states[TRAIN, State.WAITING] + self._states[EVAL, State.WAITING]

    @property
    def active(self) -> int:
        """Training groups that hold a slot and whose tokens have an age: all but those never leased."""
        return self.alive - self._unleased

    @property
    def wanted(self) -> int:
        """The number of training groups that all steps without a batch need.

        Steps with a batch do not count: a resumed run may have batches of another size.
        """
        return (self.settings.steps - self.next_step) * self.settings.batch_groups

    def occupancy(self) -> Occupancy:
        """The part of the state that decides on admission."""
        return Occupancy(
            slots=self.settings.slots_at(self.max_staleness),
            alive=self.alive,
            unreserved=len(self.open),
            wanted=self.wanted,
            expected_bytes=self.payload_bytes + self._outstanding * self._largest_bytes,
            group_bytes=self.settings.group_size * self._largest_bytes,
        )

    def leasable(self) -> int:
        """An upper bound on the groups that ``lease`` would find now; they are fewer if bytes or tasks are short."""
        return self.waiting + max(0, self.settings.slots_at(self.max_staleness) - self.alive)

    def first_unfinished(self, step: int) -> list[int]:
        """The unfinished group that the step waits for: one that is pinned to it, or the most urgent one."""
        groups = [g for g in self.open.values() if g.state is not State.READY and g.pinned in (None, step)]
        first = min(groups, key=lambda g: (g.pinned is None, g.oldest is None, g.oldest or 0, g.group_id), default=None)
        return [] if first is None else [first.group_id]

    def untrained(self) -> Iterator[Group]:
        """The training groups that were not trained yet."""
        groups = self.groups.values()
        return (group for group in groups if group.partition == TRAIN and group.state is not State.COMMITTED)

    def add(self, group: Group) -> None:
        """Add a group without finished samples; a training group takes a slot."""
        self.groups[group.group_id] = group
        self.since[group.group_id] = self.now
        self._states[group.partition, group.state] += 1
        self._outstanding += len(group.samples)
        if group.partition == TRAIN:
            self.open[group.group_id] = group
            self._count_open(group, 1)
            self.alive += 1
            self._unleased += 1
        self._queue(group)

    def move(self, group: Group, state: State) -> None:
        """Change a group's state and every index that depends on it."""
        self._count_open(group, -1)
        self._states[group.partition, group.state] -= 1
        self._states[group.partition, state] += 1
        group.state = state
        self.since[group.group_id] = self.now
        if group.partition == TRAIN:
            if state in _UNRESERVED and group.group_id not in self.regenerating:
                self.open[group.group_id] = group
            else:
                self.open.pop(group.group_id, None)
        self._count_open(group, 1)
        self._queue(group)

    def _count_open(self, group: Group, by: int) -> None:
        """Count the group if it is open: with -1 before its state or its age changes, with 1 after that."""
        if group.group_id in self.open:
            self.open_counts.count(group, by)

    def _set_oldest(self, group: Group, step: int | None) -> None:
        self._count_open(group, -1)
        group.oldest = step
        self._count_open(group, 1)

    def settle(self, group: Group) -> None:
        """Set the group's state after a change of its samples: WAITING, LEASED or READY, or back in its batch."""
        state = group.progress()
        whole = state is State.READY
        if whole and group.group_id in self.regenerating:
            self.regenerating.discard(group.group_id)
            state = State.RESERVED
        if state is group.state:
            return
        self.move(group, state)
        if whole:
            steps = [run.version.step for header in group.headers() for run in header.versions]
            self._set_oldest(group, min(steps, default=group.oldest))

    def stored(self, nbytes: int) -> None:
        """Account for a stored sample whose rows have this many bytes."""
        self.payload_bytes += nbytes
        self._outstanding -= 1
        self._largest_bytes = max(self._largest_bytes, nbytes)

    def lost(self, group: Group, index: int) -> None:
        """Make a sample whose rows were lost wait again; a trained group needs it only after a rollback."""
        sample = group.samples[index]
        self.payload_bytes -= sample.nbytes
        self._outstanding += 1
        sample.headers = []
        if group.state is State.COMMITTED:
            return
        if group.state is State.RESERVED:
            self.regenerating.add(group.group_id)
        self.settle(group)

    def pin(self, group: Group, step: int | None) -> None:
        """Pin a group to a step; None unpins it."""
        self._count_open(group, -1)
        group.pinned = step
        self._count_open(group, 1)

    def trained(self, group: Group) -> None:
        """Mark a group as trained; end the leases of samples that were being generated again after a loss."""
        self.regenerating.discard(group.group_id)
        for index, sample in enumerate(group.samples):
            if sample.worker is not None:
                self.leases.end(sample.worker, group.group_id, index)
                sample.worker = None
        self.move(group, State.COMMITTED)

    def reopen(self, group: Group) -> None:
        """Return a group of a batch that is to be reserved again; its lost samples are generated first."""
        self.regenerating.discard(group.group_id)
        self.move(group, group.progress())

    def sample_given_up(self) -> None:
        """Account for a sample that will never be produced."""
        self._outstanding -= 1

    def remove(self, group: Group) -> None:
        """Forget a group, its leases and its bytes. The caller accounts for its slot."""
        for index, sample in enumerate(group.samples):
            if sample.worker is not None:
                self.leases.end(sample.worker, group.group_id, index)
            if sample.headers:
                for header in sample.headers:
                    self.payload_bytes -= header.nbytes
            elif not sample.dead:
                self._outstanding -= 1
        self._states[group.partition, group.state] -= 1
        self.groups.pop(group.group_id)
        self.regenerating.discard(group.group_id)
        self.since.pop(group.group_id)
        self._count_open(group, -1)
        if self.open.pop(group.group_id, None) is not None and group.oldest is None:
            self._unleased -= 1

    def give_up(self, group: Group) -> None:
        """Forget a training group for good; its slot and its place in the run are free for another task."""
        self.remove(group)
        self.alive -= 1
        self.given_up += 1

    def bury(self, letter: DeadLetter) -> None:
        """Keep a dead letter; the oldest makes room for it."""
        self.dead_letters[letter.group_id] = letter
        if len(self.dead_letters) > DEAD_LETTERS_KEPT:
            del self.dead_letters[next(iter(self.dead_letters))]

    @property
    def last_failure(self) -> str:
        """The beginning of the newest dead letter's error, on one line; empty if none is kept."""
        newest = next(reversed(self.dead_letters.values()), None)
        return "" if newest is None else " ".join(newest.error[:ERROR_SHOWN].split())

    def head(self, line: str) -> Group | None:
        """The first waiting group of a line (TRAIN, EVAL or PINNED). It stays in line."""
        places = self._lines[line]
        while places:
            group = self.groups.get(places[0].group_id)
            if group is not None and group.state is State.WAITING and places[0] == self._position(group):
                return group
            # The group was given up, or moved, while it waited.
            self._queued.discard(heapq.heappop(places).group_id)
            if group is not None:
                self._queue(group)
        return None

    def due(self, group: Group) -> int | None:
        """The step that a group is pinned to; _FIRST if a batch lacks it, None if it is not pinned."""
        return _FIRST if group.group_id in self.regenerating else group.pinned

    def take(self, group: Group, weights_step: int) -> None:
        """Remove the head of its line, to be generated from weights of ``weights_step`` or newer."""
        line = self._line(group)
        if self.head(line) is not group:
            raise ValueError(f"group {group.group_id} is not the head of its line")
        self._queued.discard(heapq.heappop(self._lines[line]).group_id)
        if group.oldest is None and group.partition == TRAIN:
            self._unleased -= 1
        if group.oldest is None or group.untouched():
            self._set_oldest(group, weights_step)
        else:
            self._set_oldest(group, min(group.oldest, weights_step))

    def _queue(self, group: Group) -> None:
        if group.state is State.WAITING and group.group_id not in self._queued:
            self._queued.add(group.group_id)
            heapq.heappush(self._lines[self._line(group)], self._position(group))

    def _line(self, group: Group) -> str:
        return group.partition if self.due(group) is None else PINNED

    def _position(self, group: Group) -> _LinePosition:
        due = self.due(group)
        return _LinePosition(_LAST if due is None else due, group.oldest is None, group.group_id)

    def clear(self) -> None:
        """Forget all groups and their counts; counters and the registry of workers stay."""
        for group in list(self.groups.values()):
            self.remove(group)
        self.alive = 0
        self.dead_letters.clear()
        self._queued.clear()
        for line in self._lines.values():
            line.clear()

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> BookState:
        """The state for a dump; equal for equal books."""
        return BookState(
            groups=[self.groups[group_id] for group_id in sorted(self.groups)],
            counters={name: self.counters[name] for name in sorted(self.counters) if self.counters[name]},
            lineage=self.lineage,
            published=self.published,
            max_staleness=self.max_staleness,
            alive=self.alive,
            next_group=self.next_group,
            next_eval_group=self.next_eval_group,
            given_up=self.given_up,
            refills_left=self.refills_left,
            finished=self.finished,
            cursor=self.cursor,
            largest_bytes=self._largest_bytes,
            dead_letters=list(self.dead_letters.values()),
            submitted=list(self.submitted),
            submissions=list(self.submissions),
            draining=self.draining,
            measured=dict(self.measured),
            regenerating=sorted(self.regenerating),
        )

    def load(self, state: BookState) -> None:
        """Restore a dumped state; only an empty book can."""
        self.counters.update(state.counters)
        self.lineage, self.published, self.max_staleness = state.lineage, state.published, state.max_staleness
        self.next_group, self.next_eval_group = state.next_group, state.next_eval_group
        self.given_up, self.refills_left, self.finished = state.given_up, state.refills_left, state.finished
        self.cursor, self._largest_bytes = state.cursor, state.largest_bytes
        self.submitted, self.draining = deque(state.submitted), state.draining
        self.submissions = OrderedDict.fromkeys(state.submissions)
        self.measured = dict(state.measured)
        self.dead_letters = {letter.group_id: letter for letter in state.dead_letters}
        self.regenerating = set(state.regenerating)
        self._take_over(state.groups)
        self.alive = state.alive

    def _take_over(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.groups[group.group_id] = group
            self.since[group.group_id] = self.now
            self._states[group.partition, group.state] += 1
            if group.partition == TRAIN and group.state in _UNRESERVED and group.group_id not in self.regenerating:
                self.open[group.group_id] = group
                self._count_open(group, 1)
                self._unleased += group.oldest is None
            for index, sample in enumerate(group.samples):
                self.payload_bytes += sample.nbytes
                self._outstanding += not sample.here and not sample.dead
                if sample.worker is not None:
                    self.leases.give(sample.worker, group.group_id, [index], self.now)
            self._queue(group)


def given_up_text(count: int, last: str) -> str:
    """Say that groups were given up because their episodes failed, with the ``last`` error unless it is empty."""
    groups = "1 group was given up, as its" if count == 1 else f"{count} groups were given up, as their"
    return f"{groups} episodes failed" + (f", the last with: {last}" if last else "")
