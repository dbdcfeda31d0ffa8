"""What comes out of a queue, as loops: batches for a reader in the trainer's place, trained groups for any other."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from rl_async.errors import ProtocolError, QueueLost, RowsLost
from rl_async.messages import DeliveredGroup, NotReady, RowKey, Task, Trajectory, TrajectoryHeader, Version
from rl_async.transfer_queue.client.sync_client import SyncQueueClient

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
    came within ``timeout_s``, saying what was missing, and RowsChanged for rows with other bytes than were put.
    """
    published = client.status().published
    client.lineage = published.lineage
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
                rows = client.fetch_announced(reply.headers)
            except RowsLost:
                continue  # they are generated again, which the next question waits for
            return Batch(step, rows, reply.headers, reply.tasks)
        if over:
            return None
        if left <= 0:
            raise QueueLost(f"no batch for step {step} within {timeout_s:g} s: {reply.why}")


class TrainedGroup(NamedTuple):
    """One group of a consumer: rows by (sample, segment); ``skipped`` groups were given up before, so far."""

    position: int
    step: int
    group_id: int
    task: Task
    rows: list[Trajectory]
    skipped: int


def read_groups(
    client: SyncQueueClient, consumer: str, *, after: int = -1, oldest: bool = False, timeout_s: float = 600.0
) -> Iterator[TrainedGroup]:
    """The groups that were trained, in order, each to every consumer; ends when the queue is finished and read.

    The queue keeps the consumer's place: asking for the next group acknowledges the last, so one that dies in between
    gets it again. To have each group exactly once, store ``position`` in the transaction that stores what was made of
    the group, and give it as ``after`` when starting again. A new consumer reads from now on, or from the ``oldest``
    group that is here. Raises QueueLost when none came within ``timeout_s``.
    """
    client.subscribe(consumer, oldest=oldest)
    deadline = time.monotonic() + timeout_s
    while True:
        wait_s = max(0.0, min(deadline - time.monotonic(), POLL_S))
        reply = client.read(consumer, wait_s, after=after, max_groups=1)
        for group in reply.groups:
            rows = rows_of(client, consumer, group)
            if rows is not None:
                yield TrainedGroup(group.position, group.step, group.group_id, group.task, rows, reply.skipped)
                client.acknowledge(consumer, group.position)
                after, deadline = group.position, time.monotonic() + timeout_s
        if reply.finished:
            return
        if not reply.groups and time.monotonic() > deadline:
            raise QueueLost(f"no group was trained within {timeout_s:g} s; consumer {consumer} has read all before")


def rows_of(client: SyncQueueClient, consumer: str, group: DeliveredGroup) -> list[Trajectory] | None:
    """A group's rows; None if it was given up since it was delivered, or some went with a payload shard: read again."""
    try:
        return client.fetch_announced(group.headers)
    except (ProtocolError, RowsLost):
        again = client.read(consumer, 0.0, after=group.position - 1, max_groups=1).groups
        if [_rows_named(each) for each in again] != [_rows_named(group)]:
            return None
        raise


def _rows_named(group: DeliveredGroup) -> tuple[int, list[tuple[RowKey, int]]]:
    return group.position, [(header.key, header.attempt) for header in group.headers]
