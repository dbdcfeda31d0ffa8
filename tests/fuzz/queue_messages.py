"""Messages for the queue and its payload shards, one of every kind, and ways to damage bytes.

The fields that matter are drawn at random. The fuzzer of the HTTP servers damages bytes in the same ways.
"""

import random
from collections.abc import Callable

import numpy as np

from rl_async import codec
from rl_async import messages as m
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.delivery import numbered


def flip(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """Some bits."""
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """The end, or the beginning."""
    at = rng.randint(0, len(frame))
    return rng.choice([frame[:at], frame[at:]])


def insert(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """Random bytes, or a MessagePack head that promises much."""
    heads = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 2000]
    at = rng.randint(0, len(frame))
    return frame[:at] + rng.choice([rng.randbytes(rng.randint(1, 9)), *heads]) + frame[at:]


def splice(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """The beginning of one message and the end of another."""
    return frame[: rng.randint(0, len(frame))] + other[rng.randint(0, len(other)) :]


MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (flip, cut, insert, splice)


Frames = list[bytes]


def trajectory(group: int, sample: int, attempt: int) -> m.Trajectory:
    """A small row."""
    return m.Trajectory(
        task_id="t",
        group_id=group,
        sample=sample,
        attempt=attempt,
        episode_id="e",
        token_ids=np.arange(9, dtype=np.int32),
        loss_mask=np.ones(9, dtype=bool),
        logprobs=np.zeros(9, dtype=np.float32),
        versions=[m.VersionRun(m.Version(), 0, 9)],
        sampling=m.Sampling(),
        reward=0.5,
    )


def requests(rng: random.Random, row: m.Trajectory, key: str) -> list[m.Request]:
    """One of every kind that may apply; ``row`` is what a Put hands over, ``key`` what a Hello may show."""
    group, sample, step = row.group_id, row.sample, rng.randrange(3)
    lineage, optional = rng.choice([0, 0, 1, 2]), rng.choice([None, 0, 1])
    header = row.header()
    header.shards = rng.choice([[], ["s"], ["s", "s"], ["unknown"]])
    header.reward = rng.choice([0.5, 1.0, 1e39, float("nan")])
    media = [(group, medium.sha256) for medium in row.media]
    length = rng.choice([len(codec.encode(row))] * 4 + [5, 0, -1, 1 << 62])
    wait_s = rng.choice([0.0, 0.01, -1.0, float("nan"), float("inf")])
    task = m.Task(task_id="own", data_source="", prompt=[], ground_truth="", agent=rng.choice(["", "evil.py:run"]))
    return [
        m.Hello(
            schema=rng.choice([m.SCHEMA, m.SCHEMA, 0]), role="fuzzer", name="f", key=rng.choice([key, "", "no key"])
        ),
        m.Lease(worker="f", max_groups=rng.choice([2, 0, -1, 1 << 62]), wait_s=wait_s, task=rng.choice([None, task])),
        m.Renew(worker="f", held=rng.choice([None, [], [(group, sample, row.attempt)]])),
        m.Put(worker=rng.choice(["f", "other"]), samples=[[header]], lengths=[length], media=media),
        m.Fail(worker="f", group_id=group, sample=sample, attempt=row.attempt, error="e"),
        m.Reserve(step=step, wait_s=0.0, lineage=lineage),
        m.Fetch(rows=[row.key], lineage=optional),
        m.StoreRows(samples=[(group, sample, 0)], lengths=[[rng.choice([5, 0, -1])]]),
        m.LoadRows(rows=[(group, sample, 0, 0)]),
        m.RegisterShard(shard_id="s", name="s", url="tcp://127.0.0.1:1"),
        m.Sweep(shard_id="s", groups=[group], wait_s=0.0),
        m.ListShards(after=rng.choice([-1, 0]), wait_s=0.0),
        m.Commit(step=step, lineage=lineage),
        m.Publish(version=m.Version(lineage, step), engines=["e"]),
        m.Confirm(engine_id="e", version=m.Version(lineage, step)),
        m.Withdraw(engine_ids=["e"], lineage=lineage),
        m.Snapshot(lineage=optional),
        m.Resume(step=step, lineage=rng.randrange(2), snapshot=b""),
        m.Retire(step=step, lineage=lineage),
        m.Tighten(max_staleness=rng.choice([0, 1, -1]), lineage=lineage),
        m.Evaluate(eval_id=step, lineage=optional),
        m.AwaitEvaluation(eval_id=step, wait_s=0.0, lineage=optional, so_far=rng.random() < 0.5),
        m.RegisterEngine(engine_id="e", url="http://x", kind="vllm"),
        m.RemoveEngine(engine_id="e", reason="r", lineage=optional),
        m.ListEngines(lineage=optional),
        m.Status(),
        m.Submit(tasks=[task, numbered(7)]),
        m.Requeue(group_id=group),
        m.Drain(on=rng.random() < 0.2),
        m.Inspect(),
        m.ListGroups(after=-1, limit=rng.choice([10, 0, -1]), state=rng.choice(["", "ready", "junk"])),
        m.Peek(group_id=group),
        m.Subscribe(consumer="logger", oldest=True),
        m.Read(consumer="logger", after=step),
        m.Acknowledge(consumer="logger", position=step),
        m.Unsubscribe(consumer="logger"),
        m.Finish(lineage=lineage),
    ]


def valid(rng: random.Random, key: str = "") -> Frames:
    """The frames of a message that may apply, of any kind."""
    row = trajectory(rng.randrange(6), rng.randrange(2), rng.randrange(3))
    if rng.random() < 0.3:
        row.media = [m.Media.of(b"image", "image/png", 0)]
    request = rng.choice(requests(rng, row, key))
    payload: list[bytes] = []
    if isinstance(request, m.Put):
        payload = [_bytes(codec.encode(row)), *[b"image"] * len(row.media)]
    elif isinstance(request, m.StoreRows):
        payload = [b"bytes"]
    return [_bytes(frame) for frame in wire.encode(rng.randbytes(wire.ID_BYTES), request, payload)]


def _bytes(frame: codec.Frame) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame)
