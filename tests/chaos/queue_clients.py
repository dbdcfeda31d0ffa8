"""The trainer and a worker of ``tests/chaos/queue.py``: ROLE RUN ADDRESS. They write what they were told, and go on."""

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_async import messages as m
from rl_async.errors import QueueLost, RowsLost
from rl_async.transfer_queue.client import ClientSettings, QueueClient, SyncQueueClient
from tests.support.queue import async_client, settings

CHECKPOINT_EVERY = 5
PATIENCE_S = 0.3  # a killed queue is back soon


def write(path: Path, line: dict[str, Any]) -> None:
    """Append one whole line, in one call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def serving(run: Path) -> m.Version:
    """What the engines serve."""
    file = run / "serving"
    return m.Version.parse(file.read_text()) if file.exists() else m.Version(0, 0)


def replace(path: Path, data: bytes) -> None:
    """Replace a file by one with all of ``data``, so that a kill leaves the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


async def work(run: Path, name: str, address: str) -> None:
    """Consumes leases, produces samples, until it is killed; every wait has the client's deadline."""
    async with async_client(run, address, "worker", 30, PATIENCE_S) as client:
        renewing = asyncio.create_task(renew(client))
        try:
            while not (leased := await client.lease(2, 0.5)).finished:
                samples = [(group, sample) for group in leased.groups for sample in group.samples]
                await asyncio.gather(*(produce(run, name, client, group, sample) for group, sample in samples))
        finally:
            renewing.cancel()


async def renew(client: QueueClient) -> None:
    """Keeps the leases; ended by cancellation."""
    while True:
        await client.renew()
        await asyncio.sleep(0.5)


async def produce(run: Path, name: str, client: QueueClient, group: m.LeasedGroup, sample: int) -> None:
    """One sample of random tokens; what was acknowledged is written down."""
    version = max(serving(run), group.min_version)
    await asyncio.sleep(random.random() * 0.1)
    tokens = np.random.default_rng().integers(0, 1 << 20, 200, dtype=np.int32)
    row = m.Trajectory(
        task_id=group.task.task_id,
        group_id=group.group_id,
        sample=sample,
        attempt=group.attempt,
        episode_id=f"{group.group_id}.{sample}",
        token_ids=tokens,
        loss_mask=np.ones(200, dtype=bool),
        logprobs=np.zeros(200, dtype=np.float32),
        versions=[m.VersionRun(version, 0, 200)],
        sampling=m.Sampling(),
        reward=float(sample),
    )
    if isinstance(await client.put(row), m.Done):
        write(run / f"{name}.jsonl", {"group": group.group_id, "sample": sample, "tokens": row.tokens_hash()})


class Saved(msgspec.Struct):
    """The trainer's checkpoint."""

    step: int = 0
    queue: bytes = b""


def train(run: Path, address: str) -> None:
    """Consumes batches, from the last checkpoint on, until it is killed; waits at most the client's deadline."""
    file, count = run / "checkpoint", run / "lineage"
    saved = msgspec.msgpack.decode(file.read_bytes(), type=Saved) if file.exists() else Saved()
    lineage = int(count.read_text()) + 1 if count.exists() else 0
    replace(count, str(lineage).encode())
    trainer: ClientSettings = {**settings(run, "trainer", 30, PATIENCE_S), "lineage": lineage}
    with SyncQueueClient(address, **trainer) as queue:
        if lineage:
            queue.resume(saved.step, lineage, saved.queue)
            write(run / "trained.jsonl", {"resumed": saved.step})
        publish(run, queue, m.Version(lineage, saved.step))
        step = saved.step
        while True:
            batch = queue.reserve(step, 1.0)
            if isinstance(batch, m.NotReady):
                continue
            try:
                rows = queue.fetch([header.key for header in batch.headers])
            except RowsLost:
                continue
            write(run / "trained.jsonl", {"step": step, "rows": [trained(row) for row in rows]})
            time.sleep(random.random() * 0.05)
            queue.commit(step)
            step += 1
            publish(run, queue, m.Version(lineage, step))
            if step % CHECKPOINT_EVERY == 0:
                replace(file, msgspec.msgpack.encode(Saved(step, queue.snapshot())))
                queue.retire(step)


def trained(row: m.Trajectory) -> dict[str, Any]:
    """What of a row is compared."""
    oldest = min(run.version.step for run in row.versions)
    return {"group": row.group_id, "sample": row.sample, "tokens": row.tokens_hash(), "oldest": oldest}


def publish(run: Path, queue: SyncQueueClient, version: m.Version) -> None:
    """The engines first, then the queue."""
    replace(run / "serving", str(version).encode())
    queue.publish(version, [])


def main() -> int:
    """Until it is killed or the queue is lost; the exit code."""
    role, run, address = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    try:
        if role == "trainer":
            train(run, address)
        else:
            asyncio.run(work(run, role, address))
    except QueueLost as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
