"""What the queue costs with a fleet of simulated workers: per group, per connection, at a publication, at a loss."""

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import psutil

from benchmarks.scale.server import MAX_STALENESS, ROWS, batch_groups, settings
from benchmarks.transfer_queue import address, line, spent_s, started
from rl_async import messages as m
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.verbs import ANSWER_S

IN_A_PROCESS = 2500  # workers
LOST = 10  # one worker of so many is killed
STEPS = 6  # that are measured
IDLE_S = 5.0
MIN_GROUPS = 2000


class QueueCosts(NamedTuple):
    """One row of the table; processor time is that of the queue's process."""

    workers: int
    cpu_us_per_group: float
    groups_per_s: float
    idle_cpu_us_per_worker_s: float  # when no worker has anything to do
    kb_per_worker: float  # of memory, of an idle worker
    registered_cpu_ms: float  # for all engines to be registered, with every worker listening
    published_cpu_ms: float  # for a version to be published, and heard by every worker
    published_s: float  # until the last worker has heard
    lost_after_s: float  # from the death of a tenth of the workers until all that they held is taken back (lease: 15 s)
    stalled_s: float  # the longest that another client waited for an answer meanwhile

    def __str__(self) -> str:
        return (
            f"{self.workers:8,}{self.cpu_us_per_group:10.0f}{self.groups_per_s:10,.0f}"
            f"{self.idle_cpu_us_per_worker_s:10.1f}{self.kb_per_worker:10.1f}{self.registered_cpu_ms:12.0f}"
            f"{self.published_cpu_ms:12.0f}{self.published_s:10.2f}{self.lost_after_s:10.2f}{self.stalled_s:10.2f}"
        )


HEAD = (
    f"{'workers':>8}{'us/group':>10}{'groups/s':>10}{'idle us':>10}{'KB each':>10}{'register ms':>12}"
    f"{'publish ms':>12}{'publish s':>10}{'lost s':>10}{'stalled s':>10}"
)


@contextmanager
def workers(at: str, count: int, how: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """So many simulated workers inside the block, all of them connected; killed at its end."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started("scale.workers", at, str(min(IN_A_PROCESS, count - first)), how))
            for first in range(0, count, IN_A_PROCESS)
        ]
        for process in processes:
            line(process)
        yield processes


def train(trainer: SyncQueueClient, first: int, steps: int) -> None:
    """Take these steps as the trainer does, with nothing to compute."""
    for step in range(first, first + steps):
        reserved = trainer.reserve(step, wait_s=300)
        trainer.fetch([header.key for header in reserved.headers])
        trainer.commit(step)
        trainer.publish(m.Version(0, step + 1), [])
        trainer.retire(step + 1)


def hear(fleets: Sequence["subprocess.Popen[str]"], revision: int) -> None:
    """Wait until every worker has heard of this revision of the registry."""
    for fleet in fleets:
        while json.loads(line(fleet))["revision"] < revision:
            pass


def publication(
    trainer: SyncQueueClient,
    server: "subprocess.Popen[str]",
    fleets: Sequence["subprocess.Popen[str]"],
    engines: int,
    version: m.Version,
) -> tuple[float, float]:
    """Seconds of the processor and of the clock, for every worker to have heard that every engine has a version."""
    cpu, began = spent_s(server), time.perf_counter()
    trainer.publish(version, [f"engine-{number}" for number in range(engines)])
    hear(fleets, trainer.engines().revision)
    return spent_s(server) - cpu, time.perf_counter() - began


def loss(trainer: SyncQueueClient, at: str, count: int, step: int) -> tuple[float, float]:
    """Seconds from the death of ``count`` workers that hold a group each until the queue has taken back all that they
    hold, and the longest round trip meanwhile. Nothing is leased before; ``step`` is trained to free their groups."""

    def lost() -> int:
        return trainer.status().counters.get("leases_lost", 0)

    with workers(at, count, "hold") as holding:
        train(trainer, step, 1)
        while trainer.status().leased < count:
            time.sleep(0.05)
        before, stalled = lost(), 0.0
        for process in holding:
            process.kill()
        began = asked = time.perf_counter()
        while lost() < before + count * ROWS:
            stalled = max(stalled, time.perf_counter() - asked)
            time.sleep(0.01)
            asked = time.perf_counter()
        return time.perf_counter() - began, max(stalled, time.perf_counter() - asked)


def measure(count: int, engines: int) -> QueueCosts:
    """One row of the table, of a queue of its own."""
    at = address()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(started("scale.server", at, str(count), folder))
        line(server)
        trainer = stack.enter_context(SyncQueueClient(at, role="trainer", name="t", timeout_s=600))
        process = psutil.Process(server.pid)
        before = process.memory_info().rss
        # Nothing is published yet, so that there is nothing to do.
        with workers(at, count, "play") as fleets:
            kb_each = (process.memory_info().rss - before) / count / 1e3
            cpu, began = spent_s(server), time.perf_counter()
            time.sleep(IDLE_S)
            idle = (spent_s(server) - cpu) / (time.perf_counter() - began) / count
            cpu = spent_s(server)
            for number in range(engines):
                trainer.register_engine(f"engine-{number}", "http://127.0.0.1:1", "vllm")
            hear(fleets, trainer.engines().revision)
            registered = spent_s(server) - cpu
            time.sleep(count * ANSWER_S)  # as between two steps: a change that follows at once is told of later
            published = publication(trainer, server, fleets, engines, m.Version())
            train(trainer, 0, 1)
            steps = max(STEPS, MIN_GROUPS // batch_groups(count))
            cpu, began = spent_s(server), time.perf_counter()
            train(trainer, 1, steps)
            spent, seconds = spent_s(server) - cpu, time.perf_counter() - began
            while trainer.status().ready < settings(count).slots_at(MAX_STALENESS):  # until all is played
                time.sleep(0.05)
        groups = steps * batch_groups(count)
        lost_after, stalled = loss(trainer, at, max(1, count // LOST), 1 + steps)
    return QueueCosts(
        workers=count,
        cpu_us_per_group=1e6 * spent / groups,
        groups_per_s=groups / seconds,
        idle_cpu_us_per_worker_s=1e6 * idle,
        kb_per_worker=kb_each,
        registered_cpu_ms=1e3 * registered,
        published_cpu_ms=1e3 * published[0],
        published_s=published[1],
        lost_after_s=lost_after,
        stalled_s=stalled,
    )
