"""Which payloads a transition frees, and payloads in memory. They are never decoded."""

import ctypes
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.state.transitions import (
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
