"""Trajectory payloads, kept as they were received and never decoded."""

from collections.abc import Sequence

from rl_async.codec import Frame
from rl_async.messages import RowKey
from rl_async.transfer_queue.transitions import DeadLettered, EvalClosed, GroupDropped, Retired, Transition


class Payloads:
    """Rows by (group, sample, segment); a group's are freed when the store forgets the group."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, Sequence[Frame]]] = {}

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Keep the rows of one sample, by segment, unless they are here."""
        self._groups.setdefault(group, {}).setdefault(sample, rows)

    def get(self, key: RowKey) -> Frame | None:
        """One row; None if it is not here."""
        group, sample, segment = key
        rows = self._groups.get(group, {}).get(sample, ())
        return rows[segment] if 0 <= segment < len(rows) else None

    def consume(self, transition: Transition) -> None:
        """Free what the transition makes unreachable."""
        match transition:
            case GroupDropped(group=group) | DeadLettered(group=group):
                self._groups.pop(group, None)
            case Retired(groups=groups) | EvalClosed(groups=groups):
                for group in groups:
                    self._groups.pop(group, None)
