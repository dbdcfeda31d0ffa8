"""The interface of a journal, from which another process can continue, and the journal in memory.

A journal records transitions and payloads, and never decodes a payload. A transition says which payloads it frees.
The journal in memory ends with the process.
"""

import ctypes
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_digest

from rl_async.codec import Frame
from rl_async.errors import JournalError
from rl_async.messages import RowKey
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.transitions import (
    Acknowledged,
    DeadLettered,
    EvalClosed,
    GroupDropped,
    Missed,
    Retired,
    RolledBack,
    Transition,
    Unsubscribed,
)

JOURNAL_SCHEMA = 5  # raise it when an older process would misread a transition or a dump of the store
# Stands beside JOURNAL_SCHEMA in the version of a journal whose records have checksums.
CHECKED = 1 << 16

_encode = msgspec.msgpack.Encoder().encode


class Recovered(NamedTuple):
    """What was recorded: ``dump`` stands for the first ``dumped`` transitions, ``transitions`` are the later ones."""

    dump: bytes
    dumped: int
    transitions: Iterator[Transition]


class Journal(Protocol):
    """The record of one run's queue. Only one process at a time may have it open.

    All methods raise JournalError when the record cannot be kept; nothing may be answered after that.
    """

    @property
    def run_id(self) -> str:
        """The name of the recorded state: another name means that an earlier queue's state is lost."""
        ...

    def recover(self) -> Recovered:
        """Read what was flushed so far. Call it once, before anything else."""
        ...

    def append(self, transition: Transition) -> None:
        """Record one transition, and free the payloads that it makes unreachable."""
        ...

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Record the rows of one sample, by segment, unless they are recorded already."""
        ...

    def has(self, group: int, sample: int) -> bool:
        """Whether the journal holds rows of this sample."""
        ...

    def get(self, key: RowKey) -> Frame | None:
        """One row; None if the journal does not hold it."""
        ...

    def flush(self) -> None:
        """Make everything so far durable, all of it or nothing. Called often, even when there is nothing."""
        ...

    @property
    def outgrown(self) -> bool:
        """Whether a dump of the store would be much shorter than the record."""
        ...

    def compact(self, dump: bytes) -> None:
        """Replace all transitions, which are flushed, by the dump of the store that they led to."""
        ...

    def close(self) -> None:
        """Release the journal to other processes; what was not flushed is lost."""
        ...


def new_run_id(name: str) -> str:
    """An id that no other queue has: clients that outlive a queue notice by it that the next one does not know them."""
    return f"{name}-{secrets.token_hex(8)}"


def digest(*values: int | str | bytes) -> bytes:
    """Return the checksum of a record of the journal; a changed bit could be another reward, version or cursor."""
    return xxh3_64_digest(_encode(values))


def consecutive(entries: Iterable[tuple[int, bytes]], first: int, place: str) -> Iterator[tuple[int, bytes]]:
    """Pass on numbered transitions. Raises JournalError naming the ``place`` if one is missing, from ``first`` on."""
    for expected, (number, body) in enumerate(entries, first):
        if number != expected:
            raise JournalError(hole(place, expected))
        yield number, body


def hole(place: str, number: int) -> str:
    """The message for a record without transition ``number``, which cannot be replayed."""
    return (
        f"{place} lacks transition {number}, which was recorded, so the queue's state cannot be known; move the journal"
        " away (or rename its keys) and continue from the last checkpoint with --resume"
    )


ALL_GROUPS = None  # a fresh start frees everything
TRIM_BYTES = 1 << 24  # freed, for which giving memory back is worth its milliseconds


_FREES: dict[type[Transition], Callable[[Any], Sequence[int] | None]] = {
    GroupDropped: lambda event: (event.group,),
    DeadLettered: lambda event: (event.group,),
    Retired: lambda event: event.groups,
    EvalClosed: lambda event: event.groups,
    Acknowledged: lambda event: event.freed,
    Unsubscribed: lambda event: event.freed,
    Missed: lambda event: event.freed,
    RolledBack: lambda event: ALL_GROUPS if event.fresh else (),
}
FREEING = frozenset(_FREES)  # the transitions that may free payloads


def freed_by(transition: Transition) -> Sequence[int] | None:
    """The groups whose payloads cannot be requested after this; ALL_GROUPS after a fresh start."""
    frees = _FREES.get(type(transition))
    return () if frees is None else frees(transition)


def _make_trim() -> Callable[[], object]:
    """glibc returns memory freed below what is still used only on malloc_trim; other libraries need no call."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if found is None else lambda: found(0)


trim = _make_trim()


class Payloads:
    """Rows by group and sample. What names a sample is the caller's: its index, or that with an attempt."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[Hashable, Sequence[Frame]]] = {}
        self._held = self._peak = 0  # bytes now, and at most since memory was given back

    def groups(self) -> list[int]:
        """Ids of the groups of which rows are kept."""
        return list(self._groups)

    def put(self, group: int, sample: Hashable, rows: Sequence[Frame]) -> None:
        """Keep the rows of one sample, by segment, unless they are kept already.

        Small ones are copied: a view would keep the frame that they came in for its longest-lived row.
        """
        samples = self._groups.setdefault(group, {})
        if sample not in samples:
            samples[sample] = [row if len(row) >= wire.ALONE_BYTES else bytes(row) for row in rows]
            self._held += sum(map(len, rows))
            self._peak = max(self._peak, self._held)

    def get(self, group: int, sample: Hashable, segment: int) -> Frame | None:
        """One row; None if it is not kept."""
        rows = self._groups.get(group, {}).get(sample, ())
        return rows[segment] if 0 <= segment < len(rows) else None

    def free(self, groups: Iterable[int] | None) -> None:
        """Forget the payloads of these groups, or of all groups if None.

        Memory is given back when less than a quarter of what was held is left: what a steady run frees, it needs
        again, and touching new pages costs as much as taking in the row.
        """
        freed = list(self._groups.values()) if groups is None else [self._groups.pop(g, {}) for g in groups]
        if groups is None:
            self._groups.clear()
        self._held -= sum(len(row) for samples in freed for rows in samples.values() for row in rows)
        del freed
        if self._peak - self._held > max(TRIM_BYTES, 3 * self._held):
            self._peak = self._held
            trim()


class MemoryJournal:
    """The store's own memory is the record of transitions; payloads are kept beside it. Both end with the process."""

    outgrown = False

    def __init__(self, name: str = "memory") -> None:
        self.run_id = new_run_id(name)
        self._payloads = Payloads()

    def recover(self) -> Recovered:
        """Return an empty record: nothing outlives the process."""
        return Recovered(b"", 0, iter(()))

    def append(self, transition: Transition) -> None:
        """Free payloads only: no later process could read the transition."""
        self._payloads.free(freed_by(transition))

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Keep the rows of one sample until its group is freed."""
        self._payloads.put(group, sample, rows)

    def has(self, group: int, sample: int) -> bool:
        """Whether the journal holds rows of this sample."""
        return self._payloads.get(group, sample, 0) is not None

    def get(self, key: RowKey) -> Frame | None:
        """One row; None if the journal does not hold it."""
        return self._payloads.get(*key)

    def flush(self) -> None:
        """Do nothing: memory cannot be made durable."""

    def compact(self, dump: bytes) -> None:
        """Do nothing: no transitions are kept that a dump could replace."""

    def close(self) -> None:
        """Do nothing: no file or connection is open."""
