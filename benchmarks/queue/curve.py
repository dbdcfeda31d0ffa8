"""What CURVE costs: MB/s through the queue with and without it, in turns, in one run.

    python -m benchmarks.queue.curve [--groups 400] [--rounds 3]

One worker leases and puts groups of 8 trajectories of 1,024-2,048 tokens, one trainer reserves, fetches, commits,
publishes and retires them; the queue (memory journal) is a process of its own, all on loopback. The ratios are those
of the medians; CPU seconds per GB, of the queue and both clients together, say more where others use the machine, too.
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import LeasedGroup, Reserved, Sampling, Trajectory, Version, VersionRun
from rl_async.transfer_queue.auth.authenticator import Authenticator
from rl_async.transfer_queue.auth.keys import ClientKeys, client_keys, make_keys, server_keys
from rl_async.transfer_queue.client.async_client import QueueClient
from rl_async.transfer_queue.client.sync_client import SyncQueueClient
from rl_async.transfer_queue.journal.memory import MemoryJournal
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.server.loop import bind, serve
from rl_async.transfer_queue.server.queue_server import QueueServer
from rl_async.transfer_queue.state.store import Store
from rl_async.transfer_queue.state.tasks import Counted
from rl_async.transfer_queue.state.transitions import Feed

GROUP_SIZE = 8
BATCH_GROUPS = 16
LENGTHS = (1024, 1280, 1536, 1792, 2048)


class Cost(NamedTuple):
    """MB/s, and CPU seconds per GB of all three processes."""

    mb_per_s: float
    cpu: float

    def text(self) -> str:
        """Both figures as one cell of the table."""
        return f"{self.mb_per_s:.0f} MB/s, {self.cpu:.1f} CPU s/GB"


def config_of(folder: Path | None) -> RunConfig:
    """A config whose queue has the keys in ``folder``, or is open."""
    queue = QueueConfig(keys=str(folder or ""))
    return RunConfig(model=ModelConfig(path=""), data=DataConfig(path=""), queue=queue)


def run_queue(address: str, folder: Path | None, stopped: Any, cpu_s: Any) -> None:
    """The queue's process; ``cpu_s`` is what serving took of it."""
    journal = MemoryJournal()
    feed = Feed(journal.append)
    settings = QueueSettings(steps=1 << 20, batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, max_staleness=4)
    store = Store(settings, Counted(), [], feed)
    keys = server_keys(config_of(folder), Path())
    with zmq.Context() as context, ExitStack() as stack:
        auth = (
            stack.enter_context(Authenticator(context, keys.allowed, lambda: store.count("denied"))) if keys else None
        )
        router = stack.enter_context(bind(context, address, keys=keys))
        began = time.process_time()
        serve(router, QueueServer(store, journal, feed), journal.flush, stopped.is_set, auth=auth)
        cpu_s.value = time.process_time() - began


@contextmanager
def running(folder: Path | None, cpu_s: Any) -> Iterator[str]:
    """A queue's address while it lives; ``cpu_s`` is set when it has ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    stopped = spawn.Event()
    process = spawn.Process(target=run_queue, args=(address, folder, stopped, cpu_s))
    process.start()
    try:
        yield address
    finally:
        stopped.set()
        process.join()


def rows_of(group: LeasedGroup) -> list[Trajectory]:
    """The rows that a worker puts for a group."""
    return [row_of(group, sample, LENGTHS[(group.group_id + sample) % len(LENGTHS)]) for sample in group.samples]


def row_of(group: LeasedGroup, sample: int, tokens: int) -> Trajectory:
    """Make a trajectory with this many tokens."""
    return Trajectory(
        task_id=group.task.task_id,
        group_id=group.group_id,
        sample=sample,
        attempt=group.attempt,
        partition=group.partition,
        episode_id=f"{group.group_id}.{sample}",
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, dtype=bool),
        logprobs=np.zeros(tokens, dtype=np.float32),
        versions=[VersionRun(group.min_version, 0, tokens)],
        sampling=Sampling(),
        reward=float(sample),
    )


async def work(address: str, keys: ClientKeys | None, over: Callable[[], bool]) -> None:
    """Lease and put groups as a worker, until ``over``."""
    async with QueueClient(address, role="agent", name="worker", keys=keys) as client:
        while not over():
            for group in (await client.lease(8, 0.2)).groups:
                await asyncio.gather(*map(client.put, rows_of(group)))


def train(address: str, keys: ClientKeys | None, groups: int) -> float:
    """The trainer; bytes per second of the trajectories that it fetched after the first batch."""
    nbytes, began = 0, 0.0
    with SyncQueueClient(address, role="trainer", name="trainer", keys=keys) as client:
        client.publish(Version(0, 0), [])
        for step in range(1 + groups // BATCH_GROUPS):
            batch = client.reserve(step, 60.0)
            assert isinstance(batch, Reserved), batch
            client.fetch([header.key for header in batch.headers])
            client.commit(step)
            client.publish(Version(0, step + 1), [])
            client.retire(step + 1)
            if step:
                nbytes += sum(header.nbytes for header in batch.headers)
            else:
                began = time.perf_counter()
        return nbytes / (time.perf_counter() - began)


def measure(folder: Path | None, groups: int) -> Cost:
    """Measure the path from the worker to the trainer."""
    keys = client_keys(config_of(folder), Path())
    over = threading.Event()
    cpu_s = multiprocessing.get_context("spawn").Value("d", 0.0)
    began = time.process_time()
    with running(folder, cpu_s) as address:
        worker = threading.Thread(target=lambda: asyncio.run(work(address, keys, over.is_set)))
        worker.start()
        try:
            rate = train(address, keys, groups)
        finally:
            over.set()
            worker.join()
    gigabytes = groups * GROUP_SIZE * sum(LENGTHS) / len(LENGTHS) * 9 / 1e9  # 9 bytes a token
    return Cost(rate / 1e6, (time.process_time() - began + cpu_s.value) / gigabytes)


def main() -> None:
    """Print one line per round, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make_keys(Path(place))
        costs: dict[str, list[Cost]] = {"open": [], "CURVE": []}
        for _ in range(arguments.rounds):
            for name, folder in (("open", None), ("CURVE", Path(place))):
                costs[name].append(measure(folder, arguments.groups))
                print(f"{name:<6} {costs[name][-1].text()}", flush=True)
    first, second = (Cost(*map(statistics.median, zip(*costs[name]))) for name in ("open", "CURVE"))
    print(f"median: open {first.text()}; CURVE {second.text()}")
    print(f"CURVE / open: {second.mb_per_s / first.mb_per_s:.2f} of the MB/s, {second.cpu / first.cpu:.2f} of the CPU")


if __name__ == "__main__":
    main()
