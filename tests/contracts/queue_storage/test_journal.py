"""What every durable journal promises: another queue goes on from what was flushed, and only one at a time does."""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from rl_async.errors import JournalError
from rl_async.messages import Done, Resumed, Version
from rl_async.transfer_queue import journal
from rl_async.transfer_queue.journal import JOURNAL_SCHEMA, SqliteJournal
from tests.contracts.queue_storage.journals import (
    Driver,
    OpenJournal,
    header,
    journals,
    payload,
    sqlite_journals,
)


@pytest.fixture(params=["sqlite", "redis"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenJournal]:
    """Opens the same journal each time it is called."""
    with journals(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def driver(again: OpenJournal) -> Iterator[Driver]:
    made = Driver(again)
    made.store.publish(Version(0, 0), [])
    yield made
    made.journal.close()


def test_what_was_flushed_comes_back_and_the_rest_does_not(driver: Driver) -> None:
    run_id = driver.journal.run_id
    groups = driver.lease(2, b"question")
    driver.put(groups[0], 0, [b"first", b"second"])
    driver.journal.flush()
    flushed = driver.store.dump()
    driver.put(groups[0], 1, [b"never flushed"])
    assert driver.read(0, 1) == b"never flushed", "it can be read before it is durable"
    driver.restart()
    assert driver.journal.run_id == run_id
    assert driver.store.dump() == flushed
    assert driver.read(0, 0) == b"first" and driver.read(0, 0, 1) == b"second"
    assert driver.read(0, 1) is driver.read(0, 0, 2) is driver.read(0, 0, -1) is driver.read(7, 0) is None
    assert driver.lease(2, b"question") == groups, "a request that is repeated gets the same groups"


def test_requests_repeated_after_a_restart_change_nothing(driver: Driver) -> None:
    (group, other) = driver.lease(2)
    for each in (group, other):
        for sample in (0, 1):
            driver.put(each, sample)
    batch = driver.store.batches.reserve(0, 0.0)
    driver.store.batches.commit(0)
    driver.store.publish(Version(0, 1), [])
    driver.store.retire(0)
    driver.journal.flush()
    before = driver.store.dump()
    driver.restart()
    driver.put(group, 0)
    assert driver.store.batches.reserve(0, 0.0) == batch
    assert driver.store.batches.commit(0) == driver.store.publish(Version(0, 1), []) == driver.store.retire(0) == Done()
    assert driver.store.dump() == before


def test_many_restarts_with_compactions_lose_nothing(driver: Driver) -> None:
    compacted, trained, kept = 0, [], {}
    for step in range(8):
        groups = driver.train(step)
        trained += groups
        kept[step] = groups
        driver.store.retire(step - 1)
        kept.pop(step - 2, None)
        driver.journal.flush()
        if driver.journal.outgrown:
            compacted += 1
            driver.journal.compact(driver.store.dump())
            assert not driver.journal.outgrown
        before = driver.store.dump()
        driver.restart()
        assert driver.store.dump() == before
        for group in trained:
            for sample in (0, 1):
                here = any(group in groups for groups in kept.values())
                assert driver.read(group, sample) == (payload(group, sample) if here else None)
                assert driver.read(group, sample, 1) == (b"" if here else None)
                assert driver.read(group, sample, 2) == (b"tail" if here else None)
    assert compacted and sorted(trained) == list(range(16))
    assert isinstance(driver.store.resume(7, 1, b""), Resumed)
    assert sorted(driver.store.batches.reserve(7, 0.0).tasks) == kept[7]  # type: ignore[union-attr]


def test_a_fresh_start_frees_everything(driver: Driver) -> None:
    driver.train(0)
    snapshot = driver.store.batches.snapshot()
    driver.train(1)
    driver.store.retire(2)
    driver.journal.flush()
    assert driver.store.resume(1, 1, snapshot).readmitted == 2  # type: ignore[union-attr]
    driver.journal.flush()
    before = driver.store.dump()
    driver.restart()
    assert driver.store.dump() == before
    assert all(driver.read(group, sample) is None for group in range(6) for sample in (0, 1))
    driver.store.publish(Version(1, 1), [])
    assert [group.group_id for group in driver.lease(2)] == [2, 3]
    driver.put(driver.lease(1)[0], 0, [b"new"])
    driver.journal.flush()
    driver.restart()


def test_a_second_queue_is_kept_out_until_the_first_has_ended(driver: Driver, again: OpenJournal) -> None:
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.05):
            driver.journal.flush()

    first = threading.Thread(target=live)
    first.start()
    try:
        with pytest.raises(JournalError, match="another queue"):
            again()
    finally:
        ended.set()
        first.join()
    driver.restart()


# SQLite and files: torn ones, a full disk, another version: a clean recovery, or an error that says what to do.


def started(folder: Path, **settings: Any) -> Driver:
    driver = Driver(sqlite_journals(folder, **settings))
    assert driver.store.publish(Version(0, 0), []) == Done()
    driver.journal.flush()
    return driver


def test_whatever_is_left_of_the_log_is_a_whole_number_of_flushes(tmp_path: Path) -> None:
    """The write-ahead log, cut anywhere: the store is as after some flush, and all payloads it knows are there."""
    driver = started(tmp_path)
    states = {driver.store.dump(): 0}
    for number in range(4):
        driver.train(number)
        driver.journal.flush()
        states[driver.store.dump()] = number + 1
    wal = (tmp_path / "queue.sqlite-wal").read_bytes()
    draw = random.Random(0)
    found = set()
    for cut in [0, len(wal), *(draw.randrange(len(wal)) for _ in range(30))]:
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("cut-*", "*-shm"))
        (copy / "queue.sqlite-wal").write_bytes(wal[:cut])
        if cut < 40_000:
            continue  # not even the tables are there
        other = Driver(sqlite_journals(copy))
        found.add(states[other.store.dump()])
        for group in range(2 * found.copy().pop()):
            assert other.read(group, 1) in (None, payload(group, 1))
        other.journal.close()
    driver.journal.close()
    assert len(found) > 2


@pytest.mark.parametrize("synchronous", ["normal", "full"])
def test_a_full_flush_forces_every_payload_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: Literal["normal", "full"]
) -> None:
    """Also those that were written before it: for a reader, or to a file that was full."""
    forced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        forced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    driver = Driver(sqlite_journals(tmp_path, synchronous=synchronous, segment_bytes=3000))
    assert driver.store.publish(Version(0, 0), []) == Done()
    forced.clear()
    group = driver.lease(1)[0]
    driver.put(group, 0, [b"x" * 5000])
    assert driver.read(group.group_id, 0) == b"x" * 5000  # which writes it
    driver.put(group, 1, [b"y" * 5000])  # into the next file
    driver.journal.flush()
    written = sorted(str(path) for path in (tmp_path / "queue-payloads").glob("*.segment"))
    assert len(written) == 2
    assert {path for path in forced if path.endswith(".segment")} == (set(written) if synchronous == "full" else set())
    driver.journal.close()


def test_a_journal_on_a_file_system_that_hosts_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its locks and its log are those of one host; two queues could write one file."""
    table = tmp_path / "mountinfo"
    table.write_text(f"30 22 0:26 / {tmp_path} rw shared:2 - nfs4 server:/home rw\n")
    monkeypatch.setattr(journal, "MOUNTS", table)
    with pytest.raises(JournalError, match=r"nfs4.*queue\.sqlite\.folder"):
        Driver(sqlite_journals(tmp_path))
    assert list(tmp_path.iterdir()) == [table]


def test_a_changed_byte_of_a_payload_is_found(tmp_path: Path) -> None:
    driver = started(tmp_path, synchronous="full")
    driver.train(0)
    driver.journal.flush()
    driver.journal.close()
    (segment,) = (tmp_path / "queue-payloads").glob("*.segment")
    data = bytearray(segment.read_bytes())
    data[10] ^= 1
    segment.write_bytes(data)
    driver = Driver(sqlite_journals(tmp_path, synchronous="full"))
    with pytest.raises(JournalError, match=r"00000001\.segment.*--resume"):
        driver.read(0, 0)
    assert driver.read(0, 1) == payload(0, 1)
    driver.journal.close()


def test_bytes_that_no_flush_named_are_cleared_away(tmp_path: Path) -> None:
    driver = started(tmp_path)
    driver.train(0)
    driver.journal.flush()
    driver.put(driver.lease(1)[0], 0, [b"x" * 5000])
    driver.journal.get((0, 0, 0))  # reading writes what is pending: as if the queue were killed before the commit
    driver.journal.close()
    folder = tmp_path / "queue-payloads"
    (folder / "00000009.segment").write_bytes(b"torn")
    driver = Driver(sqlite_journals(tmp_path))
    assert driver.read(0, 0) == payload(0, 0)
    assert sorted(path.name for path in folder.iterdir()) == ["00000001.segment", "00000010.segment"]
    driver.journal.close()


def test_segments_are_deleted_when_all_their_groups_are_retired(tmp_path: Path) -> None:
    driver = started(tmp_path, segment_bytes=5000)
    for step in range(10):
        driver.train(step)
        driver.store.retire(step)
        driver.journal.flush()
        if driver.journal.outgrown:
            driver.journal.compact(driver.store.dump())
    files = list((tmp_path / "queue-payloads").iterdir())
    assert sum(path.stat().st_size for path in files) < 6 * 5000, files
    driver.journal.close()


def test_a_lost_segment_is_named(tmp_path: Path) -> None:
    driver = started(tmp_path, synchronous="full")
    driver.train(0)
    driver.journal.flush()
    driver.journal.close()
    path = tmp_path / "queue-payloads" / "00000001.segment"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(JournalError, match=r"00000001\.segment.*--resume"):
        Driver(sqlite_journals(tmp_path, synchronous="full"))
    path.unlink()
    with pytest.raises(JournalError, match=r"00000001\.segment"):
        Driver(sqlite_journals(tmp_path, synchronous="full"))


def test_without_full_flushes_a_lost_payload_takes_only_what_came_after_it(tmp_path: Path) -> None:
    driver = started(tmp_path, segment_bytes=3000)
    driver.train(0)
    driver.journal.flush()
    before = driver.store.dump()
    first, *_ = driver.lease(1)
    driver.journal.flush()
    leased = driver.store.dump()
    driver.put(first, 0, [b"x" * 3000])
    driver.store.retire(1)  # frees what was trained
    driver.journal.flush()
    assert driver.read(0, 0) is None
    driver.journal.close()
    *_, last = sorted(path for path in (tmp_path / "queue-payloads").iterdir() if path.stat().st_size)
    os.truncate(last, last.stat().st_size - 1)
    driver = Driver(sqlite_journals(tmp_path))
    assert driver.store.dump() == leased != before
    assert driver.read(0, 0) == payload(0, 0), "it is in use again"
    assert driver.read(first.group_id, 0) is None
    driver.put(first, 0, [b"y" * 3000])
    driver.journal.flush()
    driver.journal.compact(driver.store.dump())
    driver.restart()
    assert driver.read(first.group_id, 0) == b"y" * 3000
    driver.journal.close()


def test_a_log_whose_payloads_are_on_shards_is_kept(tmp_path: Path) -> None:
    driver = started(tmp_path)
    (group,) = driver.lease(1)
    sharded = msgspec.structs.replace(header(group, 0, 0, b"x"), shards=["shard-0"])
    assert driver.store.delivery.put("w", [sharded], 0.0) == Done()
    driver.journal.flush()
    before = driver.store.dump()
    driver.restart()
    assert driver.store.dump() == before
    driver.journal.close()


def test_a_payload_that_a_dump_needs_is_on_the_disk_or_named(tmp_path: Path) -> None:
    driver = started(tmp_path)
    driver.train(0)
    driver.journal.flush()
    driver.journal.compact(driver.store.dump())
    driver.journal.close()
    (path,) = (path for path in (tmp_path / "queue-payloads").iterdir() if path.stat().st_size)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(JournalError, match=rf"{path.name}.*--resume"):
        Driver(sqlite_journals(tmp_path))


@pytest.mark.parametrize("schema", [JOURNAL_SCHEMA - 1, 99])  # the one before, and some time from now
def test_a_journal_of_another_version_is_named(tmp_path: Path, schema: int) -> None:
    started(tmp_path).journal.close()
    with sqlite3.connect(tmp_path / "queue.sqlite") as db:
        db.execute(f"PRAGMA user_version={schema}")
    db.close()
    with pytest.raises(JournalError, match=rf"schema {schema}\b.*\b{JOURNAL_SCHEMA}\b"):
        SqliteJournal(tmp_path, "run")


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "queue.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(JournalError, match=r"queue\.sqlite.*--resume"):
        SqliteJournal(tmp_path, "run")


def test_a_damaged_transition_is_named(tmp_path: Path) -> None:
    driver = started(tmp_path)
    driver.journal.close()
    with sqlite3.connect(tmp_path / "queue.sqlite") as db:
        db.execute("UPDATE log SET body = x'c1'")
    db.close()
    with pytest.raises(JournalError, match=r"queue\.sqlite.*--resume"):
        Driver(sqlite_journals(tmp_path))


def test_a_changed_bit_of_the_write_ahead_log_is_its_end_and_changes_no_transition(tmp_path: Path) -> None:
    """SQLite sums up each frame and those before it, and stops reading at the first that does not fit."""
    run = tmp_path / "run"
    run.mkdir()
    driver = started(run)
    begun, states = (run / "queue.sqlite-wal").stat().st_size, [driver.store.dump()]
    for number in range(3):
        driver.train(number)
        driver.journal.flush()
        states.append(driver.store.dump())
    wal, draw, found = (run / "queue.sqlite-wal").read_bytes(), random.Random(0), set[int]()
    for number in range(25):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*-shm"))
        damaged = bytearray(wal)
        damaged[draw.randrange(begun, len(wal))] ^= 1 << draw.randrange(8)
        (copy / "queue.sqlite-wal").write_bytes(damaged)
        again = Driver(sqlite_journals(copy))
        found.add(states.index(again.store.dump()))
        again.journal.close()
        shutil.rmtree(copy)
    driver.journal.close()
    assert found == {0, 1, 2}


def test_a_changed_bit_of_the_database_is_found_or_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    driver = started(tmp_path / "run")
    for step in range(2):
        driver.train(step)
        driver.journal.flush()
    driver.journal.compact(driver.store.dump())
    driver.train(2)
    driver.journal.flush()
    expected, run_id = driver.store.dump(), driver.journal.run_id
    driver.journal.close()
    whole = (tmp_path / "run" / "queue.sqlite").read_bytes()
    found = 0
    for number in range(300):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", copy)
        damaged = bytearray(whole)
        damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        (copy / "queue.sqlite").write_bytes(damaged)
        try:
            again = Driver(sqlite_journals(copy))
        except JournalError as error:
            assert "queue.sqlite" in str(error)
            found += 1
        else:
            assert (again.store.dump(), again.journal.run_id) == (expected, run_id)
            again.journal.close()
        shutil.rmtree(copy)
    assert found > 0


@pytest.mark.parametrize("table", ["meta", "log", "dump", "payload"])
def test_a_journal_without_checksums_is_read_and_has_them_from_then_on(tmp_path: Path, table: str) -> None:
    driver = started(tmp_path)
    driver.train(0)
    driver.journal.flush()
    driver.journal.compact(driver.store.dump())
    driver.train(1)
    driver.journal.flush()
    expected = driver.store.dump()
    driver.journal.close()
    with sqlite3.connect(tmp_path / "queue.sqlite") as db:
        for name in ("meta", "log", "dump", "payload"):
            db.execute(f"ALTER TABLE {name} DROP COLUMN digest")
        db.execute(f"PRAGMA user_version={JOURNAL_SCHEMA}")
    db.close()
    for step in (2, 3):
        again = Driver(sqlite_journals(tmp_path))
        assert again.store.dump() == expected
        again.train(step)
        again.journal.flush()
        expected = again.store.dump()
        again.journal.close()
    column = {"meta": "run_id", "log": "kind", "dump": "body", "payload": "place"}[table]
    kind = "TEXT" if table in ("meta", "log") else "BLOB"
    with sqlite3.connect(tmp_path / "queue.sqlite") as db:
        db.execute(f"UPDATE {table} SET {column} = CAST({column} || x'41' AS {kind})")
    db.close()
    with pytest.raises(JournalError, match=rf"queue\.sqlite.*table {table} .*--resume"):
        Driver(sqlite_journals(tmp_path))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"queue\.lock"):
        SqliteJournal(tmp_path / "nowhere", "run")


FULL = """
import resource, sys
from pathlib import Path
from rl_async.errors import JournalError
from tests.contracts.queue_storage.test_journal import started
driver = started(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
step = 0
print(step, driver.store.dump().hex(), flush=True)
try:
    while step < 40:
        driver.train(step)
        driver.journal.flush()
        step += 1
        print(step, driver.store.dump().hex(), flush=True)
except JournalError as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.parametrize("limit", [20_000, 150_000])
def test_a_full_disk_loses_nothing_that_was_flushed(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE stands for the full disk: a file cannot grow, in the middle of a write."""
    command = [sys.executable, "-c", FULL, str(tmp_path), str(limit)]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "error: the queue's journal" in ended.stderr and "--resume" in ended.stderr, ended.stderr
    driver = Driver(sqlite_journals(tmp_path))
    assert driver.store.dump().hex() == ended.stdout.split()[-1]
    driver.journal.close()


def test_a_segment_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = started(tmp_path)
    driver.put(driver.lease(1)[0], 0)
    monkeypatch.setattr(os, "writev", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC), b"x"))
    with pytest.raises(JournalError, match=r"00000001\.segment.*--resume"):
        driver.journal.flush()
    driver.journal.close()
