"""Payloads on shards: they pass no other process; what a lost shard kept is read from a copy or generated again."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from rl_async import messages as m
from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import AccessDenied, QueueLost, RowsChanged, RowsLost
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import server_keys
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient, read_groups, rows_of
from rl_async.transfer_queue.delivery import numbered
from tests.contracts.queue.peers import FREE_PORT, HELLO, ID, RunningQueue, ask, put_all, trajectory
from tests.contracts.queue_storage.journals import WAIT_S, RunningShard, registry, wait_for_shards
from tests.support.queue import make_run_keys, sync_client

LEASE_S = 1.0
DEAD_S = 2.0  # for the answer of a shard that may be dead


def settings(replicas: int) -> QueueSettings:
    return QueueSettings(steps=50, batch_groups=2, group_size=2, lease_s=LEASE_S, replicas=replicas)


@pytest.fixture
def sharded(make_address):
    """``with sharded(shards, replicas) as (queue, shards)``."""

    @contextmanager
    def start(count: int, replicas: int = 1) -> Iterator[tuple[RunningQueue, list[RunningShard]]]:
        with ExitStack() as stack:
            queue = RunningQueue(FREE_PORT, settings(replicas))
            stack.callback(queue.stop)
            shards = [RunningShard(make_address(), queue, f"shard-{n}") for n in range(count)]
            for shard in shards:
                stack.callback(shard.stop)
            yield queue, shards

    return start


def reader(queue: RunningQueue, shard_s: float = WAIT_S) -> SyncQueueClient:
    return SyncQueueClient(queue.address, role="trainer", name="t", timeout_s=WAIT_S, shard_s=shard_s)


async def generate(queue: RunningQueue, groups: int, tokens: int = 5, shard_s: float = WAIT_S) -> None:
    """Leases and puts as many groups as that."""
    async with QueueClient(queue.address, role="agent", name="w", timeout_s=WAIT_S, shard_s=shard_s) as worker:
        while groups > 0:
            await worker.renew()
            leased = (await worker.lease(groups, 1.0)).groups
            await put_all(worker, leased, tokens)
            groups -= len(leased)


def test_rows_come_back_and_never_pass_the_queue(sharded):
    with sharded(3) as (queue, _), reader(queue) as client:
        wait_for_shards(client, 3)
        client.publish(m.Version(0, 0), [])
        asyncio.run(generate(queue, 4, tokens=2000))
        batch = client.reserve(0, WAIT_S)
        assert {shard for header in batch.headers for shard in header.shards} <= {
            shard.shard_id for shard in registry(client).shards
        }
        assert all(len(header.shards) == 1 and header.nbytes > 2000 for header in batch.headers)
        keys = [header.key for header in batch.headers]
        _, reply, payload = client.exchange(m.Fetch(rows=keys))
        assert isinstance(reply, m.Elsewhere) and payload == [], "the queue itself has no payload to give"
        rows = client.fetch(keys)
        assert [row.key for row in rows] == keys and all(len(row.token_ids) == 2000 for row in rows)


def test_a_shard_that_gives_other_tokens_than_were_put_is_named(sharded):
    def generate_behind(changed: m.Trajectory) -> None:
        """The shard keeps other tokens under the name of a sample that is put after them."""
        row = m.encode(changed)
        with SyncQueueClient(shard.url, role="agent", name="w", timeout_s=WAIT_S) as other:
            other.exchange(m.StoreRows(samples=[(changed.group_id, 1, changed.attempt)], lengths=[[len(row)]]), [row])

    with sharded(1) as (queue, _), reader(queue) as client:
        (shard,) = wait_for_shards(client, 1).shards
        client.publish(m.Version(0, 0), [])
        with SyncQueueClient(queue.address, role="agent", name="v", timeout_s=WAIT_S) as worker:
            for group in worker.lease(2, WAIT_S).groups:
                if group.group_id == 1:
                    generate_behind(trajectory(group, 1, tokens=6))
                for sample in group.samples:
                    assert worker.put(trajectory(group, sample)) == m.Done()
            batch = client.reserve(0, WAIT_S)
        with pytest.raises(RowsChanged, match=shard.shard_id) as caught:
            client.fetch_announced(batch.headers)
        assert set(caught.value.tokens_hash) == {(1, 1, 0)}


def test_groups_are_spread_and_a_group_stays_together(sharded):
    with sharded(2) as (queue, _), reader(queue) as client:
        wait_for_shards(client, 2)
        client.publish(m.Version(0, 0), [])
        places: dict[int, set[str]] = {}
        for step in range(6):
            asyncio.run(generate(queue, 2))
            batch = client.reserve(step, WAIT_S)
            for header in batch.headers:
                places.setdefault(header.group_id, set()).update(header.shards)
            client.commit(step)
            client.publish(m.Version(0, step + 1), [])
        assert all(len(shards) == 1 for shards in places.values())
        assert len(set.union(*places.values())) == 2


def test_with_two_replicas_a_lost_shard_costs_nothing(sharded):
    with sharded(2, replicas=2) as (queue, shards), reader(queue, shard_s=DEAD_S) as client:
        wait_for_shards(client, 2)
        client.publish(m.Version(0, 0), [])
        asyncio.run(generate(queue, 4))
        batch = client.reserve(0, WAIT_S)
        assert all(len(header.shards) == 2 for header in batch.headers)
        shards[0].stop()
        keys = [header.key for header in batch.headers]
        assert [row.key for row in client.fetch(keys)] == keys
        wait_for_shards(client, 1)
        assert [row.key for row in client.fetch(keys)] == keys
        assert client.reserve(0, 0.0).headers == batch.headers
        assert client.status().counters["samples_lost"] == 0


def test_without_replicas_what_was_lost_is_generated_again_for_the_same_batch(sharded, make_address):
    with sharded(1) as (queue, shards), reader(queue, shard_s=DEAD_S) as client:
        wait_for_shards(client, 1)
        client.publish(m.Version(0, 0), [])
        asyncio.run(generate(queue, 4))
        batch = client.reserve(0, WAIT_S)
        shards[0].stop()
        with pytest.raises(RowsLost, match=r"group \d+"):
            client.fetch([header.key for header in batch.headers])
        assert isinstance(client.reserve(0, 0.0), m.NotReady)
        other = RunningShard(make_address(), queue, "shard-1")
        try:
            asyncio.run(generate(queue, 4))
            again = client.reserve(0, WAIT_S)
            assert [header.key for header in again.headers] == [header.key for header in batch.headers]
            assert all(new.attempt > old.attempt for new, old in zip(again.headers, batch.headers, strict=True))
            assert len(client.fetch([header.key for header in again.headers])) == 4
            assert client.status().counters["samples_lost"] == 8
        finally:
            other.stop()


def test_a_shard_that_starts_again_replaces_the_one_of_its_name_at_once(sharded):
    with sharded(1) as (queue, shards), reader(queue) as client:
        before = wait_for_shards(client, 1)
        client.publish(m.Version(0, 0), [])
        asyncio.run(generate(queue, 2))
        shards[0].stop()
        shards[0] = again = RunningShard(shards[0].address, queue, "shard-0")
        try:
            wait_for_shards(client, 1, other_than=before)
            asyncio.run(generate(queue, 2))
            batch = client.reserve(0, WAIT_S)
            assert len(client.fetch([header.key for header in batch.headers])) == 4
        finally:
            again.stop()


def test_a_put_goes_to_another_shard_when_one_is_dead(sharded):
    with sharded(2) as (queue, shards), reader(queue) as client:
        wait_for_shards(client, 2)
        client.publish(m.Version(0, 0), [])
        shards[0].stop()  # the registry does not know yet
        asyncio.run(generate(queue, 4, shard_s=0.5))
        batch = client.reserve(0, WAIT_S)
        assert len(client.fetch([header.key for header in batch.headers])) == 4


def test_a_reader_whose_rows_go_with_a_shard_while_it_reads_goes_on_without_them(sharded):
    with sharded(1) as (queue, shards), reader(queue) as client:
        wait_for_shards(client, 1)
        client.publish(m.Version(0, 0), [])
        client.subscribe("logger")
        asyncio.run(generate(queue, 2))
        client.reserve(0, WAIT_S)
        client.commit(0)
        first, second = client.read("logger", WAIT_S).groups
        assert len(rows_of(client, "logger", first) or []) == 2
        shards[0].stop()
        wait_for_shards(client, 0)
        for group in (first, second):
            assert rows_of(client, "logger", group) is None, "delivered, and gone since"
        client.finish()
        groups = list(read_groups(client, "logger", timeout_s=WAIT_S))
        assert [(group.group_id, group.rows) for group in groups] == [(first.group_id, []), (second.group_id, [])]


def test_a_shard_forgets_what_was_retired(sharded):
    with sharded(1) as (queue, _), reader(queue) as client:
        (record,) = wait_for_shards(client, 1).shards
        client.publish(m.Version(0, 0), [])
        asyncio.run(generate(queue, 2))
        batch = client.reserve(0, WAIT_S)
        client.commit(0)
        client.publish(m.Version(0, 1), [])
        client.retire(1)
        wanted = [(*header.key[:2], header.attempt, 0) for header in batch.headers]
        deadline = time.monotonic() + WAIT_S
        with SyncQueueClient(record.url, role="t", name="t", timeout_s=WAIT_S) as shard:
            while isinstance(shard.exchange(m.LoadRows(rows=wanted)).reply, m.FetchedRows):
                assert time.monotonic() < deadline, "the rows are still there"
                time.sleep(0.05)


def test_a_blocking_client_puts_to_shards_too(sharded):
    with sharded(2, replicas=2) as (queue, _), reader(queue) as client:
        wait_for_shards(client, 2)
        client.publish(m.Version(0, 0), [])
        client.renew()
        for group in client.lease(2, WAIT_S).groups:
            for sample in group.samples:
                assert client.put(trajectory(group, sample)) == m.Done()
        batch = client.reserve(0, WAIT_S)
        assert len(client.fetch([header.key for header in batch.headers])) == 4


def test_what_a_shard_does_not_understand_harms_nobody(sharded, caplog):
    with sharded(1) as (queue, shards), reader(queue) as client, zmq.Context() as context:
        wait_for_shards(client, 1)
        with context.socket(zmq.DEALER) as raw:
            raw.linger, raw.rcvtimeo = 0, 5000
            raw.connect(shards[0].address)
            store = m.StoreRows(samples=[(0, 0, 0)], lengths=[[4]])
            assert ask(raw, *wire.encode(ID, store, [b"abcd"])).reply.code == "hello"
            assert isinstance(ask(raw, ID, HELLO).reply, m.Welcome)
            for payload in ([], [b"abc"], [b"abcde"], [b"abcd", b"e"]):
                assert isinstance(ask(raw, *wire.encode(ID, store, payload)).reply, m.Malformed)
            nameless = m.StoreRows(samples=[], lengths=[[1]])
            assert isinstance(ask(raw, *wire.encode(ID, nameless, [b"a"])).reply, m.Malformed)
            assert ask(raw, *wire.encode(ID, m.Status())).reply.code == "not_here"
            assert ask(raw, *wire.encode(ID, m.LoadRows(rows=[(0, 0, 0, 0)]))).reply.code == "unknown_row"
            assert isinstance(ask(raw, *wire.encode(ID, store, [b"abcd"])).reply, m.Done)
            assert ask(raw, *wire.encode(ID, m.LoadRows(rows=[(0, 0, 0, 1)]))).reply.code == "unknown_row"
            found = ask(raw, *wire.encode(ID, m.LoadRows(rows=[(0, 0, 0, 0)])))
            assert [bytes(frame) for frame in found.payload] == [b"abcd"]
    assert "turned away: {'malformed': 5}" in caplog.text


def test_a_queue_that_keeps_its_payloads_wants_no_shard_and_a_sharded_one_no_payload(queue, sharded):
    with reader(queue) as client:
        reply = client.exchange(m.RegisterShard(shard_id="x", name="x", url="tcp://127.0.0.1:1")).reply
        assert isinstance(reply, m.Refused) and "queue.shards=0" in reply.reason
    with sharded(1) as (other, _), reader(other) as client:
        header = trajectory(_group(), 0).header()
        reply = client.exchange(m.Put(worker="w", samples=[[header]], lengths=[3]), [b"row"]).reply
        assert isinstance(reply, m.Refused) and reply.code == wire.SHARDED
        (refused,) = client.exchange(m.Put(worker="w", samples=[[header]])).reply.refused
        assert refused.code == "rows"


def _group() -> m.LeasedGroup:
    return m.LeasedGroup(
        group_id=0, partition="train", attempt=0, samples=[0], task=numbered(0), min_version=m.Version(0, 0)
    )


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_a_shard_of_a_run_serves_each_role_and_no_stranger(tmp_path, make_address, way):
    run, config = tmp_path / "run", RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"))
    run.mkdir()
    (run / "config.yaml").write_text(dump(config))
    make_run_keys(run)
    queue = RunningQueue(f"ipc://{run}/sockets/queue", settings(1), keys=server_keys(config, run))
    shard = RunningShard(f"ipc://{run}/sockets/shard" if way == "ipc" else make_address(), queue, "shard-0", run)
    try:
        with sync_client(run, queue.address, "reader") as reader:
            wait_for_shards(reader, 1)
        store, load = m.StoreRows(samples=[(0, 0, 0)], lengths=[[3]]), m.LoadRows(rows=[(0, 0, 0, 0)])
        with sync_client(run, shard.address, "worker") as worker, sync_client(run, shard.address, "trainer") as trainer:
            assert worker.exchange(store, [b"row"]).reply == m.Done()
            assert bytes(trainer.exchange(load).payload[0]) == b"row"
            with pytest.raises(AccessDenied):
                worker.exchange(load)
        stranger = SyncQueueClient(shard.address, role="t", name="stranger", timeout_s=1.0)
        with stranger, pytest.raises((AccessDenied, QueueLost)):
            stranger.exchange(load)
    finally:
        shard.stop()
        queue.stop()
