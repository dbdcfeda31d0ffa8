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

EVAL_GROUPS = 1 << 40  # group ids of evaluations count from here
TRAIN, EVAL = "train", "eval"
GRANTS_KEPT = 4096  # newest answers to requests for leases


class State(StrEnum):
    """WAITING -> LEASED -> READY -> RESERVED -> COMMITTED; a group whose samples are lost goes back to WAITING."""

    WAITING = "waiting"  # at least one sample is to be leased
    LEASED = "leased"  # every missing sample is with a worker
    READY = "ready"
    RESERVED = "reserved"
    COMMITTED = "committed"

    __hash__ = str.__hash__  # Enum defines one in Python, and every move of a group looks states up


class Sample(msgspec.Struct, gc=False):
    """One episode to come. ``attempt`` is that of its newest lease and fences all older ones."""

    attempt: int = -1
    failures: int = 0
    worker: str | None = None  # who generates it now
    headers: list[TrajectoryHeader] = []  # of its rows, once they are here
    dead: bool = False  # evaluation only: given up

    @property
    def here(self) -> bool:
        """Whether the sample was handed over."""
        return bool(self.headers)

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads handed over."""
        return sum([header.nbytes for header in self.headers])


class Group(msgspec.Struct, gc=False):
    """A task with its samples, one episode each."""

    group_id: int
    task: Task
    partition: str
    samples: list[Sample]
    state: State = State.WAITING
    leases: int = 0  # handed out so far; the next lease's attempt number
    oldest: int | None = None  # step of the oldest weights that any of its tokens may come from
    pinned: int | None = None  # the step whose batch it belongs to whatever happens

    def missing(self) -> list[int]:
        """Samples for which a worker should be found."""
        samples = enumerate(self.samples)  # without Sample's properties: this runs at every lease, over all samples
        return [index for index, s in samples if s.worker is None and not s.headers and not s.dead]

    def is_at(self, index: int, attempt: int) -> bool:
        """Whether this is the newest attempt at one of its samples."""
        return 0 <= index < len(self.samples) and self.samples[index].attempt == attempt

    def untouched(self) -> bool:
        """Whether no token of the group exists or is being generated."""
        return all(sample.worker is None and not sample.here for sample in self.samples)

    def progress(self) -> State:
        """The state that the samples imply: WAITING, LEASED or READY."""
        leased = False
        for sample in self.samples:  # a plain loop: this runs at every put, over all samples of the group
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
    """How many groups are in no batch yet: those pinned to a step, and the begun others by the step of their oldest
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


def are_one_sample(headers: Sequence[TrajectoryHeader]) -> bool:
    """Whether these are all rows of one attempt at one sample, in order."""
    if len(headers) == 1:
        return headers[0].segment == 0
    places = {(h.group_id, h.sample, h.attempt, h.partition, h.episode_id) for h in headers}
    return len(places) == 1 and [h.segment for h in headers] == list(range(len(headers)))


def content(headers: Sequence[TrajectoryHeader]) -> bytes:
    """The headers without the size, in which only the first to bring media has them counted."""
    headers = [msgspec.structs.replace(header, nbytes=0) for header in headers]
    return msgspec.msgpack.encode(headers)  # unlike the structs, equal when a reward is not a number


# --- leases ----------------------------------------------------------------------------------------------------------


class Lost(NamedTuple):
    """What a silent worker was holding: samples by group."""

    worker: str
    held: dict[int, list[int]]


class Leases:
    """Samples by worker and group. Times are the caller's, in seconds, never decreasing."""

    def __init__(self, lease_s: float, max_lease_s: float) -> None:
        self._lease_s, self._max_lease_s = lease_s, max_lease_s
        self._heard: OrderedDict[str, float] = OrderedDict()  # by worker, least recently heard first
        # By worker, group and sample: when the lease was given, or last listed by its worker.
        self._held: dict[str, dict[int, dict[int, float]]] = {}
        self._since: OrderedDict[tuple[str, int], float] = OrderedDict()  # (worker, group), oldest first

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
        """The worker, just heard of, takes these samples."""
        self._held.setdefault(worker, {}).setdefault(group, {}).update(dict.fromkeys(samples, now))
        self._since.setdefault((worker, group), now)

    def revive(self, now: float) -> None:
        """After a replay, which knows no times: whoever holds something was heard of just now, and took it just now."""
        for worker, held in self._held.items():
            self.hear(worker, now)
            for group, samples in held.items():
                held[group] = dict.fromkeys(samples, now)
        self._since = OrderedDict.fromkeys(self._since, now)

    def end(self, worker: str, group: int, sample: int) -> None:
        """End the lease of one sample."""
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
        """Everything that is leased, by worker."""
        return [self._lost(worker) for worker in self._held]

    def expired(self, now: float) -> list[Lost]:
        """Forget the workers that were silent for too long; what they held, which the caller must end."""
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
        """What the worker holds by our account, and has not ``listed`` as (group, sample) for the lease time.

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
        """What was leased longer ago than any lease may last."""
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
    """What a worker gets of a group that it was lent."""
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
        """The answer that a request got; None if it is not remembered."""
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
PINNED = "pinned"  # the line of training groups that certain steps wait for
_FIRST, _LAST = -1, 1 << 62
DEAD_LETTERS_KEPT = 256  # the newest; all are counted
ERROR_SHOWN = 400  # characters of a dead letter's error, where it is not asked for
_FIRST_GUESS_BYTES = 1 << 10  # of a sample, until one has been seen


class _LinePosition(NamedTuple):
    """A waiting group's position in its line: by the step it is pinned to, then begun groups before others, then by
    age. Groups that a reserved batch lost come first of all."""

    step: int
    unleased: bool
    group_id: int


class BookState(msgspec.Struct, kw_only=True):
    """The dump of the book: what cannot be derived from the groups."""

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
    regenerating: list[int] = msgspec.field(name="mending", default_factory=list)


class Book:
    """All groups in memory. Every operation costs O(log n) or O(samples of one group)."""

    def __init__(self, settings: QueueSettings, cursor: bytes) -> None:
        self.settings = settings
        # Chooses, of the samples of a group that are leased as an attempt, those whose episodes have a trace.
        self.traced: Callable[[int, Sequence[int], int], list[int]] = lambda group, samples, attempt: []
        self.now = 0.0  # of the newest tick or lease, and of a replay
        self.groups: dict[int, Group] = {}
        self.open: dict[int, Group] = {}  # training groups in no batch yet
        self.open_counts = OpenCounts()
        self.regenerating: set[int] = set()  # groups of batches to be trained whose payloads were lost
        self.since: dict[int, float] = {}  # when a group came into its state, or into this process
        self.dead_letters: dict[int, DeadLetter] = {}  # oldest first
        self.submitted: deque[Task] = deque()  # tasks to admit before those of the source
        self.submissions: OrderedDict[bytes, None] = OrderedDict()  # newest requests that submitted tasks
        self.draining = False  # nothing is admitted
        self.leases = Leases(settings.lease_s, settings.max_lease_s)
        self.counters: Counter[str] = Counter({"refilled": 0} if settings.max_refills else {})
        self.unjournaled_counters: Counter[str] = Counter()  # since the start, of requests without effect
        self.scored = self.unscored = 0  # samples that were put since the start
        self.lineage = 0
        self.published: Version | None = None  # nothing is admitted or leased without one
        self.max_staleness = settings.max_staleness  # for which groups are admitted; the trainer may tighten it
        self.alive = 0  # training groups that hold a slot
        self.next_step = 0  # the first without a batch
        self.next_group = 0
        self.next_eval_group = EVAL_GROUPS
        self.given_up = 0  # training groups dropped or dead-lettered
        self.refills_left = settings.refill_allowance  # groups without signal that may still be given up
        self.finished = False
        self.cursor = cursor  # of the task source, behind the last group admitted
        self.payload_bytes = 0
        self._outstanding = 0  # samples still to come
        self._largest_bytes = _FIRST_GUESS_BYTES
        self._states: Counter[tuple[str, State]] = Counter()
        self._unleased = 0  # open groups of which no token exists or ever existed
        self._lines: dict[str, list[_LinePosition]] = {PINNED: [], TRAIN: [], EVAL: []}  # heaps of waiting groups
        self._queued: set[int] = set()  # groups in these lines

    def fence(self, lineage: int | None) -> Refused | None:
        """The refusal of a trainer of another lineage than the newest; None for others, and if no trainer asks."""
        if lineage is None or lineage == self.lineage:
            return None
        reason = f"this is lineage {self.lineage}, and the trainer of lineage {lineage} has not resumed"
        return self.replaced(lineage) or Refused(code="wrong_lineage", reason=reason)

    def replaced(self, lineage: int) -> Refused | None:
        """The refusal of a trainer of an older lineage than the newest; None for others."""
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
        """The training groups that the steps without a batch take, those that are here among them.

        Steps that have one count for nothing: a resumed run may have batches of another size.
        """
        return (self.settings.steps - self.next_step) * self.settings.batch_groups

    def occupancy(self) -> Occupancy:
        """How full the queue is, as far as admission is concerned."""
        return Occupancy(
            slots=self.settings.slots_at(self.max_staleness),
            alive=self.alive,
            unreserved=len(self.open),
            wanted=self.wanted,
            expected_bytes=self.payload_bytes + self._outstanding * self._largest_bytes,
            group_bytes=self.settings.group_size * self._largest_bytes,
        )

    def leasable(self) -> int:
        """How many groups could be leased now; never fewer than ``lease`` finds, more when bytes or tasks are short."""
        return self.waiting + max(0, self.settings.slots_at(self.max_staleness) - self.alive)

    def first_unfinished(self, step: int) -> list[int]:
        """The unfinished group that the step waits for: one that is pinned to it, or else the most urgent one."""
        groups = [g for g in self.open.values() if g.state is not State.READY and g.pinned in (None, step)]
        first = min(groups, key=lambda g: (g.pinned is None, g.oldest is None, g.oldest or 0, g.group_id), default=None)
        return [] if first is None else [first.group_id]

    def untrained(self) -> Iterator[Group]:
        """The training groups that are here and were not trained yet."""
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
        """Pin a group to a step, or (None) let any step have it."""
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
        """The waiting group of TRAIN, EVAL or PINNED (training groups of a certain step) that is to be leased first.

        It stays in line.
        """
        places = self._lines[line]
        while places:
            group = self.groups.get(places[0].group_id)
            if group is not None and group.state is State.WAITING and places[0] == self._position(group):
                return group
            self._queued.discard(heapq.heappop(places).group_id)  # given up, or moved, while it waited
            if group is not None:
                self._queue(group)
        return None

    def due(self, group: Group) -> int | None:
        """The step that a group is pinned to; _FIRST if a batch misses it, None if any step may have it."""
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
        """Forget all groups and what was counted of them; counters and the registry of workers stay."""
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
    """Say that groups were given up because their episodes failed, and with which error the last one did, if known."""
    groups = "1 group was given up, as its" if count == 1 else f"{count} groups were given up, as their"
    return f"{groups} episodes failed" + (f", the last with: {last}" if last else "")
