"""Where transitions and payloads are recorded, so that another process can go on from them.

``memory`` keeps them as long as the process lives. ``sqlite_journal.py`` and ``redis_journal.py`` keep them longer;
docs/transfer_queue.md says what each of them guarantees.
"""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.messages import RowKey
from rl_async.messages.codec import Frame
from rl_async.transfer_queue.journal.payloads import Payloads, freed_by
from rl_async.transfer_queue.state.transitions import Transition

JOURNAL_SCHEMA = 3  # raise it when an older process would misread a transition or a dump of the store


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
        """Names the state: another one means that what an earlier queue knew is lost."""
        ...

    def recover(self) -> Recovered:
        """What was flushed so far. Call it once, before anything else."""
        ...

    def append(self, transition: Transition) -> None:
        """Record one transition, and free the payloads that it makes unreachable."""
        ...

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Record the rows of one sample, by segment, unless they are here."""
        ...

    def has(self, group: int, sample: int) -> bool:
        """Whether rows of this sample are here."""
        ...

    def get(self, key: RowKey) -> Frame | None:
        """One row; None if it is not here."""
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
        """Let others have it; what was not flushed is forgotten."""
        ...


class MemoryJournal:
    """The store's own memory is the record of transitions; payloads are kept beside it. Both end with the process."""

    outgrown = False

    def __init__(self, name: str = "memory") -> None:
        self.run_id = new_run_id(name)
        self._payloads = Payloads()

    def recover(self) -> Recovered:
        """Nothing was recorded."""
        return Recovered(b"", 0, iter(()))

    def append(self, transition: Transition) -> None:
        """Only frees payloads: no later process could read the transition."""
        self._payloads.free(freed_by(transition))

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Keep the rows."""
        self._payloads.put(group, sample, rows)

    def has(self, group: int, sample: int) -> bool:
        """Whether rows of this sample are here."""
        return self._payloads.get(group, sample, 0) is not None

    def get(self, key: RowKey) -> Frame | None:
        """One row; None if it is not here."""
        return self._payloads.get(*key)

    def flush(self) -> None:
        """Nothing is durable here."""

    def compact(self, dump: bytes) -> None:
        """There is nothing to replace."""

    def close(self) -> None:
        """Nothing is open."""


def new_run_id(name: str) -> str:
    """An id that no other queue has: clients that outlive a queue notice by it that the next one does not know them."""
    return f"{name}-{secrets.token_hex(8)}"


def open_journal(config: RunConfig, run: Path) -> Journal:
    """The journal that ``queue.journal`` names, held by this process alone.

    Raises JournalError if another process holds it, or if it cannot be read or written; ConfigError without the package
    that it needs.
    """
    match config.queue.journal:
        case "sqlite":
            from rl_async.transfer_queue.journal.sqlite import SqliteJournal

            return SqliteJournal(run, config.name, config.queue.sqlite_synchronous)
        case "redis":
            try:
                from rl_async.transfer_queue.journal.redis import RedisJournal
            except ModuleNotFoundError as error:
                if error.name != "redis":
                    raise
                raise ConfigError("queue.journal=redis needs a package: pip install 'rl-async[redis]'") from error
            return RedisJournal(config.queue.redis_url, config.name)
    return MemoryJournal(config.name)
