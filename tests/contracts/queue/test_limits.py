"""What one client does beyond its limits harms no other, over real sockets."""

import asyncio
import hashlib
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from rl_async.errors import ProtocolError, QueueLost
from rl_async.messages import Done, Media, Refused, Reserved, Status, StatusReport, Version
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.server import QueueLimits
from tests.contracts.queue.peers import (
    HELLO,
    ID,
    SETTINGS,
    RunningQueue,
    ask,
    disconnected,
    put_all,
    trajectory,
    worker,
)

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
    for payload in ([b"x" * 45_000] * 2, [b"x"] * 7):
        reply = ask(wild, ID, STATUS, *payload).reply
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
