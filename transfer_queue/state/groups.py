"""The records of the store: a group, its samples, and its state."""

from enum import StrEnum

import msgspec

from rl_async.messages import Task, TrajectoryHeader

EVAL_GROUPS = 1 << 40  # group ids of evaluations count from here
TRAIN, EVAL = "train", "eval"


class State(StrEnum):
    """WAITING -> LEASED -> READY -> RESERVED -> COMMITTED; a group whose samples are lost goes back to WAITING."""

    WAITING = "waiting"  # at least one sample is to be leased
    LEASED = "leased"  # every missing sample is with a worker
    READY = "ready"
    RESERVED = "reserved"
    COMMITTED = "committed"


class Sample(msgspec.Struct):
    """One episode to come. ``attempt`` is that of its newest lease and fences all older ones."""

    attempt: int = -1
    failures: int = 0
    worker: str | None = None  # who generates it now
    headers: list[TrajectoryHeader] = []  # of its rows, once they are here
    dead: bool = False  # evaluation only: given up

    @property
    def here(self) -> bool:
        """Whether it was handed over."""
        return bool(self.headers)

    @property
    def nbytes(self) -> int:
        """Of the payloads that are here."""
        return sum(header.nbytes for header in self.headers)

    @property
    def missing(self) -> bool:
        """Whether a worker should be found for it."""
        return self.worker is None and not self.here and not self.dead


class Group(msgspec.Struct):
    """The samples of one task."""

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
        return [index for index, sample in enumerate(self.samples) if sample.missing]

    def untouched(self) -> bool:
        """Whether no token of it exists or is being generated."""
        return all(sample.worker is None and not sample.here for sample in self.samples)

    def progress(self) -> State:
        """WAITING, LEASED or READY, as its samples say."""
        leased = False
        for sample in self.samples:  # a plain loop: this runs at every put, over all samples of the group
            if sample.worker is not None:
                leased = True
            elif not sample.headers and not sample.dead:
                return State.WAITING
        return State.LEASED if leased else State.READY

    def headers(self) -> list[TrajectoryHeader]:
        """Of the rows that are here, by sample and segment."""
        return [header for sample in self.samples for header in sample.headers]
