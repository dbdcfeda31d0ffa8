"""Where transitions are recorded."""

from typing import Protocol

from rl_async.errors import ConfigError
from rl_async.transfer_queue.transitions import Transition


class Journal(Protocol):
    """An append-only record of transitions."""

    def append(self, transition: Transition) -> None:
        """Record one transition; it is as durable as the backend promises when this returns."""
        ...


class MemoryJournal:
    """The store's own memory is the record: it ends with the process, so nothing is kept twice."""

    def append(self, transition: Transition) -> None:
        """Nothing to do: no later process could read it."""


def make_journal(kind: str) -> Journal:
    """The journal that ``queue.journal`` names. Raises ConfigError for one that this version does not have."""
    if kind == "memory":
        return MemoryJournal()
    raise ConfigError(f"queue.journal: {kind!r} is not available in this version; use queue.journal=memory")
