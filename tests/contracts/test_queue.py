"""Server and clients of the transfer queue over real sockets."""

import asyncio
import contextlib
import secrets
import socket as sockets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from rl_async.errors import ProtocolError, QueueLost, UserError
from rl_async.messages import (
    SCHEMA,
    Done,
    Hello,
    Lease,
    LeasedGroup,
    Malformed,
    NotReady,
    Put,
    Refused,
    Reserve,
    Reserved,
    Sampling,
    Status,
    Task,
    Trajectory,
    Version,
    VersionRun,
    Welcome,
)
from rl_async.transfer_queue import session, wire
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient
from rl_async.transfer_queue.payloads import Payloads
from rl_async.transfer_queue.policy import QueueSettings
from rl_async.transfer_queue.server import QueueServer, bind
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import Feed

SETTINGS = QueueSettings(steps=50, batch_groups=2, group_size=2, lease_s=30.0)


class Source:
    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> Task:
        self.taken += 1
        return Task(task_id=f"t{self.taken - 1}", data_source="", prompt=[], ground_truth="7")

    def cursor(self) -> bytes:
        return str(self.taken).encode()

    def seek(self, cursor: bytes) -> None:
        self.taken = int(cursor)


class RunningQueue:
    """A queue on a thread with its own event loop."""

    def __init__(self, address: str, settings: QueueSettings) -> None:
        self.address = address
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(settings)))
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self, settings: QueueSettings) -> None:
        self._loop = asyncio.get_running_loop()
        payloads = Payloads()
        feed = Feed(payloads.consume)
        store = Store(settings, Source(), [Source().next()], feed)
        with zmq.asyncio.Context() as context, bind(context, self.address) as socket:
            serving = asyncio.create_task(QueueServer(store, payloads, feed, secrets.token_hex(4)).serve(socket))
            self._ready.set()
            await asyncio.wait([serving, asyncio.create_task(self._stop.wait())], return_when="FIRST_COMPLETED")
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    def stop(self) -> None:
        if self._thread.is_alive() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def address() -> str:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def queue(address: str) -> Iterator[RunningQueue]:
    running = RunningQueue(address, SETTINGS)
    yield running
    running.stop()


@pytest.fixture
def trainer(queue: RunningQueue) -> Iterator[SyncQueueClient]:
    with SyncQueueClient(queue.address, role="trainer", name="trainer-0", timeout_s=10) as client:
        yield client


def trajectory(group: LeasedGroup, sample: int, tokens: int = 5) -> Trajectory:
    return Trajectory(
        task_id=group.task.task_id,
        group_id=group.group_id,
        sample=sample,
        attempt=group.attempt,
        partition=group.partition,
        episode_id=f"{group.group_id}.{sample}",
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, dtype=bool),
        logprobs=np.linspace(-1, 0, tokens, dtype=np.float32),
        versions=[VersionRun(group.min_version, 0, tokens)],
        sampling=Sampling(),
        reward=0.5,
    )


def worker(queue: RunningQueue, name: str = "worker-0", timeout_s: float = 10.0) -> QueueClient:
    return QueueClient(queue.address, role="agent", name=name, timeout_s=timeout_s)


async def put_all(client: QueueClient, groups: list[LeasedGroup], tokens: int = 5) -> None:
    rows = [trajectory(group, sample, tokens) for group in groups for sample in group.samples]
    assert set(map(type, await asyncio.gather(*map(client.put, rows)))) == {Done}


async def test_one_step_from_lease_to_publication(queue, trainer):
    trainer.publish(Version(0, 0), [])
    async with worker(queue) as agent:
        leased = await agent.lease(2, 1.0)
        assert [group.group_id for group in leased.groups] == [0, 1]
        await put_all(agent, leased.groups, tokens=100_000)
        await agent.renew()
    batch = trainer.reserve(0, 1.0)
    assert isinstance(batch, Reserved)
    rows = trainer.fetch([(h.group_id, h.sample) for h in batch.headers])
    assert [(row.group_id, row.sample) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(np.array_equal(row.token_ids, np.arange(100_000)) for row in rows)
    assert rows[0].logprobs.dtype == np.float32 and rows[0].loss_mask.all()
    assert batch.headers[0].nbytes > 900_000
    trainer.commit(0)
    trainer.publish(Version(0, 1), [])
    assert trainer.status().committed == 2
    snapshot = trainer.snapshot()
    trainer.retire(1)
    assert trainer.status().payload_bytes == 0
    with pytest.raises(ProtocolError, match="unknown_row"):
        trainer.fetch([(0, 0)])
    assert trainer.resume(1, 1, snapshot).kept == 0


async def test_a_group_without_signal_is_forgotten_whole_and_another_is_leased(address):
    queue = RunningQueue(address, QueueSettings(steps=50, batch_groups=2, group_size=2, max_staleness=0, max_refills=5))
    try:
        with SyncQueueClient(queue.address, role="trainer", name="trainer-0", timeout_s=10) as trainer:
            trainer.publish(Version(0, 0), [])
            async with worker(queue) as agent:
                flat = (await agent.lease(1, 1.0)).groups
                full = (await agent.lease(1, 1.0)).groups
                waiting = asyncio.create_task(agent.lease(1, 30.0))
                await put_all(agent, flat)
                assert [group.group_id for group in (await waiting).groups] == [2]
                assert isinstance(await agent.put(trajectory(flat[0], 0)), Refused)
            status = trainer.status()
            assert (status.counters["refilled"], status.payload_bytes, len(full)) == (1, 0, 1)
            for sample in (0, 1):
                with pytest.raises(ProtocolError, match="unknown_row"):
                    trainer.fetch([(0, sample)])
    finally:
        queue.stop()


async def test_long_polls_are_woken_by_what_they_wait_for(queue, trainer):
    async with worker(queue) as agent:
        lease = asyncio.create_task(agent.lease(2, 30.0))
        engines = asyncio.create_task(agent.engines(after=0, wait_s=30.0))
        batch = asyncio.create_task(agent.request(Reserve(step=0, wait_s=30.0)))
        await agent.status()  # the three are parked by now
        assert not lease.done() and not engines.done()
        await agent.register_engine("e0", "http://127.0.0.1:1", "embedded")
        assert [engine.engine_id for engine in (await engines).engines] == ["e0"]
        trainer.publish(Version(0, 0), ["e0"])
        groups = (await lease).groups
        assert not batch.done()
        await put_all(agent, groups)
        reply, _ = await batch
        assert isinstance(reply, Reserved)
        engine = (await agent.engines()).engines[0]
        assert engine.version == Version(0, 0)


async def test_long_polls_end_at_their_deadline(queue, trainer):
    async with worker(queue) as agent:
        assert (await agent.lease(1, 0.1)).groups == []
        assert (await agent.engines(after=5, wait_s=0.1)).revision == 0
    answer = trainer.reserve(0, 0.1)
    assert isinstance(answer, NotReady) and "no version is published" in answer.why


async def test_evaluation_and_finish(queue, trainer):
    trainer.publish(Version(0, 0), [])
    trainer.evaluate(3)
    assert isinstance(trainer.eval_result(3, 0.0), NotReady)
    async with worker(queue) as agent:
        await put_all(agent, (await agent.lease(1, 1.0)).groups)
        result = await agent.eval_result(3, 5.0)
        assert isinstance(result, Reserved)
        (row,) = await agent.fetch([(h.group_id, h.sample) for h in result.headers])
        assert row.partition == "eval"
        lease = asyncio.create_task(agent.lease(100, 30.0))
        await lease  # the train groups
        waiting = asyncio.create_task(agent.lease(1, 30.0))
        await agent.status()
        trainer.finish()
        assert (await waiting).finished


async def test_lost_worker_is_replaced_and_fenced(address):
    queue = RunningQueue(address, msgspec.structs.replace(SETTINGS, lease_s=1.0))
    try:
        async with worker(queue, "lost") as lost, worker(queue, "other") as other:
            await lost.publish(Version(0, 0), [])
            (group,) = (await lost.lease(1, 1.0)).groups
            assert await lost.put(trajectory(group, 0)) == Done()
            again: list[LeasedGroup] = []
            while not again:  # the other worker takes what is fresh until the lost group comes back
                leased = (await other.lease(1, 0.1)).groups
                again = [found for found in leased if found.group_id == group.group_id]
            assert (again[0].samples, again[0].attempt) == ([1], 1)
            refused = await lost.put(trajectory(group, 1))
            assert isinstance(refused, Refused) and refused.code == "fenced"
            assert await lost.put(trajectory(group, 0)) == Done()
            assert isinstance(await lost.fail(group.group_id, 1, 0, "late"), Refused)
            assert (await other.status()).counters["redelivered"] >= 1
    finally:
        queue.stop()


async def test_two_workers_share_the_groups(queue, trainer):
    trainer.publish(Version(0, 0), [])
    async with worker(queue, "a") as a, worker(queue, "b") as b:
        first, second = await asyncio.gather(a.lease(2, 1.0), b.lease(2, 1.0))
        groups = [group.group_id for leased in (first, second) for group in leased.groups]
        assert sorted(groups) == [0, 1, 2, 3]
        await asyncio.gather(put_all(a, first.groups), put_all(b, second.groups))
    assert isinstance(trainer.reserve(0, 1.0), Reserved)
    assert isinstance(trainer.reserve(1, 1.0), Reserved)


def test_ranks_fetch_at_the_same_time(queue, trainer):
    trainer.publish(Version(0, 0), [])

    async def generate() -> None:
        async with worker(queue) as agent:
            await put_all(agent, (await agent.lease(2, 1.0)).groups, tokens=50_000)

    asyncio.run(generate())

    def rank(number: int) -> list[int]:
        with SyncQueueClient(queue.address, role="trainer", name=f"trainer-{number}") as client:
            reserved = client.reserve(0, 5.0)
            assert isinstance(reserved, Reserved)
            return [len(row.token_ids) for row in client.fetch([(number, 0), (number, 1)])]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, [0, 1])) == [[50_000, 50_000]] * 2


@pytest.fixture
def raw(queue: RunningQueue) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 5000
        socket.connect(queue.address)
        yield socket


def ask(raw: zmq.Socket, *parts: bytes) -> wire.ReplyMessage:
    raw.send_multipart(parts)
    return wire.decode_reply(raw.recv_multipart())


ID = b"12345678"
HELLO = msgspec.msgpack.encode(Hello(schema=SCHEMA, role="test", name="raw"))


def test_malformed_messages_are_answered_counted_and_harm_nobody(raw, trainer):
    status = msgspec.msgpack.encode(Status())
    assert isinstance(ask(raw, ID, HELLO).reply, Welcome)
    bad = [
        (b"",),
        (b"short", status),
        (ID,),
        (ID, b""),
        (ID, b"\xc1garbage"),
        (ID, msgspec.msgpack.encode({"type": "Explode"})),
        (ID, msgspec.msgpack.encode({"type": "Lease", "worker": 3})),
        (ID, status, b"payload that does not belong here"),
        (ID, msgspec.msgpack.encode({"type": "Put", "worker": "w", "header": {}}), b"x"),
    ]
    for parts in bad:
        assert isinstance(ask(raw, *parts).reply, Malformed), parts
    assert isinstance(ask(raw, ID, status).reply, type(trainer.status()))
    assert trainer.status().counters["malformed"] == len(bad)


def test_a_put_needs_a_payload(raw):
    ask(raw, ID, HELLO)
    group = LeasedGroup(
        group_id=0, partition="train", attempt=0, samples=[0], task=Source().next(), min_version=Version()
    )
    put = msgspec.msgpack.encode(Put(worker="w", header=trajectory(group, 0).header()))
    assert isinstance(ask(raw, ID, put).reply, Malformed)
    assert ask(raw, ID, put, b"x").reply.code == "unknown_group"


def test_hello_comes_first_and_with_the_right_schema(raw):
    assert ask(raw, ID, msgspec.msgpack.encode(Status())).reply.code == "hello"
    old = msgspec.msgpack.encode(Hello(schema=SCHEMA + 1, role="test", name="raw"))
    assert ask(raw, ID, old).reply.code == "schema"
    assert isinstance(ask(raw, ID, HELLO).reply, Welcome)


def test_a_lease_sent_twice_is_granted_once(raw, trainer):
    trainer.publish(Version(0, 0), [])
    ask(raw, ID, HELLO)
    lease = msgspec.msgpack.encode(Lease(worker="w", max_groups=1, wait_s=1.0))
    first, second = ask(raw, ID, lease).reply, ask(raw, ID, lease).reply
    assert first == second and len(first.groups) == 1
    assert ask(raw, b"87654321", lease).reply.groups[0].group_id == 1


def test_a_port_that_is_taken_is_a_user_error(queue):
    with zmq.asyncio.Context() as context, pytest.raises(UserError, match=queue.address):
        bind(context, queue.address)


async def test_a_queue_that_is_gone_is_lost_by_the_deadline(address):
    async with QueueClient(address, role="agent", name="w", timeout_s=0.3) as client:
        with pytest.raises(QueueLost, match="did not answer Status"):
            await client.status()
    trainer = SyncQueueClient(address, role="trainer", name="t", timeout_s=0.3)
    with trainer, pytest.raises(QueueLost, match="did not answer Reserve"):
        trainer.reserve(0, 0.1)


async def test_clients_started_first_find_the_queue(address):
    async with QueueClient(address, role="agent", name="w", timeout_s=20) as client:
        status = asyncio.create_task(client.status())
        await asyncio.sleep(0)
        queue = RunningQueue(address, SETTINGS)
        try:
            assert (await status).slots == 4
        finally:
            queue.stop()


async def test_a_restarted_queue_has_lost_its_state_and_clients_say_so(address):
    queue = RunningQueue(address, SETTINGS)
    async with worker(queue, timeout_s=30.0) as agent:
        await agent.status()
        waiting = asyncio.create_task(agent.lease(1, 25.0))
        with SyncQueueClient(address, role="trainer", name="t", timeout_s=30.0) as trainer:
            trainer.status()
            queue.stop()
            queue = RunningQueue(address, SETTINGS)
            try:
                with pytest.raises(QueueLost, match="restarted"):
                    await agent.status()
                with pytest.raises(QueueLost, match="restarted"):
                    await waiting
                with pytest.raises(QueueLost, match="restarted"):
                    trainer.status()
            finally:
                queue.stop()


async def test_a_request_without_answer_is_sent_again_on_a_new_connection(address, monkeypatch):
    """A peer that swallows the first connection's messages is overcome, and the hello is repeated."""
    monkeypatch.setattr("rl_async.transfer_queue.client.PATIENCE_S", 0.1)
    with zmq.asyncio.Context() as context, bind(context, address) as router:

        async def answer_second_connection() -> set[bytes]:
            seen: set[bytes] = set()
            while True:
                identity, *parts = await router.recv_multipart()
                seen.add(identity)
                if len(seen) == 1:
                    continue
                message = wire.decode_request(parts)
                reply = Welcome(schema=SCHEMA, run_id="r") if isinstance(message.request, Hello) else Done()
                await router.send_multipart([identity, *wire.encode(message.request_id, reply)])
                if isinstance(reply, Done):
                    return seen

        answering = asyncio.create_task(answer_second_connection())
        async with QueueClient(address, role="agent", name="w", timeout_s=10) as client:
            assert await client.renew() == Done()
        assert len(await answering) == 2


def test_worker_names_are_unique_to_a_client():
    one, two = (session.Session("tcp://x", "agent", "worker-0") for _ in range(2))
    assert one.worker != two.worker and one.worker.startswith("worker-0-")


async def test_closing_a_client_ends_its_requests(queue):
    async with QueueClient(queue.address, role="launcher", name="launcher") as client:
        waiting = asyncio.create_task(client.engines(after=10**6, wait_s=60.0))
        await client.status()  # the other request is on its way
    with pytest.raises(QueueLost, match="closed"):
        await waiting
    with pytest.raises(QueueLost, match="closed"):
        await client.status()
