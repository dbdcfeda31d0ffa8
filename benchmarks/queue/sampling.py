"""What a sampling policy does to staleness and to batches: the queue's own store on a simulated clock.

Groups take log-normal times to generate, all at once; a step trains for some such times. Priorities are
drawn evenly from 0 to 1. Of two data sets with equal weights, the second takes three times as long.

    python -m benchmarks.queue.sampling [--steps 2000] [--max-staleness 3] [--sigma 0.5] [--train 4]
"""

import argparse
import heapq
import random
import statistics
from typing import Any, NamedTuple

from rl_async import messages as m
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import TaskList
from rl_async.transfer_queue.store import Store

BATCH = 16
POLICIES: tuple[tuple[Any, int], ...] = (("fifo", 0), ("fifo", BATCH), ("freshest", 0), ("priority", 0), ("quota", 0))


class Trained(NamedTuple):
    """One group of a batch, as the simulation trained it."""

    step: int
    staleness: int
    place: int  # steps after the first that could have had a group admitted then
    task: m.Task


def tasks(steps: int) -> TaskList:
    """Those of a run: of two data sets in turn, with priorities."""
    rng = random.Random(1)
    values: dict[str, Any] = {"task_id": "t", "data_source": "", "prompt": [], "ground_truth": ""}
    return TaskList([m.Task(**values, priority=rng.random(), source="ba"[n % 2]) for n in range(steps * BATCH)])


def header(group: m.LeasedGroup) -> m.TrajectoryHeader:
    """The header of the one row of a sample."""
    values: dict[str, Any] = {"episode_id": "", "segment": 0, "tokens": 1, "sampled": 1, "reward": 0.0}
    return m.TrajectoryHeader(
        group_id=group.group_id,
        sample=0,
        attempt=group.attempt,
        partition="train",
        finish_reason="stop",
        versions=[m.VersionRun(group.min_version, 0, 1)],
        tokens_hash="",
        **values,
    )


def simulate(settings: QueueSettings, sigma: float, train: float) -> tuple[list[Trained], float]:
    """Every trained group, and the time that the run took."""
    store, rng, now = Store(settings, tasks(settings.steps), [], lambda _: None), random.Random(0), 0.0
    running: list[tuple[float, int, m.LeasedGroup]] = []
    trained: list[Trained] = []
    store.publish(m.Version(0, 0), [])

    def lease() -> None:
        store.delivery.renew("w", now)
        for group in store.delivery.lease("w", 1 << 20, now).groups:
            slow = 3.0 if group.task.source == "b" else 1.0
            heapq.heappush(running, (now + slow * rng.lognormvariate(0.0, sigma), group.group_id, group))

    def advance(until: float) -> None:
        while running and running[0][0] <= until:
            _, _, group = heapq.heappop(running)
            store.delivery.put("w", [header(group)], now)

    for step in range(settings.steps):
        lease()
        while isinstance(batch := store.batches.reserve(step, now), m.NotReady):
            now = running[0][0]
            advance(now)
        assert isinstance(batch, m.Reserved)
        for head in batch.headers:
            sampled = head.versions[0].version.step
            trained.append(Trained(step, step - sampled, step - head.group_id // BATCH, batch.tasks[head.group_id]))
        now += train
        advance(now)
        store.batches.commit(step)
        store.publish(m.Version(0, step + 1), [])
        store.retire(step + 1)
    return trained, now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--max-staleness", type=int, default=3)
    parser.add_argument("--sigma", type=float, default=0.5)
    parser.add_argument("--train", type=float, default=4.0, help="of a step, in median times of a group (default: 4)")
    parser.add_argument("--slack", type=int, default=1, help="QueueSettings.slack, but for the first line (default: 1)")
    arguments = parser.parse_args()
    names = ("policy", "window", "staleness", "max", "sd", "top tenth waits", "of set b", "sd of b", "time")
    print("".join(f"{name:>16}" for name in names))
    for place, (sampling, window) in enumerate(POLICIES):
        settings = QueueSettings(
            steps=arguments.steps,
            batch_groups=BATCH,
            group_size=1,
            max_staleness=arguments.max_staleness,
            lease_s=1e9,
            sampling=sampling,
            slack=arguments.slack if place else 0,
            window=window,
            weights={"a": ((0, 1.0),), "b": ((0, 1.0),)},
        )
        trained, took = simulate(settings, arguments.sigma, arguments.train)
        staleness = [group.staleness for group in trained]
        assert max(staleness) <= arguments.max_staleness
        of_b = [
            sum(g.task.source == "b" for g in trained[i : i + BATCH]) / BATCH for i in range(0, len(trained), BATCH)
        ]
        top = statistics.fmean(group.place for group in trained if group.task.priority > 0.9)
        figures = (statistics.fmean(staleness), max(staleness), statistics.pstdev(staleness), top)
        figures += (statistics.fmean(of_b), statistics.pstdev(of_b), took / arguments.steps)
        print(f"{sampling:>16}{window:>16}" + "".join(f"{figure:16.3f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
