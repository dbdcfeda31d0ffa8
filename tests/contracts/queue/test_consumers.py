"""Several readers of what is trained: each has a place of its own that every journal keeps, and none stops training."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rl_async.errors import ProtocolError, QueueLost
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Delivered, Done, Refused, Subscription, Task, Version
from rl_async.transfer_queue import SyncQueueClient, read_groups, serve
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.journal import MemoryJournal
from tests.contracts.queue.peers import trajectory
from tests.contracts.queue_storage.journals import SETTINGS, Driver, OpenJournal, journals, payload


@pytest.fixture(params=["memory", "sqlite", "redis"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenJournal]:
    """Opens the same journal each time it is called; one in memory is another each time."""
    with journals(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def driver(again: OpenJournal, request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = Driver(again, getattr(request, "param", SETTINGS))
    made.store.publish(Version(0, 0), [])
    yield made
    made.journal.close()


def restart(driver: Driver, again: OpenJournal) -> None:
    """Another queue goes on from the journal, if it outlives the process."""
    driver.journal.flush()
    if again is MemoryJournal:
        return
    before = driver.store.dump()
    driver.restart()
    assert driver.store.dump() == before


def groups(reply: Delivered | Refused) -> list[int]:
    assert isinstance(reply, Delivered), reply
    return [group.group_id for group in reply.groups]


def test_what_a_consumer_has_not_read_outlives_the_trainers_use_and_the_queue(driver: Driver, again: OpenJournal):
    assert driver.store.consumers.subscribe("logger", False) == Subscription(position=0, skipped=0)
    for step in range(3):
        driver.train(step)
        driver.store.retire(step + 1)
        restart(driver, again)
    assert driver.store.consumers.subscribe("evaluator", True) == Subscription(position=0, skipped=0)
    status, row_bytes = driver.store.status(0.0), len(payload(0, 0)) + len(b"tail")
    assert status.payload_bytes == status.ready * 2 * row_bytes, "the trainer's budget has nothing of what was trained"
    assert groups(driver.store.consumers.read("logger", -1, 2)) == [0, 1] and groups(
        driver.store.consumers.read("logger", 3, 9)
    ) == [
        3,
        4,
        5,
    ]
    assert all(driver.read(group, 1) == payload(group, 1) for group in range(6))
    assert driver.store.consumers.acknowledge("logger", 4) == driver.store.consumers.acknowledge("logger", 2) == Done()
    restart(driver, again)
    assert groups(driver.store.consumers.read("logger", -1, 9)) == [4, 5]
    assert all(driver.read(group, 0) == payload(group, 0) for group in range(6)), "the evaluator has not read them"
    assert driver.store.consumers.acknowledge("evaluator", 3) == Done()
    restart(driver, again)
    assert [driver.read(group, 0) is None for group in range(6)] == [True] * 3 + [False] * 3
    assert driver.store.consumers.unsubscribe("evaluator") == Done()
    restart(driver, again)
    assert [driver.read(group, 0) is None for group in range(6)] == [True] * 4 + [False] * 2
    driver.store.consumers.acknowledge("logger", 6)
    assert all(driver.read(group, sample) is None for group in range(6) for sample in (0, 1))


def test_groups_that_are_trained_again_after_a_rollback_do_not_come_twice(driver: Driver, again: OpenJournal):
    driver.store.consumers.subscribe("logger", False)
    first, second = driver.train(0), driver.train(1)
    driver.store.consumers.acknowledge("logger", 3)
    restart(driver, again)
    driver.store.resume(1, 1, b"")
    driver.store.publish(Version(1, 1), [])
    driver.store.batches.reserve(1, 0.0)
    driver.store.batches.commit(1)
    restart(driver, again)
    assert groups(driver.store.consumers.read("logger", -1, 9)) == [second[1]] and len(first) == 2


SMALL = msgspec.structs.replace(SETTINGS, consumer_bytes=3 * 2 * (len(payload(0, 0)) + 4) + 2000)


@pytest.mark.parametrize("driver", [SMALL], ids=["small"], indirect=True)
def test_a_shelf_that_is_full_gives_up_the_oldest_and_says_so(driver: Driver, again: OpenJournal):
    driver.store.consumers.subscribe("slow", False)
    for step in range(4):
        driver.train(step)
        driver.store.retire(step + 1)
    restart(driver, again)
    reply = driver.store.consumers.read("slow", -1, 99)
    kept = groups(reply)
    assert isinstance(reply, Delivered) and reply.skipped == 8 - len(kept) and 0 < len(kept) < 8
    assert kept == list(range(8 - len(kept), 8)), "the newest are here"
    assert [driver.read(group, 0) is not None for group in range(8)] == [group in kept for group in range(8)]
    report = driver.store.inspect(0.0, {})
    assert report.status.counters["consumers_missed"] == reply.skipped and report.kept_bytes <= SMALL.consumer_bytes


# --- over the wire --------------------------------------------------------------------------------------------------


def tasks(count: int) -> list[Task]:
    return list(map(numbered, range(count)))


def client(address: str, name: str = "me") -> SyncQueueClient:
    return SyncQueueClient(address, role="test", name=name, timeout_s=10)


def train(queue: SyncQueueClient, steps: int) -> None:
    """Generate and train so many steps of two groups, and retire them."""
    first = queue.status().published.step
    for step in range(first, first + steps):
        for group in queue.lease(2, 5.0).groups:
            assert queue.put(trajectory(group, 0)) == Done()
        queue.reserve(step, 5.0)
        queue.commit(step)
        queue.publish(Version(0, step + 1), [])
        queue.retire(step + 1)


def test_every_consumer_reads_every_group_and_one_that_died_gets_its_last_again():
    with (
        serve(tasks(8), batch_groups=2, max_staleness=0) as address,
        client(address) as queue,
        client(address) as other,
    ):
        queue.subscribe("logger")
        queue.subscribe("evaluator")
        train(queue, 2)
        logger = read_groups(other, "logger", timeout_s=10)
        assert [next(logger).group_id for _ in range(3)] == [0, 1, 2]
        logger.close()  # in the middle of group 2
        resumed = next(read_groups(other, "logger", timeout_s=10))
        assert (resumed.position, resumed.step, resumed.task.task_id) == (3, 1, "t2")
        assert [row.group_id for row in resumed.rows] == [2]
        exact = next(read_groups(other, "logger", after=3, timeout_s=10))
        assert exact.position == 4, "what it stored itself does not come again"
        queue.finish()
        assert [group.group_id for group in read_groups(other, "evaluator", timeout_s=10)] == [0, 1, 2, 3]
        assert queue.status().payload_bytes == 0


def test_a_reader_is_told_when_nothing_comes_and_what_it_cannot_have():
    with serve(tasks(2)) as address, client(address) as queue:
        with pytest.raises(QueueLost, match=r"0\.1 s"):
            next(read_groups(queue, "logger", timeout_s=0.1))
        with pytest.raises(ProtocolError, match="unknown_consumer"):
            queue.read("loger", 0.0)
        with pytest.raises(ProtocolError, match="bad_position"):
            queue.acknowledge("logger", 7)
        with pytest.raises(ProtocolError, match="bad_position"):
            next(read_groups(queue, "logger", after=7))
        with pytest.raises(ProtocolError, match="bad_name"):
            queue.subscribe("no blanks")
        for number in range(63):
            queue.subscribe(f"c{number}")
        with pytest.raises(ProtocolError, match="full"):
            queue.subscribe("one-more")


CONSUMER = """
import sqlite3, sys
from rl_async.transfer_queue import SyncQueueClient, read_groups

db = sqlite3.connect(sys.argv[2])
db.execute("CREATE TABLE IF NOT EXISTS seen (position INTEGER, grp INTEGER)")
(after,) = db.execute("SELECT coalesce(max(position), -1) FROM seen").fetchone()
with SyncQueueClient(sys.argv[1], role="test", name="logger") as client:
    for group in read_groups(client, "logger", after=after, oldest=True):
        with db:
            db.execute("INSERT INTO seen VALUES (?, ?)", (group.position, group.group_id))
"""


def test_a_consumer_killed_again_and_again_has_each_group_once(tmp_path: Path):
    file = tmp_path / "seen.sqlite"

    def seen() -> list[tuple[int, int]]:
        with sqlite3.connect(file) as db:
            found = db.execute("SELECT name FROM sqlite_master").fetchall()
            return db.execute("SELECT position, grp FROM seen ORDER BY rowid").fetchall() if found else []

    with serve(tasks(40), batch_groups=2, max_staleness=0) as address, client(address) as queue:
        queue.subscribe("logger")
        for round_ in range(1, 4):
            train(queue, 5)
            consumer = subprocess.Popen([sys.executable, "-c", CONSUMER, address, str(file)])
            try:
                deadline = time.monotonic() + 60
                while len(seen()) < 10 * round_ - 5:
                    assert time.monotonic() < deadline and consumer.poll() is None
                    time.sleep(0.002)
            finally:
                consumer.send_signal(signal.SIGKILL)
                consumer.wait()
        queue.finish()
        subprocess.run([sys.executable, "-c", CONSUMER, address, str(file)], check=True, timeout=60)
    assert seen() == [(n + 1, n) for n in range(30)]


def test_tail_prints_what_is_trained_and_status_shows_who_reads(capsys: pytest.CaptureFixture[str]):
    with serve(tasks(6), batch_groups=2, max_staleness=0) as address, client(address) as queue:
        queue.subscribe("late")
        train(queue, 2)
        queue.finish()
        assert main(["queue", "tail", address, "--consumer", "screen", "--oldest"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(line["position"], line["step"], line["task"]) for line in lines][-1] == (4, 1, "t3")
        assert lines[-1]["rewards"] == [0.5] and lines[-1]["tokens"] == [5]
        assert main(["queue", "status", address]) == 0
        text = capsys.readouterr().out
        assert "consumer late: 0 groups done, 4 to read" in text and "consumer screen: 4 groups done, 0 to read" in text
        assert main(["queue", "tail", address, "--consumer", "late", "--forget"]) == 0
        assert [record.name for record in queue.inspect().consumers] == ["screen"]
