"""Images and other media: kept once for all rows of a group that refer to them, by every journal and by shards."""

import asyncio
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rl_async import messages as m
from rl_async.errors import ProtocolError
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient
from tests.contracts.queue.peers import RunningQueue, trajectory
from tests.contracts.queue_storage.journals import WAIT_S, RunningShard, journals, registry, wait_for_shards

IMAGE, SOUND = b"\x89PNG" + bytes(range(256)) * 400, b"RIFF" * 1000


@pytest.fixture(params=["memory", "sqlite", "redis", "shards"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, address: str, make_address) -> Iterator[RunningQueue]:
    """A queue that keeps its payloads there."""
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
def trainer(kept: RunningQueue) -> Iterator[SyncQueueClient]:
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


def test_media_come_back_with_their_rows_and_are_counted_once_a_group(kept: RunningQueue, trainer: SyncQueueClient):
    asyncio.run(generate(kept))
    batch = trainer.reserve(0, WAIT_S)
    rows = trainer.fetch([header.key for header in batch.headers])
    assert [len(row.media) for row in rows] == [1, 1, 2, 0]
    media = trainer.fetch_media(rows)
    assert set(media.values()) == {IMAGE, SOUND} and media[hashlib.sha256(SOUND).hexdigest()] == SOUND
    assert trainer.fetch_media(rows[3:]) == {}
    without = sum(len(m.encode(row)) for row in rows)
    assert trainer.status().payload_bytes == without + 2 * len(IMAGE) + len(SOUND)


def test_media_are_gone_when_their_group_is(kept: RunningQueue, trainer: SyncQueueClient):
    asyncio.run(generate(kept))
    batch = trainer.reserve(0, WAIT_S)
    rows = trainer.fetch([header.key for header in batch.headers])
    trainer.commit(0)
    trainer.publish(m.Version(0, 1), [])
    trainer.retire(1)
    with pytest.raises(ProtocolError, match="unknown_row"):
        trainer.fetch_media(rows)
    assert trainer.status().payload_bytes == 0


def test_another_worker_need_not_know_what_the_group_has(kept: RunningQueue, trainer: SyncQueueClient):
    """One that does not know that the bytes are there sends them again. The queue counts them once where it sees them;
    of shards it knows what each worker says that it brought."""
    sharded = bool(registry(trainer).replicas)
    trainer.renew()
    (group,) = trainer.lease(1, WAIT_S).groups
    row, media = illustrated(group, 0, IMAGE)
    assert trainer.put(row, media=media) == m.Done()
    assert trainer.put(row, media=media) == m.Done()
    trainer.fail(group.group_id, 1, group.attempt, "given back")
    with SyncQueueClient(kept.address, role="t", name="other", timeout_s=WAIT_S) as stranger:
        (again,) = stranger.lease(1, WAIT_S).groups
        other, _ = illustrated(again, 1, IMAGE)
        assert stranger.put(other, media=media) == m.Done()
    rows = sum(len(m.encode(each)) for each in (row, other))
    assert trainer.status().payload_bytes == rows + (2 if sharded else 1) * len(IMAGE)


def test_images_of_a_task_are_kept_once_with_it(kept: RunningQueue, trainer: SyncQueueClient, tmp_path: Path):
    """Four images of 1 MB, with a fifth that a tool shows: the journal's files take little more than their bytes."""
    sharded = bool(registry(trainer).replicas)
    drawn = [random.Random(seed).randbytes(1 << 20) for seed in range(4)]
    prompt = [
        {"role": "user", "content": "\ufffc" * 4, "images": drawn},
        {"role": "user", "images": [1]},
        {"images": 2},
    ]
    own = m.Task(task_id="own", data_source="", prompt=prompt, ground_truth="")
    trainer.renew()
    groups = trainer.lease(1, WAIT_S, own).groups + trainer.lease(1, WAIT_S, own).groups
    for group in groups:
        for sample in group.samples:
            row, media = illustrated(group, sample, *drawn, IMAGE)
            assert trainer.put(row, media=media) == m.Done()
    batch = trainer.reserve(0, WAIT_S)
    assert not any("images" in message for task in batch.tasks.values() for message in task.prompt)
    rows = trainer.fetch([header.key for header in batch.headers])
    media = trainer.fetch_media(rows)
    assert [media[each.sha256] for each in rows[0].media] == [*drawn, IMAGE]
    if not sharded:
        in_rows = sum(len(m.encode(row)) for row in rows)
        assert trainer.status().payload_bytes == in_rows + 2 * len(IMAGE)
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
            client.inner.sending.sent([(0, sha256)])  # as after a lease that another worker lost
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
