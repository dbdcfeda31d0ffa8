"""A queue without sockets, as its process puts it together, for power cuts: ``python -m tests.contracts.power.queue``.

It trains some steps, is opened again now and then, and marks each flush: the replies of a real one leave then.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rl_async.files import make_durable_folder
from rl_async.messages import Done, Reserved, Version
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal import Journal, SqliteJournal, Synchronous
from rl_async.transfer_queue.ledger import COMPACTED, Ledger
from rl_async.transfer_queue.server import JournalRecorder, recover
from rl_async.transfer_queue.store import Feed, Store
from tests.contracts.queue.peers import SETTINGS
from tests.contracts.queue_storage.journals import header
from tests.support.power.cuts import Change, mark, marks_of

RUN = "run"
STEPS = 5


class Flushed(msgspec.Struct):
    """An acknowledged flush: the hash of each state that led to it, samples that were put, groups that may be gone."""

    states: list[str]
    put: list[tuple[int, int]]
    gone: list[int]


def payload(group: int, sample: int) -> bytes:
    """Row of a sample, of more than a page."""
    return f"{group}.{sample};".encode() * 1500


class Queue:
    """The store of a run, with its journal and the ledger in ``folder``."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.journal = journal
        self.ledger = Ledger(folder / "ledger.jsonl")
        feed = Feed(self.journal.append, self.ledger.append, lambda _: self._unmarked.states.append(self.state()))
        self.store = Store(SETTINGS, Counted(), [], feed)
        self._unmarked = Flushed([], [], [])
        try:
            recover(self.store, self.journal, self.ledger, 0.0)
            self.recovered = self.state()
            self._recorder = JournalRecorder(self.store, self.journal, self.ledger)
            self._recorder.flush()
        except BaseException:
            self.close()
            raise

    def state(self) -> str:
        return hashlib.sha256(self.store.dump()).hexdigest()

    def close(self) -> None:
        self.journal.close()
        self.ledger.close()

    def flush(self) -> Flushed:
        """What the server's loop does before it replies."""
        self._recorder.flush()
        flushed, self._unmarked = self._unmarked, Flushed([], [], [])
        return flushed

    def publish(self, step: int) -> None:
        assert self.store.publish(Version(0, step), []) == Done()

    def put(self) -> bool:
        """Lease and put one sample."""
        self.store.delivery.renew("w", 0.0)
        found = [(group, sample) for group in self.store.delivery.lease("w", 1, 0.0).groups for sample in group.samples]
        for group, sample in found:
            row = payload(group.group_id, sample)
            assert self.store.delivery.put("w", [header(group, sample, 0, row)], 0.0) == Done()
            self.journal.put(group.group_id, sample, [row])
            self._unmarked.put.append((group.group_id, sample))
        return bool(found)

    def retire(self, step: int, groups: list[int]) -> None:
        assert self.store.retire(step) == Done()
        self._unmarked.gone += groups


def sqlite_queue(folder: Path, synchronous: Synchronous) -> Queue:
    """One whose journal is in the same folder, with small files and a short log."""
    return Queue(folder, SqliteJournal(folder, "run", synchronous, segment_bytes=20_000, least_log_bytes=4000))


def train(folder: Path, open_queue: Callable[[Path], Queue]) -> None:
    """Train STEPS steps; open the queue again after each second one."""
    make_durable_folder(folder)
    queue = open_queue(folder)

    def flush() -> None:
        mark(msgspec.json.encode(queue.flush()).decode())

    queue.publish(0)
    flush()
    trained: list[int] = []
    for step in range(STEPS):
        while queue.put():
            flush()
        batch = queue.store.batches.reserve(step, 0.0)
        assert isinstance(batch, Reserved)
        flush()
        assert queue.store.batches.commit(step) == Done()
        queue.publish(step + 1)
        flush()
        trained += sorted(batch.tasks)
        if step % 2:
            queue.retire(step, trained[:-2])
            flush()
            queue.close()
            queue = open_queue(folder)
    queue.close()


class Promise:
    """What holds after a power cut, given all marks of the recording and the folder in which it ended."""

    def __init__(self, marks: list[str], root: Path, open_queue: Callable[[Path], Queue], *, may_lose: bool) -> None:
        self._flushes = [msgspec.json.decode(text, type=Flushed) for text in marks]
        self._ends = [flushed.states[-1] for flushed in self._flushes]
        self._between = {state for flushed in self._flushes for state in flushed.states}
        self._ledger = _lines((root / RUN / "ledger.jsonl").read_bytes())
        self._open_queue, self._may_lose = open_queue, may_lose

    def check(self, folder: Path, marks: list[str]) -> None:
        """Raise whatever the queue raises on ``folder``, and AssertionError for what is lost or different."""
        (folder / RUN).mkdir(exist_ok=True)  # the launcher's
        queue = self._open_queue(folder / RUN)
        try:
            self._check(queue, folder, len(marks))
        finally:
            queue.close()

    def _check(self, queue: Queue, folder: Path, acknowledged: int) -> None:
        if queue.store.book.published is None:
            assert self._may_lose or not acknowledged, "everything is lost"
            return
        if self._may_lose:
            assert queue.recovered in self._between, "the state is none that there was"
        else:
            flushes = self._ends.index(queue.recovered) + 1
            assert flushes >= acknowledged, f"{acknowledged - flushes} of {acknowledged} flushes are lost"
            self._check_put(queue, self._flushes[:flushes])
        for group in queue.store.book.groups.values():
            for key in [row.key for row in group.headers()]:
                assert queue.journal.get(key) == payload(*key[:2]), f"row {key}"
        count = queue.ledger.count
        expected = [line for line in self._ledger if line.get("seq", -1) < count]
        assert _lines((folder / RUN / "ledger.jsonl").read_bytes()) == expected, "the ledger is not what happened"

    def _check_put(self, queue: Queue, flushes: list[Flushed]) -> None:
        gone = {group for flushed in flushes for group in flushed.gone}
        put = [key for flushed in flushes for key in flushed.put if key[0] not in gone]
        lost = [key for key in put if not queue.journal.has(*key)]
        assert not lost, f"samples {lost} are lost"


def sqlite_promise(changes: list[Change], root: Path, synchronous: Synchronous) -> Promise:
    """That of a recorded ``sqlite_queue``."""
    return Promise(
        marks_of(changes),
        root,
        lambda folder: sqlite_queue(folder, synchronous),
        may_lose=synchronous != "full",
    )


def _lines(ledger: bytes) -> list[dict[str, Any]]:
    """The lines but for those that say where they are on the disk."""
    lines = [msgspec.json.decode(line) for line in ledger.splitlines()]
    return [line for line in lines if line["event"] != COMPACTED]


if __name__ == "__main__":
    train(Path(sys.argv[1]) / RUN, lambda folder: sqlite_queue(folder, sys.argv[2]))  # type: ignore[arg-type]
