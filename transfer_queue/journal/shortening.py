"""After a power cut: how much of a log can be kept, if payloads are gone that its transitions name.

A state counts if every sample in it has its payload. The newest such state is looked for, from the end of the log back.
"""

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from rl_async.transfer_queue.journal.payloads import ALL_GROUPS, FREEING, freed_by
from rl_async.transfer_queue.journal.segments import SegmentPlace
from rl_async.transfer_queue.state.transitions import SamplesStored, Transition, TransitionType

Key = tuple[int, int]  # group and sample; media have negative sample numbers
FOREVER = 1 << 62

_transition: msgspec.msgpack.Decoder[Transition] = msgspec.msgpack.Decoder(TransitionType)
_place = msgspec.msgpack.Decoder(SegmentPlace)


class _Life(NamedTuple):
    """A payload belongs to the states after transition ``born`` and up to ``died``."""

    key: Key | None
    born: int
    died: int


class History:
    """Which payloads belong to which states, from the tables ``payload`` and ``log``."""

    def __init__(self, db: sqlite3.Connection, dumped: int) -> None:
        """``dumped``: the number of transitions before the log; what they stored is on the disk."""
        self._dumped = self._end = dumped
        self.freed: set[int] = set()  # groups that ended in the log, whose rows are still there
        self._rows: dict[Key, SegmentPlace] = {}
        for group, sample, place in db.execute("SELECT grp, sample, place FROM payload"):
            self._rows[group, sample] = _place.decode(place)
        self._bad: dict[Key, bool] = {}
        self._lives: list[_Life] = []
        self._read(db)

    def _read(self, db: sqlite3.Connection) -> None:
        (self._end,) = db.execute("SELECT coalesce(max(seq) + 1, ?) FROM log", (self._dumped,)).fetchone()
        kinds = [SamplesStored.__name__, *(kind.__name__ for kind in FREEING)]
        query = f"SELECT seq, body FROM log WHERE kind IN ({', '.join('?' * len(kinds))}) ORDER BY seq"
        events = [(seq, _transition.decode(body)) for seq, body in db.execute(query, kinds)]
        fresh = max((seq for seq, event in events if freed_by(event) is ALL_GROUPS), default=-1)
        if fresh >= 0:  # it deleted the rows of all states before it
            self._lives.append(_Life(None, self._dumped - 1, fresh))
            events = [(seq, event) for seq, event in events if seq > fresh]
        here = self._born(events)
        for seq, event in events:
            for group in freed_by(event) or ():
                self.freed.add(group)
                self._lives += [_Life((group, sample), born, seq) for sample, born in here.pop(group, {}).items()]
        for group, samples in here.items():
            self._lives += [_Life((group, sample), born, FOREVER) for sample, born in samples.items()]

    def _born(self, events: list[tuple[int, Transition]]) -> dict[int, dict[int, int]]:
        """The transition that stored each sample, by group, but for samples on shards.

        A medium counts as stored with the first sample of its group.
        """
        born: dict[int, dict[int, int]] = {}
        for group, sample in self._rows:
            born.setdefault(group, {})[sample] = self._dumped - 1
        for seq, event in reversed(events):
            for headers in event.samples if isinstance(event, SamplesStored) else ():
                if not headers[0].shards:
                    samples = born.setdefault(headers[0].group_id, {})
                    samples |= dict.fromkeys([headers[0].sample, *(key for key in samples if key < 0)], seq)
        return born

    def places(self) -> dict[Key, SegmentPlace]:
        """The payloads of the newest state."""
        return {key: place for key, place in self._rows.items() if key[0] not in self.freed}

    def segments(self) -> set[int]:
        """The files that hold payloads of any state in the log."""
        return {place.segment for place in self._rows.values()}

    def lost(self, holds: Callable[[SegmentPlace], bool]) -> int | None:
        """How many transitions at the end have to go; None if no state in the log has all its payloads."""

        def is_bad(life: _Life) -> bool:
            if life.key is None or life.key not in self._rows:
                return True
            if life.born < self._dumped:
                return False
            if life.key not in self._bad:
                self._bad[life.key] = not holds(self._rows[life.key])
            return self._bad[life.key]

        end = self._end
        while lacking := [life for life in self._lives if life.born < end <= life.died and is_bad(life)]:
            end = min(life.born for life in lacking)
            if end < self._dumped:
                return None
        return self._end - end

    def shorten(self, db: sqlite3.Connection, lost: int) -> None:
        """Delete the newest ``lost`` transitions, and the payloads that they stored."""
        end = self._end - lost
        later = [life.key for life in self._lives if life.key is not None and life.born >= end]
        stored = [key for key in later if key[1] >= 0 or self._bad.get(key)]  # the bytes of a medium are in its number
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM log WHERE seq >= ?", (end,))
        db.executemany("DELETE FROM payload WHERE grp = ? AND sample = ?", stored)
        db.execute("COMMIT")
