"""Server and clients of the transfer queue over real sockets.

One step, long-polls, evaluation, ranks; workers that share the groups; messages that the queue does not understand.
"""

import asyncio
import gc
import hashlib
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from rl_async import messages as m
from rl_async.errors import ProtocolError, QueueLost, TrainerReplaced, UserError
from rl_async.messages import (
    SCHEMA,
    Done,
    Hello,
    Lease,
    Leased,
    LeasedGroup,
    Malformed,
    NotReady,
    Put,
    Refused,
    Renew,
    Renewed,
    Reserved,
    Status,
    Version,
    Welcome,
)
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.client import QueueClient, Session, SyncQueueClient
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.server import bind
from tests.contracts.queue.peers import HELLO, ID, SETTINGS, RunningQueue, ask, put_all, trajectory, worker
from tests.contracts.queue_storage.journals import WAIT_S, RunningShard, journals, registry, wait_for_shards


async def test_one_step_from_lease_to_publication(queue, trainer):
    trainer.publish(Version(0, 0), [])
    async with worker(queue) as agent:
        leased = await agent.lease(2, 1.0)
        assert [group.group_id for group in leased.groups] == [0, 1]
        await put_all(agent, leased.groups, tokens=100_000)
        await agent.renew()
    batch = trainer.reserve(0, 1.0)
    assert isinstance(batch, Reserved)
    rows = trainer.fetch([header.key for header in batch.headers])
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
        trainer.fetch([(0, 0, 0)])
    assert trainer.resume(1, 1, snapshot).kept == 0


async def test_the_rows_of_one_episode_arrive_together_and_are_fetched_one_by_one(queue, trainer):
    trainer.publish(Version(0, 0), [])
    async with worker(queue) as agent:
        first, second = (await agent.lease(2, 1.0)).groups
        rows = [msgspec.structs.replace(trajectory(first, 0, 5 + i), segment=i) for i in range(3)]
        assert await agent.put(*rows) == await agent.put(*rows) == Done()  # as after a lost answer
        assert (await agent.put(*rows[1:])).code == "rows"
        assert await agent.put(trajectory(first, 1)) == Done()
        await put_all(agent, [second])
    batch = trainer.reserve(0, 1.0)
    assert [header.key for header in batch.headers][:4] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)]
    assert [len(row.token_ids) for row in trainer.fetch([(0, 0, 2), (0, 1, 0), (0, 0, 1)])] == [7, 5, 6]
    assert batch.headers[2].tokens_hash == rows[2].tokens_hash()
    for key in ((0, 0, 3), (0, 0, -1), (0, 1, 1)):
        with pytest.raises(ProtocolError, match="unknown_row"):
            trainer.fetch([key])


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
                    trainer.fetch([(0, sample, 0)])
    finally:
        queue.stop()


async def test_long_polls_are_woken_by_what_they_wait_for(queue, trainer):
    async with worker(queue) as agent:
        lease = asyncio.create_task(agent.lease(2, 30.0))
        engines = asyncio.create_task(agent.engines(after=0, wait_s=30.0))
        batch = asyncio.create_task(agent.reserve(0, 30.0))
        await agent.status()  # the three are parked by now
        assert not lease.done() and not engines.done()
        await agent.register_engine("e0", "http://127.0.0.1:1", "embedded")
        assert [engine.engine_id for engine in (await engines).engines] == ["e0"]
        trainer.publish(Version(0, 0), ["e0"])
        groups = (await lease).groups
        assert not batch.done()
        await put_all(agent, groups)
        reply = await batch
        assert isinstance(reply, Reserved)
        engine = (await agent.engines()).engines[0]
        assert engine.version == Version(0, 0)


async def test_loosening_a_tightened_bound_wakes_a_worker(queue, trainer):
    trainer.tighten(0)
    trainer.publish(Version(0, 0), [])
    async with worker(queue) as agent:
        assert len((await agent.lease(9, 1.0)).groups) == 2
        lease = asyncio.create_task(agent.lease(9, 30.0))
        assert (await agent.status()).max_staleness == 0 and not lease.done()
        trainer.tighten(1)
        assert len((await lease).groups) == 2
    with pytest.raises(ProtocolError, match="bad_bound"):
        trainer.tighten(-1)


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
        (row,) = await agent.fetch([header.key for header in result.headers])
        assert row.partition == "eval"
        lease = asyncio.create_task(agent.lease(100, 30.0))
        await lease  # the train groups
        waiting = asyncio.create_task(agent.lease(1, 30.0))
        await agent.status()
        trainer.finish()
        assert (await waiting).finished


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
            return [len(row.token_ids) for row in client.fetch([(number, 0, 0), (number, 1, 0)])]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, [0, 1])) == [[50_000, 50_000]] * 2


def test_the_clients_of_a_replaced_trainer_say_so(queue, trainer):
    with SyncQueueClient(queue.address, role="trainer", name="trainer-0", timeout_s=10, lineage=0) as old:
        old.publish(Version(0, 0), [])
        trainer.resume(0, 1, b"")
        calls = [
            lambda: old.reserve(0, 5.0),
            lambda: old.fetch([(0, 0, 0)]),
            lambda: old.commit(0),
            lambda: old.publish(Version(0, 1), []),
            lambda: old.confirm("engine-0", Version(0, 0)),
            old.snapshot,
            lambda: old.resume(0, 0, b""),
            lambda: old.retire(0),
            lambda: old.tighten(0),
            lambda: old.evaluate(0),
            lambda: old.eval_result(0, 5.0),
            lambda: old.remove_engine("engine-0", "no answer"),
            old.engines,
            old.finish,
        ]
        for call in calls:
            with pytest.raises(TrainerReplaced):
                call()


async def test_two_workers_share_the_groups(queue, trainer):
    trainer.publish(Version(0, 0), [])
    async with worker(queue, "a") as a, worker(queue, "b") as b:
        first, second = await asyncio.gather(a.lease(2, 1.0), b.lease(2, 1.0))
        groups = [group.group_id for leased in (first, second) for group in leased.groups]
        assert sorted(groups) == [0, 1, 2, 3]
        await asyncio.gather(put_all(a, first.groups), put_all(b, second.groups))
    assert isinstance(trainer.reserve(0, 1.0), Reserved)
    assert isinstance(trainer.reserve(1, 1.0), Reserved)


def test_a_lease_sent_twice_is_granted_once(raw, trainer):
    trainer.publish(Version(0, 0), [])
    ask(raw, ID, HELLO)
    lease = msgspec.msgpack.encode(Lease(worker="w", max_groups=1, wait_s=1.0))
    first, second = ask(raw, ID, lease).reply, ask(raw, ID, lease).reply
    assert first == second and len(first.groups) == 1
    assert ask(raw, b"87654321", lease).reply.groups[0].group_id == 1


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


async def test_what_a_killed_worker_waited_for_goes_to_another_at_once(queue, trainer):
    with zmq.Context() as context, context.socket(zmq.DEALER) as killed:
        killed.connect(queue.address)
        ask(killed, ID, HELLO)
        parked = Lease(worker="killed", max_groups=4, wait_s=60.0)
        killed.send_multipart(wire.encode(b"87654321", parked))
        ask(killed, ID, msgspec.msgpack.encode(Status()))  # the lease is parked by now
        killed.close(0)
    trainer.status()  # the queue's side of the connection has ended by now
    trainer.publish(Version(0, 0), [])
    async with worker(queue) as agent:
        leased = (await agent.lease(4, 5.0)).groups
    assert sorted(group.group_id for group in leased) == [0, 1, 2, 3]
    assert "redelivered" not in trainer.status().counters


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
        (ID, HELLO, b"payload that does not belong here"),
        (ID, msgspec.msgpack.encode({"type": "Put", "worker": "w", "header": {}}), b"x"),
    ]
    for parts in bad:
        assert isinstance(ask(raw, *parts).reply, Malformed), parts
    assert isinstance(ask(raw, ID, status).reply, type(trainer.status()))
    assert trainer.status().counters["malformed"] == len(bad)


def test_a_put_needs_a_payload(raw):
    ask(raw, ID, HELLO)
    group = LeasedGroup(group_id=0, partition="train", attempt=0, samples=[0], task=numbered(0), min_version=Version())
    header = trajectory(group, 0).header()
    put = msgspec.msgpack.encode(Put(worker="w", samples=[[header]], lengths=[1]))
    assert isinstance(ask(raw, ID, put).reply, Malformed)
    assert [refused.code for refused in ask(raw, ID, put, b"x").reply.refused] == ["unknown_group"]
    for samples in ([], [[]], [[header], []], [[header, header]], [[header], [header]]):
        put = msgspec.msgpack.encode(Put(worker="w", samples=samples, lengths=[1]))
        assert isinstance(ask(raw, ID, put, b"x").reply, Malformed)
    for lengths in ([], [0], [-1], [2], [1, 1]):
        put = msgspec.msgpack.encode(Put(worker="w", samples=[[header]], lengths=lengths))
        assert isinstance(ask(raw, ID, put, b"x").reply, Malformed)


def test_hello_comes_first_and_with_the_right_schema(raw):
    assert ask(raw, ID, msgspec.msgpack.encode(Status())).reply.code == "hello"
    old = msgspec.msgpack.encode(Hello(schema=SCHEMA + 1, role="test", name="raw"))
    assert ask(raw, ID, old).reply.code == "schema"
    assert isinstance(ask(raw, ID, HELLO).reply, Welcome)


def test_a_port_that_is_taken_is_a_user_error(queue):
    with zmq.asyncio.Context() as context, pytest.raises(UserError, match=queue.address):
        bind(context, queue.address)


# Clients of the queue find it late, lose it, and repeat themselves.


async def test_a_queue_that_is_gone_is_lost_by_the_deadline(address):
    async with QueueClient(address, role="agent", name="w", timeout_s=0.3) as client:
        with pytest.raises(QueueLost, match="Status"):
            await client.status()
    trainer = SyncQueueClient(address, role="trainer", name="t", timeout_s=0.3)
    with trainer, pytest.raises(QueueLost, match="Reserve"):
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


@pytest.mark.parametrize("requests", [1, 3])
async def test_requests_without_answer_are_sent_again_on_one_new_connection(address, requests):
    """A peer that swallows the first connection's messages is overcome, and the hello is repeated."""
    with zmq.asyncio.Context() as context, bind(context, address) as router:
        connections: set[bytes] = set()

        async def answer_later_connections() -> None:
            while True:
                identity, *parts = await router.recv_multipart()
                connections.add(identity)
                if len(connections) > 1:
                    message = wire.decode_request(parts)
                    reply = Welcome(schema=SCHEMA, run_id="r") if isinstance(message.request, Hello) else Renewed()
                    await router.send_multipart([identity, *wire.encode(message.request_id, reply)])

        answering = asyncio.create_task(answer_later_connections())
        async with QueueClient(address, role="agent", name="w", timeout_s=60, patience_s=2) as client:
            assert await asyncio.gather(*(client.renew() for _ in range(requests))) == [Renewed()] * requests
        answering.cancel()
        assert len(connections) == 2


async def test_a_new_connection_sends_all_that_is_unanswered_again(address):
    """A request that may wait for minutes is not silent that long because another one found the queue silent."""
    replies = {Hello: Welcome(schema=SCHEMA, run_id="r"), Renew: Renewed(), Lease: Leased(groups=[])}
    with zmq.asyncio.Context() as context, bind(context, address) as router:

        async def answer_later_connections() -> None:
            first = b""
            while True:
                identity, *parts = await router.recv_multipart()
                first = first or identity
                if identity != first:
                    message = wire.decode_request(parts)
                    answer = wire.encode(message.request_id, replies[type(message.request)])
                    await router.send_multipart([identity, *answer])

        answering = asyncio.create_task(answer_later_connections())
        async with QueueClient(address, role="agent", name="w", timeout_s=600, patience_s=0.5) as client:
            async with asyncio.timeout(60):
                assert await asyncio.gather(client.lease(1, 500.0), client.renew()) == [Leased(groups=[]), Renewed()]
        answering.cancel()


def test_worker_names_are_unique_to_a_client():
    one, two = (Session("tcp://x:1", "agent", "worker-0") for _ in range(2))
    assert one.worker != two.worker and one.worker.startswith("worker-0-")


async def test_closing_a_client_ends_its_requests(queue):
    async with QueueClient(queue.address, role="launcher", name="launcher") as client:
        waiting = asyncio.create_task(client.engines(after=10**6, wait_s=60.0))
        await client.status()  # the other request is on its way
    with pytest.raises(QueueLost, match="closed"):
        await waiting
    with pytest.raises(QueueLost, match="closed"):
        await client.status()


class Rung(Exception):
    """The alarm clock."""


@pytest.mark.parametrize("nested", [False, True])
def test_a_blocking_call_that_is_interrupted_leaves_nothing_behind(address, nested, caplog):
    def ring(*_):
        raise Rung

    def interrupted():
        before = set(threading.enumerate())
        main = threading.main_thread().ident
        alarm = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        with SyncQueueClient(address, role="trainer", name="t", timeout_s=30.0) as trainer:
            with pytest.raises(Rung):
                alarm.start()
                trainer.reserve(0, 20.0)
            with pytest.raises(QueueLost) as lost:
                trainer.exchange(Status(), timeout_s=0.1)
        assert lost.value.__context__ is None and set(threading.enumerate()) <= before

    async def inside_a_loop():
        interrupted()

    previous = signal.signal(signal.SIGUSR1, ring)
    try:
        asyncio.run(inside_a_loop()) if nested else interrupted()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    gc.collect()
    assert caplog.records == []


# Images and other media: kept once for all rows of a group that refer to them, by every journal and by shards.


IMAGE, SOUND = b"\x89PNG" + bytes(range(256)) * 400, b"RIFF" * 1000


@pytest.fixture(params=["memory", "sqlite", "redis", "shards"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, address: str, make_address) -> Iterator[RunningQueue]:
    """Run a queue that keeps its payloads in memory, a journal or shards."""
    settings = QueueSettings(steps=50, batch_groups=2, group_size=2, lease_s=30.0)
    if request.param == "shards":
        queue = RunningQueue(address, msgspec.structs.replace(settings, replicas=2))
        shards = [RunningShard(make_address(), queue, f"shard-{n}") for n in range(2)]
        with SyncQueueClient(address, role="t", name="t", timeout_s=WAIT_S) as client:
            wait_for_shards(client, 2)
        yield queue
        for shard in shards:
            shard.stop()
        queue.stop()
        return
    with journals(request.param, tmp_path) as open_journal:
        queue = RunningQueue(address, settings, open_journal=open_journal)
        yield queue
        queue.stop()


@pytest.fixture
def reader(kept: RunningQueue) -> Iterator[SyncQueueClient]:
    with SyncQueueClient(kept.address, role="trainer", name="trainer-0", timeout_s=WAIT_S) as client:
        client.publish(m.Version(0, 0), [])
        yield client


def illustrated(group: m.LeasedGroup, sample: int, *data: bytes) -> tuple[m.Trajectory, dict[str, bytes]]:
    row = trajectory(group, sample)
    row.media = [m.Media.of(each, "image/png", 1) for each in data]
    return row, {medium.sha256: each for medium, each in zip(row.media, data, strict=True)}


async def generate(queue: RunningQueue) -> None:
    """Two groups: every row of one refers to IMAGE, one row of the other to both."""
    async with QueueClient(queue.address, role="agent", name="w", timeout_s=WAIT_S) as worker:
        await worker.renew()
        first, second = (await worker.lease(2, WAIT_S)).groups
        rows = [illustrated(first, 0, IMAGE), illustrated(first, 1, IMAGE)]
        rows += [illustrated(second, 0, IMAGE, SOUND), illustrated(second, 1)]
        answers = await asyncio.gather(*(worker.put(row, media=media) for row, media in rows))
        assert answers == [m.Done()] * 4


def test_media_come_back_with_their_rows_and_are_counted_once_a_group(kept: RunningQueue, reader: SyncQueueClient):
    asyncio.run(generate(kept))
    batch = reader.reserve(0, WAIT_S)
    rows = reader.fetch([header.key for header in batch.headers])
    assert [len(row.media) for row in rows] == [1, 1, 2, 0]
    media = reader.fetch_media(rows)
    assert set(media.values()) == {IMAGE, SOUND} and media[hashlib.sha256(SOUND).hexdigest()] == SOUND
    assert reader.fetch_media(rows[3:]) == {}
    without = sum(len(m.encode(row)) for row in rows)
    assert reader.status().payload_bytes == without + 2 * len(IMAGE) + len(SOUND)


def test_media_are_gone_when_their_group_is(kept: RunningQueue, reader: SyncQueueClient):
    asyncio.run(generate(kept))
    batch = reader.reserve(0, WAIT_S)
    rows = reader.fetch([header.key for header in batch.headers])
    reader.commit(0)
    reader.publish(m.Version(0, 1), [])
    reader.retire(1)
    with pytest.raises(ProtocolError, match="unknown_row"):
        reader.fetch_media(rows)
    assert reader.status().payload_bytes == 0


def test_another_worker_need_not_know_what_the_group_has(kept: RunningQueue, reader: SyncQueueClient):
    """One that does not know that the bytes are there sends them again. The queue counts them once where it sees them;
    of shards it knows what each worker says that it brought."""
    sharded = bool(registry(reader).replicas)
    reader.renew()
    (group,) = reader.lease(1, WAIT_S).groups
    row, media = illustrated(group, 0, IMAGE)
    assert reader.put(row, media=media) == m.Done()
    assert reader.put(row, media=media) == m.Done()
    reader.fail(group.group_id, 1, group.attempt, "given back")
    with SyncQueueClient(kept.address, role="t", name="other", timeout_s=WAIT_S) as stranger:
        (again,) = stranger.lease(1, WAIT_S).groups
        other, _ = illustrated(again, 1, IMAGE)
        assert stranger.put(other, media=media) == m.Done()
    rows = sum(len(m.encode(each)) for each in (row, other))
    assert reader.status().payload_bytes == rows + (2 if sharded else 1) * len(IMAGE)


def test_images_of_a_task_are_kept_once_with_it(kept: RunningQueue, reader: SyncQueueClient, tmp_path: Path):
    """Four images of 1 MB, with a fifth that a tool shows: the journal's files take little more than their bytes."""
    sharded = bool(registry(reader).replicas)
    drawn = [random.Random(seed).randbytes(1 << 20) for seed in range(4)]
    prompt = [
        {"role": "user", "content": "\ufffc" * 4, "images": drawn},
        {"role": "user", "images": [1]},
        {"images": 2},
    ]
    own = m.Task(task_id="own", data_source="", prompt=prompt, ground_truth="")
    reader.renew()
    groups = reader.lease(1, WAIT_S, own).groups + reader.lease(1, WAIT_S, own).groups
    for group in groups:
        for sample in group.samples:
            row, media = illustrated(group, sample, *drawn, IMAGE)
            assert reader.put(row, media=media) == m.Done()
    batch = reader.reserve(0, WAIT_S)
    assert not any("images" in message for task in batch.tasks.values() for message in task.prompt)
    rows = reader.fetch([header.key for header in batch.headers])
    media = reader.fetch_media(rows)
    assert [media[each.sha256] for each in rows[0].media] == [*drawn, IMAGE]
    if not sharded:
        in_rows = sum(len(m.encode(row)) for row in rows)
        assert reader.status().payload_bytes == in_rows + 2 * len(IMAGE)
    journal = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    print(f"{len(groups)} groups, {journal / len(groups):,.0f} bytes of journal each")
    assert journal < 1.1 * len(groups) * (4 << 20) + 2 * len(IMAGE)


def test_a_row_without_its_media_is_refused_until_they_come(address: str):
    queue = RunningQueue(address, QueueSettings(steps=50, batch_groups=1, group_size=2, lease_s=30.0))
    try:
        with SyncQueueClient(address, role="t", name="t", timeout_s=WAIT_S) as client:
            client.publish(m.Version(0, 0), [])
            client.renew()
            (group,) = client.lease(1, WAIT_S).groups
            row, media = illustrated(group, 0, IMAGE)
            (sha256,) = media
            with pytest.raises(ProtocolError, match=sha256):
                client.put(row)
            payload = [m.encode(row)]
            put = m.Put(worker=client.worker, samples=[[row.header()]], lengths=[len(payload[0])])
            assert client.exchange(put, payload).reply == m.Taken(refused=[m.Refused(code=wire.MEDIA, reason=sha256)])
            wrong = msgspec.structs.replace(put, media=[(0, sha256)])
            with pytest.raises(ProtocolError, match=sha256):
                client.exchange(wrong, [*payload, IMAGE[1:]])
            # This is so after a lease that another worker lost.
            client.inner.sending.sent([(0, sha256)])
            assert client.put(row, media=media) == m.Done()
            row.media = [m.Media(sha256="no hash", mime="", position=0)]
            with pytest.raises(ProtocolError, match="no SHA-256"):
                client.exchange(msgspec.structs.replace(put, samples=[[row.header()]]), payload)
    finally:
        queue.stop()


def test_rows_on_shards_that_lost_their_media_are_generated_again(address: str, make_address):
    queue = RunningQueue(address, QueueSettings(steps=50, batch_groups=1, group_size=2, lease_s=20.0, replicas=1))
    shard = RunningShard(make_address(), queue, "shard-0")
    try:
        with SyncQueueClient(address, role="t", name="t", timeout_s=WAIT_S) as client:
            before = wait_for_shards(client, 1)
            client.publish(m.Version(0, 0), [])
            for attempt in range(2):
                client.renew()
                (group,) = client.lease(1, WAIT_S).groups
                for sample in group.samples:
                    row, media = illustrated(group, sample, IMAGE)
                    assert client.put(row, media=media) == m.Done()
                rows = client.fetch([h.key for h in client.reserve(0, WAIT_S).headers])
                assert list(client.fetch_media(rows).values()) == [IMAGE]
                if attempt == 0:
                    shard.stop()
                    shard = RunningShard(shard.address, queue, "shard-0")
                    wait_for_shards(client, 1, other_than=before)
    finally:
        shard.stop()
        queue.stop()
