"""Batch after batch of a queue that has no trainer, each one again until its reader asks for the next."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from rl_async.errors import QueueLost, RowsLost
from rl_async.messages import NotReady, Task, Trajectory, TrajectoryHeader, Version
from rl_async.transfer_queue.sync_client import SyncQueueClient

POLL_S = 5.0  # of one question


class Batch(NamedTuple):
    """What a step reserved: rows and their headers in the same order, by (group, sample, segment)."""

    step: int
    rows: list[Trajectory]
    headers: list[TrajectoryHeader]
    tasks: dict[int, Task]  # by group


def read_batches(client: SyncQueueClient, *, steps: int | None = None, timeout_s: float = 600.0) -> Iterator[Batch]:
    """The batches from the first that is not done, at most ``steps``; ends when the queue is finished and has no more.

    Asking for the next batch says that the last one is done: it is committed, published as a new version, which frees
    its slots, and retired. A reader that dies before gets it again. One reader a queue. Raises QueueLost when no batch
    came within ``timeout_s``, saying what was missing.
    """
    published = client.status().published
    step, end = published.step, None if steps is None else published.step + steps
    while end is None or step < end:
        batch = _next(client, step, timeout_s)
        if batch is None:
            return
        yield batch
        client.commit(step)
        step += 1
        client.publish(Version(published.lineage, step), [])
        client.retire(step)


def _next(client: SyncQueueClient, step: int, timeout_s: float) -> Batch | None:
    """Waits for groups to become ready; unblocked by workers, the end of the run (None), or ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        over = client.status().finished  # asked first: what was put before the end is still read
        left = deadline - time.monotonic()
        reply = client.reserve(step, 0.0 if over else max(0.0, min(left, POLL_S)))
        if not isinstance(reply, NotReady):
            try:
                rows = client.fetch([header.key for header in reply.headers])
            except RowsLost:
                continue  # they are generated again, which the next question waits for
            return Batch(step, rows, reply.headers, reply.tasks)
        if over:
            return None
        if left <= 0:
            raise QueueLost(f"no batch for step {step} within {timeout_s:g} s: {reply.why}")
