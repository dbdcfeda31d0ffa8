"""The journal in memory: it ends with the process."""

from collections.abc import Sequence

from rl_async.messages import RowKey
from rl_async.messages.codec import Frame
from rl_async.transfer_queue.journal.interface import Recovered, new_run_id
from rl_async.transfer_queue.journal.payloads import Payloads, freed_by
from rl_async.transfer_queue.state.transitions import Transition


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
