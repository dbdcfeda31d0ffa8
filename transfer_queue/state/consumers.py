"""Readers of what was trained, beside the trainer: each by name, with a cursor of its own that the journal keeps.

    commit --> log (positions 1, 2, ... by step) --read--> consumers --acknowledge--> cursors

A group is in the log from its commit until the trainer retired it and every consumer has acknowledged it. One that the
trainer retires first is kept on the shelf, outside slots and admission's bytes, so that no consumer slows training. The
shelf holds ``consumer_bytes``; beyond, its oldest groups are given up, and counted for each consumer that missed them.

Positions in the log have no gaps, and a consumer's cursor is never below the log's first position less one: what it
has not read is here.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import msgspec

from rl_async.messages import (
    ConsumerRecord,
    Delivered,
    DeliveredGroup,
    Done,
    Refused,
    Subscription,
    Task,
    TrajectoryHeader,
)
from rl_async.transfer_queue.state.book import Book
from rl_async.transfer_queue.state.transitions import (
    Acknowledged,
    Effects,
    Missed,
    Retired,
    RolledBack,
    Subscribed,
    Transition,
    Unsubscribed,
)

MOST_CONSUMERS = 64
MOST_READ = 256  # groups of one answer
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One group of the log, with the step that trained it."""

    step: int
    group: int


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A group on the shelf; ``nbytes`` of its rows, its headers and its task."""

    task: Task
    headers: list[TrajectoryHeader]
    nbytes: int


class Cursor(msgspec.Struct):
    """Everything up to ``position`` is acknowledged, or was ``skipped``: so many groups since it subscribed."""

    position: int
    skipped: int = 0


class ConsumersState(msgspec.Struct, kw_only=True):
    """The dump of the consumers: log, shelf and cursors."""

    log: list[Entry] = []
    end: int = 0
    logged: int = 0
    shelf: dict[int, Kept] = {}
    cursors: dict[str, Cursor] = {}


class Consumers:
    """Readers by name. A verb decides and emits a transition; the methods named in the past tense apply it."""

    def __init__(self, book: Book, change: Callable[[Transition], None]) -> None:
        self._book, self._change = book, change
        self._log: dict[int, Entry] = {}  # by position
        self._places: dict[int, int] = {}  # positions by group
        self._end = 0  # position of the newest entry
        self.logged = 0  # steps before this one are in the log, or were
        # By group, oldest first. A plain dict would pass all that was deleted on the way to its first entry.
        self._shelf: OrderedDict[int, Kept] = OrderedDict()
        self._shelf_bytes = 0
        self._cursors: dict[str, Cursor] = {}
        self.effects: Effects = {
            Subscribed: self.subscribed,
            Acknowledged: self.acknowledged,
            Unsubscribed: self.unsubscribed,
            Missed: self.missed,
        }

    # --- verbs ------------------------------------------------------------------------------------------------------

    def subscribe(self, consumer: str, oldest: bool) -> Subscription | Refused:
        """Make a consumer, which reads from now on or from the oldest group that is here; one that exists stays."""
        if consumer not in self._cursors:
            if not _NAME.fullmatch(consumer):
                reason = f"consumer {consumer!r}: a name has 1 to 100 letters, digits, and the characters . _ -"
                return Refused(code="bad_name", reason=reason)
            if len(self._cursors) >= MOST_CONSUMERS:
                reason = f"there are {MOST_CONSUMERS} consumers; unsubscribe one of: {', '.join(sorted(self._cursors))}"
                return Refused(code="full", reason=reason)
            position = self._first - 1 if oldest else self._end
            self._change(Subscribed(consumer=consumer, position=position))
        cursor = self._cursors[consumer]
        return Subscription(position=cursor.position, skipped=cursor.skipped)

    def read(self, consumer: str, after: int, max_groups: int) -> Delivered | Refused:
        """The groups behind ``after``, or behind the cursor if that is further on, in order of training."""
        cursor = self._cursors.get(consumer)
        if cursor is None:
            return self._unknown(consumer)
        if after > self._end:
            return self._beyond(after)
        start = max(after, cursor.position) + 1
        stop = min(self._end + 1, start + max(1, min(max_groups, MOST_READ)))
        groups = [self._delivered(position) for position in range(start, stop)]
        finished = self._book.finished and start > self._end
        return Delivered(groups=groups, skipped=cursor.skipped, finished=finished)

    def acknowledge(self, consumer: str, position: int) -> Done | Refused:
        """The consumer needs nothing up to ``position`` any more; what it acknowledged before changes nothing."""
        cursor = self._cursors.get(consumer)
        if cursor is None:
            return self._unknown(consumer)
        if position > self._end:
            return self._beyond(position)
        if position > cursor.position:
            freed = self._read_by_all({**self._positions(), consumer: position})
            self._change(Acknowledged(consumer=consumer, position=position, freed=freed))
        return Done()

    def unsubscribe(self, consumer: str) -> Done:
        """Forget a consumer and what was kept for it alone; an unknown one is already forgotten."""
        if consumer in self._cursors:
            left = {name: at for name, at in self._positions().items() if name != consumer}
            self._change(Unsubscribed(consumer=consumer, freed=self._read_by_all(left)))
        return Done()

    def divide(self, retired: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split groups that the trainer retires into those to forget and those to keep for consumers."""
        lowest = min(self._positions().values(), default=self._end)
        read: list[int] = []
        unread: list[int] = []
        for group in retired:
            (unread if self._places[group] > lowest else read).append(group)
        return read, unread

    def trim(self) -> None:
        """Give up the oldest groups of a shelf that is too full."""
        excess, freed = self._shelf_bytes - self._book.settings.consumer_bytes, list[int]()
        for group, kept in self._shelf.items():
            if excess <= 0:
                break
            excess -= kept.nbytes
            freed.append(group)
        if freed:
            self._change(Missed(freed=freed))

    def records(self) -> list[ConsumerRecord]:
        """Name, position and backlog of each consumer, for inspection."""
        return [
            ConsumerRecord(name=name, position=at.position, behind=self._end - at.position, skipped=at.skipped)
            for name, at in sorted(self._cursors.items())
        ]

    def keeps(self, group: int) -> bool:
        """Whether the group is kept on the shelf."""
        return group in self._shelf

    def kept_headers(self, group: int, sample: int) -> list[TrajectoryHeader]:
        """Headers of the rows of a sample on the shelf, by segment."""
        return [header for header in self.headers_of(group) if header.sample == sample]

    def headers_of(self, group: int) -> list[TrajectoryHeader]:
        """Headers of the rows of a group on the shelf."""
        kept = self._shelf.get(group)
        return [] if kept is None else kept.headers

    def kept_samples(self) -> list[TrajectoryHeader]:
        """The first header of each sample on the shelf."""
        return [header for kept in self._shelf.values() for header in kept.headers if header.segment == 0]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the groups on the shelf."""
        return self._shelf_bytes

    @property
    def _first(self) -> int:
        return self._end - len(self._log) + 1

    def _positions(self) -> dict[str, int]:
        return {name: cursor.position for name, cursor in self._cursors.items()}

    def _read_by_all(self, positions: dict[str, int]) -> list[int]:
        """Groups on the shelf that every consumer has read if they are at these positions.

        The shelf is in the order of positions, so that what consumers have not read is not walked over.
        """
        lowest = min(positions.values(), default=self._end)
        return list(takewhile(lambda group: self._places[group] <= lowest, self._shelf))

    def _delivered(self, position: int) -> DeliveredGroup:
        entry = self._log[position]
        kept = self._shelf.get(entry.group)
        if kept is None:
            group = self._book.groups[entry.group]
            kept = Kept(group.task, group.headers(), 0)
        return DeliveredGroup(
            position=position, step=entry.step, group_id=entry.group, task=kept.task, headers=kept.headers
        )

    def _beyond(self, position: int) -> Refused:
        reason = f"the newest position is {self._end}, and {position} was given, perhaps by a queue before this one"
        return Refused(code="bad_position", reason=reason)

    def _unknown(self, consumer: str) -> Refused:
        known = ", ".join(sorted(self._cursors)) or "none"
        return Refused(code="unknown_consumer", reason=f"no consumer {consumer!r}; subscribed: {known}")

    # --- what a change does -----------------------------------------------------------------------------------------

    def subscribed(self, event: Subscribed) -> None:
        """Apply `Subscribed`: add a cursor."""
        self._cursors[event.consumer] = Cursor(event.position)

    def acknowledged(self, event: Acknowledged) -> None:
        """Apply `Acknowledged`: move a cursor forward."""
        self._cursors[event.consumer].position = event.position
        self._forget(event.freed)

    def unsubscribed(self, event: Unsubscribed) -> None:
        """Apply `Unsubscribed`: remove a cursor."""
        del self._cursors[event.consumer]
        self._forget(event.freed)

    def missed(self, event: Missed) -> None:
        """Apply `Missed`: move consumers that have not read these groups past them."""
        last = self._places[event.freed[-1]]
        for cursor in self._cursors.values():
            if cursor.position < last:
                self._skip(cursor, last)
        self._forget(event.freed)

    def committed(self, batches: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Append the batches from the step ``logged`` on to the log.

        None is appended again after a rollback: its groups are the same, with the same rows.
        """
        for step, groups in batches:
            self.logged = step + 1
            for group in groups:
                self._end += 1
                self._log[self._end] = Entry(step, group)
                self._places[group] = self._end

    def retired(self, event: Retired) -> None:
        """Apply `Retired`: drop groups from the log, or keep them on the shelf; they are still in the book."""
        for group_id in event.shelved:
            group = self._book.groups[group_id]
            headers = group.headers()
            words = len(msgspec.msgpack.encode((group.task, headers)))
            self._keep(group_id, Kept(group.task, headers, words + sum(header.nbytes for header in headers)))
        self._forget(event.groups)

    def lost(self, group: int, sample: int) -> None:
        """Drop a sample that was lost with its payload shard; consumers get the group without it."""
        kept = self._shelf[group]
        gone = sum(header.nbytes for header in kept.headers if header.sample == sample)
        left = [header for header in kept.headers if header.sample != sample]
        self._shelf[group] = Kept(kept.task, left, kept.nbytes - gone)
        self._shelf_bytes -= gone

    def rolled_back(self, event: RolledBack) -> None:
        """Apply `RolledBack`: a queue that starts over has no earlier rows, so consumers skip to the end of the log."""
        if not event.fresh:
            return
        for cursor in self._cursors.values():
            self._skip(cursor, self._end)
        self._log.clear()
        self._places.clear()
        self._shelf.clear()
        self._shelf_bytes, self.logged = 0, event.step

    def _skip(self, cursor: Cursor, position: int) -> None:
        self._book.counters["consumers_missed"] += position - cursor.position
        cursor.skipped += position - cursor.position
        cursor.position = position

    def _keep(self, group: int, kept: Kept) -> None:
        self._shelf[group] = kept
        self._shelf_bytes += kept.nbytes

    def _forget(self, groups: Sequence[int]) -> None:
        for group in groups:
            position = self._places.pop(group, None)
            if position is not None:
                del self._log[position]
            kept = self._shelf.pop(group, None)
            if kept is not None:
                self._shelf_bytes -= kept.nbytes

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> ConsumersState:
        """The state for a dump; equal for equal consumers."""
        return ConsumersState(
            log=[self._log[position] for position in range(self._first, self._end + 1)],
            end=self._end,
            logged=self.logged,
            shelf=dict(self._shelf),
            cursors={name: self._cursors[name] for name in sorted(self._cursors)},
        )

    def load(self, state: ConsumersState) -> None:
        """Restore a dumped state; only a new store can."""
        self._end, self.logged, self._cursors = state.end, state.logged, state.cursors
        first = state.end - len(state.log) + 1
        self._log = dict(enumerate(state.log, first))
        self._places = {entry.group: position for position, entry in self._log.items()}
        for group, kept in state.shelf.items():
            self._keep(group, kept)
