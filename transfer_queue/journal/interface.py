"""The interface of a journal: the record of transitions and payloads from which another process can continue."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_digest

from rl_async.errors import JournalError
from rl_async.messages import RowKey
from rl_async.messages.codec import Frame
from rl_async.transfer_queue.state.transitions import Transition

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
