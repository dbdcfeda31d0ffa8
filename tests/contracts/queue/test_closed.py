"""A queue that is closed to strangers: with the right key all works, without it nothing does, over real sockets.

Over TCP libzmq refuses strangers and encrypts; on a socket file the queue refuses who shows no key.
"""

import asyncio
import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.errors import AccessDenied, ProtocolError, QueueLost
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import (
    Delivered,
    Done,
    Media,
    Refused,
    Reserved,
    Status,
    StatusReport,
    Subscription,
    Task,
    Version,
)
from rl_async.process.http_auth import Role
from rl_async.transfer_queue import read_groups, serve, wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import ClientKeys, make_client_keys, make_keys, read_client_keys, server_keys
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.journal import MemoryJournal
from rl_async.transfer_queue.server import QueueLimits
from tests.contracts.queue.peers import (
    HELLO,
    ID,
    PATIENCE_MS,
    SETTINGS,
    RunningQueue,
    ask,
    disconnected,
    put_all,
    trajectory,
    worker,
)
from tests.contracts.queue_storage.journals import SETTINGS as STORE_SETTINGS
from tests.contracts.queue_storage.journals import Driver, OpenJournal, journals, payload

OPEN = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"))


def closed_queue(address: str, folder: Path) -> RunningQueue:
    queue = QueueConfig(keys=str(folder))
    return RunningQueue(address, SETTINGS, keys=server_keys(msgspec.structs.replace(OPEN, queue=queue), folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def closed(address: str, folder: Path) -> Iterator[RunningQueue]:
    queue = closed_queue(address, folder)
    yield queue
    queue.stop()


@pytest.fixture(params=["tcp", "ipc"])
def either(request: pytest.FixtureRequest, address: str, folder: Path) -> Iterator[RunningQueue]:
    """The same by both ways."""
    with tempfile.TemporaryDirectory() as place:
        queue = closed_queue(address if request.param == "tcp" else f"ipc://{place}/queue", folder)
        yield queue
        queue.stop()


def client(queue: RunningQueue, folder: Path, role: Role) -> SyncQueueClient:
    keys = read_client_keys(folder, role)
    return SyncQueueClient(queue.address, role="test", name=role, timeout_s=10, keys=keys)


@pytest.fixture
def friend(closed: RunningQueue, folder: Path) -> Iterator[SyncQueueClient]:
    """The healthy client beside each stranger."""
    with client(closed, folder, "trainer") as friend:
        friend.publish(Version(0, 0), [])
        yield friend


def deadlines_s(address: str) -> tuple[float, ...]:
    """Over TCP a client that is refused waits for its deadline: a short one suffices unless the machine is busy."""
    return (0.5, 2.0, 20.0) if address.startswith("tcp:") else (20.0,)


def refused(address: str) -> type[Exception]:
    return QueueLost if address.startswith("tcp:") else AccessDenied


def stranger_s_error(address: str, keys: ClientKeys | None) -> str:
    """The error of a client that has heard of its refusal before its deadline."""
    for timeout_s in deadlines_s(address):
        with (
            SyncQueueClient(address, role="agent", name="stranger", timeout_s=timeout_s, keys=keys) as stranger,
            pytest.raises(refused(address)) as caught,
        ):
            stranger.status()
        if "key" in str(caught.value):
            break
    return str(caught.value)


async def async_stranger_s_error(address: str, keys: ClientKeys | None) -> str:
    for timeout_s in deadlines_s(address):
        async with QueueClient(address, role="agent", name="stranger", timeout_s=timeout_s, keys=keys) as stranger:
            with pytest.raises(refused(address)) as caught:
                await stranger.status()
        if "key" in str(caught.value):
            break
    return str(caught.value)


async def test_with_keys_one_step_goes_from_lease_to_publication(either, folder):
    keys = read_client_keys(folder, "worker")
    with client(either, folder, "trainer") as trainer:
        trainer.publish(Version(0, 0), [])
        async with QueueClient(either.address, role="agent", name="w", timeout_s=10, keys=keys) as agent:
            leased = await agent.lease(2, 1.0)
            await put_all(agent, leased.groups, tokens=100_000)
        batch = trainer.reserve(0, 1.0)
        assert isinstance(batch, Reserved)
        rows = trainer.fetch([header.key for header in batch.headers])
        assert all(np.array_equal(row.token_ids, np.arange(100_000)) for row in rows) and len(rows) == 4
        trainer.commit(0)
        trainer.publish(Version(0, 1), [])
        assert trainer.status().committed == 2
        assert "denied" not in trainer.status().counters


async def test_a_client_without_a_key_or_with_another_run_s_gets_nothing_and_is_told_so(either, folder, tmp_path):
    make_keys(tmp_path / "other")
    with client(either, folder, "trainer") as friend:
        for keys in (None, read_client_keys(tmp_path / "other", "operator"), of_nobody(folder)):
            for error in (stranger_s_error(either.address, keys), await async_stranger_s_error(either.address, keys)):
                assert "key" in error
        assert friend.status().workers == 0
        assert friend.status().counters["denied"] >= 2


async def test_a_worker_commits_nothing_and_registers_no_engine_and_goes_on_with_its_work(either, folder):
    keys = read_client_keys(folder, "worker")
    with client(either, folder, "trainer") as trainer, client(either, folder, "operator") as operator:
        trainer.publish(Version(0, 0), [])
        async with QueueClient(either.address, role="agent", name="w", timeout_s=10, keys=keys) as agent:
            for request in (agent.commit(0), agent.register_engine("mine", "http://192.0.2.1:9", "embedded")):
                with pytest.raises(AccessDenied):
                    await request
            await put_all(agent, (await agent.lease(2, 1.0)).groups)
        assert trainer.engines().engines == []
        assert trainer.status().counters["forbidden"] == 2
        assert isinstance(trainer.reserve(0, 1.0), Reserved)
        operator.register_engine("ours", "http://127.0.0.1:9", "embedded")
        assert [engine.engine_id for engine in trainer.engines().engines] == ["ours"]


def test_a_reader_reads_and_leases_nothing(either, folder):
    with client(either, folder, "reader") as reader:
        with pytest.raises(ProtocolError, match="operator, worker"):
            reader.lease(1, 0.0)
        assert reader.inspect().status.counters["forbidden"] == 1
        assert reader.group_list(-1, 10).groups == []


async def test_a_request_after_the_refusal_ends_at_its_deadline_too(closed, friend):
    with SyncQueueClient(closed.address, role="agent", name="stranger", timeout_s=1.0) as stranger:
        for _ in range(2):  # libzmq does not try again after a refusal: the second finds no connection to send on
            with pytest.raises(QueueLost, match="key"):
                stranger.status()
    async with QueueClient(closed.address, role="agent", name="stranger", timeout_s=1.0) as stranger:
        for _ in range(2):
            with pytest.raises(QueueLost, match="key"):
                await stranger.status()


def test_a_plain_socket_gets_no_byte_of_an_answer(closed, friend):
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        with disconnected(plain):
            plain.connect(closed.address)
            plain.send_multipart([ID, HELLO])
            plain.send_multipart([ID, msgspec.msgpack.encode(Status())])
        assert plain.poll(0) == 0
    assert "malformed" not in friend.status().counters


def test_a_queue_with_another_key_gets_no_word_of_a_client(closed, friend, folder, tmp_path):
    make_keys(tmp_path / "other")
    other = read_client_keys(tmp_path / "other", "trainer").server
    of_both = msgspec.structs.replace(read_client_keys(folder, "trainer"), server=other)
    assert "key" in stranger_s_error(closed.address, of_both)
    assert isinstance(friend.status(), StatusReport)


def test_a_revoked_key_gets_nothing_more_on_an_open_connection_or_a_new_one(either, folder):
    make_client_keys(folder, "guest", "worker")
    keys = read_client_keys(folder, "guest")
    with client(either, folder, "trainer") as friend:
        with SyncQueueClient(either.address, role="agent", name="guest", timeout_s=10, keys=keys) as guest:
            assert isinstance(guest.status(), StatusReport)  # a key that was added while the queue runs
            (folder / "clients" / "guest.pub").unlink()
            deadline = time.monotonic() + PATIENCE_MS / 1000
            # The queue looks into the folder with every tick.
            with pytest.raises(AccessDenied):
                while time.monotonic() < deadline:
                    guest.status()
        assert "key" in stranger_s_error(either.address, keys)
        assert friend.status().counters["denied"] >= 2


def of_nobody(folder: Path) -> ClientKeys:
    """A key that no list has."""
    public, secret = zmq.curve_keypair()
    return msgspec.structs.replace(read_client_keys(folder, "worker"), public=public, secret=secret)


def test_a_client_with_a_key_does_not_talk_to_an_open_queue(queue, trainer, folder):
    assert "key" in stranger_s_error(queue.address, read_client_keys(folder, "worker"))
    assert isinstance(trainer.status(), StatusReport)


# What one client does beyond its limits harms no other, over real sockets.


RATE = 10.0
STATUS = msgspec.msgpack.encode(Status())


@pytest.fixture
def strict(address: str) -> Iterator[RunningQueue]:
    """Three clients, RATE requests a second each."""
    limits = QueueLimits(frame_bytes=50_000, message_bytes=80_000, frames=8, clients=3, requests_per_s=RATE)
    queue = RunningQueue(address, SETTINGS, limits=limits)
    yield queue
    queue.stop()


@pytest.fixture
def healthy(strict: RunningQueue) -> Iterator[SyncQueueClient]:
    with SyncQueueClient(strict.address, role="trainer", name="healthy", timeout_s=10) as client:
        assert isinstance(client.status(), StatusReport)
        yield client


@pytest.fixture
def wild(strict: RunningQueue) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(strict.address)
        yield socket


def test_a_frame_that_is_too_large_ends_the_connection_and_no_other(healthy, wild):
    ask(wild, ID, HELLO)
    with disconnected(wild):
        wild.send_multipart([ID, STATUS, b"x" * 50_001])
    assert wild.poll(0) == 0
    assert isinstance(healthy.status(), StatusReport)
    # libzmq connects again, as a client whom the queue does not know
    reply = ask(wild, ID, STATUS).reply
    assert isinstance(reply, Refused) and reply.code == "hello"


async def test_a_client_with_a_frame_that_is_too_large_says_so_within_its_deadline(strict, healthy):
    healthy.publish(Version(0, 0), [])
    async with worker(strict, timeout_s=1.0) as agent:
        (group,) = (await agent.lease(1, 1.0)).groups
        with pytest.raises(QueueLost, match="frame"):
            await agent.put(trajectory(group, 0, tokens=20_000))
    assert isinstance(healthy.status(), StatusReport)


def test_messages_that_are_too_large_are_refused_and_counted(healthy, wild):
    ask(wild, ID, HELLO)
    for frames in ([b"x" * 45_000] * 2, [b"x"] * 7):
        reply = ask(wild, ID, STATUS, *frames).reply
        assert isinstance(reply, Refused) and reply.code == "too_large"
    assert isinstance(ask(wild, ID, STATUS).reply, StatusReport)
    assert healthy.status().counters["too_large"] == 2


async def test_a_worker_hears_that_its_message_is_too_large(strict, healthy):
    healthy.publish(Version(0, 0), [])
    async with worker(strict) as agent:
        (group,) = (await agent.lease(1, 1.0)).groups
        images = [bytes([number]) for number in range(6)]
        media = {hashlib.sha256(image).hexdigest(): image for image in images}
        row = msgspec.structs.replace(trajectory(group, 0), media=[Media.of(image, "image/png", 0) for image in images])
        with pytest.raises(ProtocolError, match=r"too_large"):
            await agent.put(row, media=media)
        row.media = row.media[:5]
        assert await agent.put(row, media={each.sha256: media[each.sha256] for each in row.media}) == Done()


def test_one_client_too_many_waits_and_says_why_and_the_others_go_on(strict, healthy):
    with (
        SyncQueueClient(strict.address, role="test", name="second", timeout_s=10) as second,
        SyncQueueClient(strict.address, role="test", name="third", timeout_s=10) as third,
    ):
        assert isinstance(second.status(), StatusReport) and isinstance(third.status(), StatusReport)
        with (
            SyncQueueClient(strict.address, role="test", name="fourth", timeout_s=1.0) as fourth,
            pytest.raises(QueueLost, match="3 clients"),
        ):
            fourth.status()
        counters = [client.status().counters for client in (healthy, second, third)]
        assert all(each["too_many_clients"] >= 1 for each in counters)


def test_a_flood_of_requests_is_refused_and_the_neighbour_is_served(strict, healthy, wild):
    begun = time.monotonic()
    ask(wild, ID, HELLO)
    for _ in range(1000):
        wild.send_multipart([ID, STATUS])
    assert isinstance(healthy.status(), StatusReport)
    replies = [wire.decode_reply(wild.recv_multipart()).reply for _ in range(1000)]
    seconds = time.monotonic() - begun
    busy = [reply for reply in replies if isinstance(reply, Refused)]
    assert {reply.code for reply in busy} == {"busy"}
    assert 1 <= len(replies) - len(busy) <= RATE + RATE * seconds, "a second's worth, and those of the time that passed"
    assert isinstance(replies[0], StatusReport)
    assert healthy.status().counters["too_many_requests"] == len(busy)


async def test_a_client_that_asks_too_often_waits_and_gets_all_its_answers(strict, healthy):
    async with worker(strict, timeout_s=30) as agent:
        reports = await asyncio.gather(*(agent.status() for _ in range(25)))
    assert len(reports) == 25
    assert healthy.status().counters["too_many_requests"] >= 1


def test_a_client_that_reads_no_answers_keeps_nobody_waiting(queue, trainer, raw):
    ask(raw, ID, HELLO)
    for _ in range(20_000):
        raw.send_multipart([ID, STATUS])
    for _ in range(20):
        assert isinstance(trainer.status(), StatusReport)
    for _ in range(1000):
        assert isinstance(wire.decode_reply(raw.recv_multipart()).reply, StatusReport), "they were answered meanwhile"


async def test_every_hungry_worker_gets_groups_though_there_are_few(queue, trainer):
    async with worker(queue, "a") as a, worker(queue, "b") as b, worker(queue, "c") as c, worker(queue, "d") as d:
        waiting = [asyncio.create_task(agent.lease(64, 10.0)) for agent in (a, b, c, d)]
        await asyncio.gather(*(agent.renew() for agent in (a, b, c, d)))  # behind its lease, which is parked by now
        trainer.publish(Version(0, 0), [])
        assert [len(leased.groups) for leased in await asyncio.gather(*waiting)] == [1, 1, 1, 1]


async def test_a_slow_trainer_makes_workers_wait_and_loses_nothing(address):
    settings = QueueSettings(steps=50, batch_groups=2, group_size=2, lease_s=30.0, max_bytes=1)
    queue = RunningQueue(address, settings)
    try:
        with SyncQueueClient(address, role="trainer", name="t", timeout_s=10) as trainer:
            trainer.publish(Version(0, 0), [])
            async with worker(queue, "a") as a, worker(queue, "b") as b:
                first = (await a.lease(64, 1.0)).groups
                assert len(first) == 2  # one batch: there are slots for two, but no bytes
                waiting = asyncio.create_task(b.lease(64, 30.0))
                await put_all(a, first)
                assert (await a.lease(64, 0.3)).groups == [] and not waiting.done()
                assert trainer.status().counters["short_of_bytes"] >= 1
                batch = trainer.reserve(0, 1.0)
                assert isinstance(batch, Reserved) and len(batch.headers) == 4
                await put_all(b, (await waiting).groups)
                second = trainer.reserve(1, 1.0)
                assert isinstance(second, Reserved) and not {h.key for h in second.headers} & {
                    h.key for h in batch.headers
                }
                assert (await a.lease(64, 0.1)).groups == []  # all slots hold what is not published yet
                trainer.commit(0)
                trainer.publish(Version(0, 1), [])
                assert (await a.lease(64, 5.0)).groups
            assert trainer.status().counters.get("dropped", 0) == 0
    finally:
        queue.stop()


# Several readers of what is trained: each has a place of its own that every journal keeps, and none stops training.


@pytest.fixture(params=["memory", "sqlite", "redis"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenJournal]:
    """Opens the same journal each time it is called; one in memory is another each time."""
    with journals(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
def driver(again: OpenJournal, request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = Driver(again, getattr(request, "param", STORE_SETTINGS))
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


SMALL = msgspec.structs.replace(STORE_SETTINGS, consumer_bytes=3 * 2 * (len(payload(0, 0)) + 4) + 2000)


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


def reading(address: str, name: str = "me") -> SyncQueueClient:
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
        reading(address) as queue,
        reading(address) as other,
    ):
        queue.subscribe("logger")
        queue.subscribe("evaluator")
        train(queue, 2)
        logger = read_groups(other, "logger", timeout_s=10)
        assert [next(logger).group_id for _ in range(3)] == [0, 1, 2]
        # It closes in the middle of group 2.
        logger.close()
        resumed = next(read_groups(other, "logger", timeout_s=10))
        assert (resumed.position, resumed.step, resumed.task.task_id) == (3, 1, "t2")
        assert [row.group_id for row in resumed.rows] == [2]
        exact = next(read_groups(other, "logger", after=3, timeout_s=10))
        assert exact.position == 4, "what it stored itself does not come again"
        queue.finish()
        assert [group.group_id for group in read_groups(other, "evaluator", timeout_s=10)] == [0, 1, 2, 3]
        assert queue.status().payload_bytes == 0


def test_a_reader_is_told_when_nothing_comes_and_what_it_cannot_have():
    with serve(tasks(2)) as address, reading(address) as queue:
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

    with serve(tasks(40), batch_groups=2, max_staleness=0) as address, reading(address) as queue:
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
    with serve(tasks(6), batch_groups=2, max_staleness=0) as address, reading(address) as queue:
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
