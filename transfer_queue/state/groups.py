"""The records of the store: a group, its samples, and its state."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from rl_async.messages import LeasedGroup, Task, TrajectoryHeader, Version

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
