"""The paths that ``transfer_queue.py`` compares, each in a process: ``python -m benchmarks.queue.arms ROLE ARGUMENTS``.

Producers send the same groups: 8 rows of about TOKENS tokens each, or as many as they are told, with ids (int32),
log-probabilities (float32), mask (bool) and reward. Every process prints ``ready`` before its part of the work begins.
A consumer prints one JSON line with the seconds from the first group's arrival to the last one's.
"""

import asyncio
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import uvloop
import zmq

from rl_async import messages
from rl_async.messages import LeasedGroup, Sampling, Task, Trajectory, Version, VersionRun
from rl_async.process.allocation import collect_rarely, reuse_freed_memory
from rl_async.process.http_auth import Role
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import AllowList, Authenticator, ClientKeys, ServerKeys, is_file, read_client_keys
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal import Journal, MemoryJournal, SqliteJournal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.server import JournalRecorder, QueueLimits, QueueServer, bind, recover, serve_requests
from rl_async.transfer_queue.shard import run_shard
from rl_async.transfer_queue.store import Feed, Store

ROWS = 8  # of a group
WINDOW = 64  # messages that a raw socket buffers at most
BATCH = 32  # groups per step of the queue
LEASED = 32  # groups that the queue's producer works on at once
TOKENS = 1536  # of a row, on the average
LONG_TOKENS = 32_768  # of a long row
DIFFERENT = 64  # groups whose rows have lengths of their own; then these lengths come again

_MOST = LONG_TOKENS * 4 // 3
_IDS, _MASK, _LOGPROBS = np.full(_MOST, 7, np.int32), np.ones(_MOST, bool), np.full(_MOST, -1.0, np.float32)


def lengths(groups: int = DIFFERENT, tokens: int = TOKENS) -> np.ndarray:
    """Tokens of each row, from 2/3 to 4/3 of ``tokens``, int64[groups, ROWS]: the same numbers for every path."""
    return np.random.default_rng(0).integers(tokens * 2 // 3, tokens * 4 // 3 + 1, (groups, ROWS))


def ready() -> None:
    """Tell whoever started this process that its work begins now."""
    print("ready", flush=True)


def row(group: LeasedGroup, sample: int, tokens: int) -> Trajectory:
    """A trajectory of random tokens, as a worker would hand it over."""
    return Trajectory(
        task_id=group.task.task_id,
        group_id=group.group_id,
        sample=sample,
        attempt=group.attempt,
        episode_id=f"{group.group_id}.{sample}",
        token_ids=_IDS[:tokens],
        loss_mask=_MASK[:tokens],
        logprobs=_LOGPROBS[:tokens],
        versions=[VersionRun(group.min_version, 0, tokens)],
        sampling=Sampling(),
        reward=0.5,
    )


def encoded(tokens: int) -> list[list[bytes]]:
    """Frames of the groups that differ, one frame per row."""
    task = Task(task_id="t", data_source="", prompt=[], ground_truth="")
    groups = [
        LeasedGroup(group_id=i, partition="train", attempt=0, samples=[], task=task, min_version=Version())
        for i in range(DIFFERENT)
    ]
    sizes = lengths(tokens=tokens)
    return [[messages.encode(row(g, s, int(n))) for s, n in enumerate(sizes[g.group_id])] for g in groups]


def report(began: float, groups: int, nbytes: int) -> None:
    print(json.dumps({"seconds": time.perf_counter() - began, "groups": groups, "bytes": nbytes}), flush=True)


# --- raw sockets ----------------------------------------------------------------------------------------------------


def raw_producer(address: str, groups: str, tokens: str) -> None:
    frames = encoded(int(tokens))
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set(zmq.SNDHWM, WINDOW)
        socket.connect(address)
        ready()
        for number in range(int(groups)):
            socket.send_multipart(frames[number % len(frames)], copy=False)
        socket.close(linger=60_000)


def raw_consumer(address: str, groups: str, how: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.set(zmq.RCVHWM, WINDOW)
        socket.bind(address) if how == "bind" else socket.connect(address)
        ready()
        socket.recv_multipart(copy=False)
        began, nbytes = time.perf_counter(), 0
        for _ in range(int(groups) - 1):
            nbytes += sum(len(frame) for frame in socket.recv_multipart(copy=False))
        report(began, int(groups) - 1, nbytes)


def raw_broker(producers: str, consumers: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.set(zmq.RCVHWM, WINDOW)
        push.set(zmq.SNDHWM, WINDOW)
        pull.bind(producers)
        push.bind(consumers)
        ready()
        zmq.proxy(pull, push)


# --- Redis streams --------------------------------------------------------------------------------------------------


def redis_producer(url: str, groups: str, tokens: str) -> None:
    import redis

    client, frames = redis.Redis.from_url(url), encoded(int(tokens))
    ready()
    for number in range(int(groups)):
        while client.xlen("groups") > WINDOW:
            time.sleep(0.001)
        fields = {str(i): frame for i, frame in enumerate(frames[number % len(frames)])}
        client.xadd("groups", fields)


def redis_consumer(url: str, groups: str) -> None:
    import redis

    client = redis.Redis.from_url(url)
    client.xgroup_create("groups", "trainer", id="0", mkstream=True)
    ready()
    began, seen, nbytes = 0.0, 0, 0
    while seen < int(groups):
        for _, entries in client.xreadgroup("trainer", "rank0", {"groups": ">"}, count=8, block=60_000):
            began = began or time.perf_counter()
            with client.pipeline(transaction=False) as pipe:
                for entry, fields in entries:
                    nbytes += sum(map(len, fields.values())) if seen else 0
                    seen += 1
                    pipe.xack("groups", "trainer", entry)
                    pipe.xdel("groups", entry)
                pipe.execute()
    report(began, seen - 1, nbytes)


# --- this queue -----------------------------------------------------------------------------------------------------


def settings(batch: int = BATCH, group_size: int = ROWS, replicas: int = 0) -> QueueSettings:
    return QueueSettings(
        steps=1 << 40,
        batch_groups=batch,
        group_size=group_size,
        max_staleness=3,
        lease_s=60.0,
        max_bytes=1 << 32,
        replicas=replicas,
    )


def journal_of(kind: str, folder: Path) -> Journal:
    """As ``open_journal`` makes them of a config; with shards, ``sharded``, the memory journal."""
    return SqliteJournal(folder, "benchmark") if kind == "sqlite" else MemoryJournal()


def keys_of(folder: str, role: Role) -> ClientKeys | None:
    """Those of a role in ``folder``; None for an empty name, as an open queue needs none."""
    return read_client_keys(Path(folder), role) if folder else None


def queue_server(address: str, kind: str, folder: str, batch: str = str(BATCH), group_size: str = str(ROWS)) -> None:
    """The queue's own loop, with ledger and journal, around its own store; closed if there are keys in ``folder``."""
    place = Path(folder) / "keys"
    keys = None
    if place.exists():
        keys = ServerKeys((place / "server.key").read_bytes().strip(), AllowList(place / "clients"))
    with (
        closing(journal_of(kind, Path(folder))) as journal,
        closing(Ledger(Path(folder) / "ledger.jsonl")) as ledger,
        zmq.Context() as context,
        ExitStack() as stack,
    ):
        feed = Feed(journal.append, ledger.append)
        replicas = 1 if kind == "sharded" else 0
        store = Store(settings(int(batch), int(group_size), replicas), Counted(), [], feed)
        recover(store, journal, ledger, time.monotonic())
        auth = None
        if keys is not None and not is_file(address):
            auth = stack.enter_context(Authenticator(context, keys.allowed, lambda: store.count("denied")))
        socket = stack.enter_context(bind(context, address, keys=keys))
        limits = QueueLimits(requests_per_s=1e6)  # one client plays many
        server = QueueServer(store, journal, feed, limits=limits, allowed=None if keys is None else keys.allowed)
        collect_rarely()  # as the queue of a run does
        ready()
        serve_requests(socket, server, JournalRecorder(store, journal, ledger).flush, lambda: False, auth=auth)


def queue_shard(address: str, queue: str, name: str) -> None:
    """Serve one payload shard of the queue until killed."""
    ready()
    run_shard(address, queue, name)


def queue_producer(
    address: str, groups: str, groups_per_s: str = "inf", keys: str = "", tokens: str = str(TOKENS)
) -> None:
    sizes = lengths(tokens=int(tokens))
    uvloop.run(_produce(address, int(groups), float(groups_per_s), keys_of(keys, "worker"), sizes))  # as a worker


async def _produce(address: str, groups: int, rate: float, keys: ClientKeys | None, sizes: np.ndarray) -> None:
    """A worker: lease, make rows, hand over; several groups at once, and ``rate`` per second at most.

    Prints the median milliseconds of a lease that got groups; below the full rate, those that need not wait for any.
    """
    wait_s = 10.0 if math.isinf(rate) else 0.0
    left, began, waits = groups, time.perf_counter(), list[float]()
    working: set[asyncio.Task[None]] = set()

    async def play(client: QueueClient, group: LeasedGroup) -> None:
        n = sizes[group.group_id % len(sizes)]
        await asyncio.gather(*(client.put(row(group, s, int(n[s]))) for s in group.samples))

    async with QueueClient(address, role="agent", name="producer", keys=keys) as client:
        ready()
        while left:
            await asyncio.sleep((groups - left) / rate - (time.perf_counter() - began))
            asked = time.perf_counter()
            leased = await client.lease(min(left, LEASED - len(working)), wait_s=wait_s)
            if leased.groups:
                waits.append(1e3 * (time.perf_counter() - asked))
            else:
                await asyncio.sleep(0.001)
            left -= len(leased.groups)
            working |= {asyncio.create_task(play(client, group)) for group in leased.groups}
            if len(working) > LEASED // 2 or not left:
                done, working = await asyncio.wait(working, return_when="FIRST_COMPLETED" if left else "ALL_COMPLETED")
                for task in done:
                    task.result()
    print(json.dumps({"lease_ms": statistics.median(waits)}), flush=True)


def queue_consumer(address: str, groups: str, keys: str = "") -> None:
    """Act as the trainer: reserve, fetch, commit, publish and retire each step."""
    with SyncQueueClient(address, role="trainer", name="consumer", keys=keys_of(keys, "trainer")) as client:
        client.publish(Version(), [])
        ready()
        began, nbytes, seen = 0.0, 0, 0
        for step in range(int(groups) // BATCH):
            reserved = client.reserve(step, wait_s=60)
            rows = client.fetch([header.key for header in reserved.headers])
            client.commit(step)
            client.publish(Version(0, step + 1), [])
            client.retire(step + 1)
            if began:
                seen += BATCH
                nbytes += sum(header.nbytes for header in reserved.headers)
                assert len(rows) == BATCH * ROWS
            else:
                began = time.perf_counter()
        report(began, seen, nbytes)


ROLES: dict[str, Callable[..., None]] = {
    "raw_producer": raw_producer,
    "raw_consumer": raw_consumer,
    "raw_broker": raw_broker,
    "redis_producer": redis_producer,
    "redis_consumer": redis_consumer,
    "queue_server": queue_server,
    "queue_shard": queue_shard,
    "queue_producer": queue_producer,
    "queue_consumer": queue_consumer,
}

if __name__ == "__main__":
    # As roles of a run do; in every arm, so that the ratios compare queues, and not allocators or collections.
    reuse_freed_memory()
    gc.freeze()
    ROLES[sys.argv[1]](*sys.argv[2:])
