"""Trajectories of a queue as a Parquet file, one line a row, and back into a queue.

Columns for people and other tools: group_id, sample, segment, state, partition, task_id, data_source, episode_id, role,
tokens, sampled, reward, finish_reason, oldest_version, newest_version, token_ids, loss_mask, logprobs, and ``task`` as
JSON. ``rest`` holds all other fields of a Trajectory, in its own encoding without the arrays, so nothing is lost.
"""

import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_async import messages
from rl_async.errors import DataError, ProtocolError, UserError
from rl_async.files import UNDECODABLE, written_whole
from rl_async.messages import GroupRecord, Leased, LeasedGroup, Refused, Task, Trajectory, TrajectoryHeader
from rl_async.transfer_queue.client import SyncQueueClient

# Tasks of one request.
SUBMIT_AT_ONCE = 500
# The pause before a request is tried again that found no room.
WAIT_S = 1.0

SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("sample", pa.int32()),
        ("segment", pa.int32()),
        *((name, pa.string()) for name in ("state", "partition", "task_id", "data_source", "episode_id", "role")),
        ("tokens", pa.int64()),
        ("sampled", pa.int64()),
        ("reward", pa.float64()),
        *((name, pa.string()) for name in ("finish_reason", "oldest_version", "newest_version")),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("task", pa.string()),
        ("rest", pa.binary()),
    ]
)
_NEEDED = ("group_id", "state", "sample", "segment", "partition", "token_ids", "loss_mask", "logprobs", "task", "rest")
# The states of groups with missing samples.
INCOMPLETE = ("waiting", "leased")
_decode = messages.decoder(Trajectory)


class Moved(NamedTuple):
    """The counts of an export or import; ``skipped`` groups were gone, or are not for training."""

    groups: int
    rows: int
    skipped: int


class StoredGroup(NamedTuple):
    """One group of a file, its rows by (sample, segment)."""

    group_id: int
    task: Task
    complete: bool
    rows: list[Trajectory]


# --- export ---------------------------------------------------------------------------------------------------------


def export(queue: SyncQueueClient, path: Path) -> Moved:
    """Write all rows of the queue, also of incomplete groups, and remove none. ``path`` appears once it is complete.

    Raises UserError if it cannot be written.
    """
    groups = rows = skipped = 0
    try:
        with written_whole(path) as partial, pq.ParquetWriter(partial, SCHEMA) as writer:
            for record in _groups(queue):
                lines = _lines(queue, record)
                if lines:
                    writer.write_table(pa.Table.from_pylist(lines, SCHEMA))
                    groups, rows = groups + 1, rows + len(lines)
                else:
                    skipped += 1
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    return Moved(groups, rows, skipped)


def _groups(queue: SyncQueueClient) -> Iterator[GroupRecord]:
    """Records of the groups with at least one finished sample."""
    after, more = -1, True
    while more:
        page = queue.group_list(after)
        yield from (record for record in page.groups if record.here)
        more = page.more
        after = page.groups[-1].group_id if page.groups else after


def _lines(queue: SyncQueueClient, record: GroupRecord) -> list[dict[str, Any]]:
    """The rows of one group, which is empty if the group is gone by now."""
    found = queue.peek(record.group_id)
    if isinstance(found, Refused):
        return []
    try:
        rows = queue.fetch([header.key for header in found.headers])
    except ProtocolError:
        if isinstance(queue.peek(record.group_id), Refused):
            return []
        raise
    return [_line(found.group.state, found.task, h, row) for h, row in zip(found.headers, rows, strict=True)]


def _line(state: str, task: Task, header: TrajectoryHeader, row: Trajectory) -> dict[str, Any]:
    versions = [run.version for run in header.versions]
    nothing = np.zeros(0, np.int32)
    rest = msgspec.structs.replace(row, token_ids=nothing, loss_mask=nothing, logprobs=nothing)
    names = ("group_id", "sample", "segment", "partition", "episode_id", "role")
    facts = ("tokens", "sampled", "reward", "finish_reason")
    return {name: getattr(header, name) for name in (*names, *facts)} | {
        "state": state,
        "task_id": task.task_id,
        "data_source": task.data_source,
        "oldest_version": str(min(versions)) if versions else None,
        "newest_version": str(max(versions)) if versions else None,
        "token_ids": row.token_ids,
        "loss_mask": row.loss_mask,
        "logprobs": row.logprobs,
        "task": msgspec.json.encode(task).decode(),
        "rest": messages.encode(rest),
    }


# --- import ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[StoredGroup]:
    """The groups of a file that ``export`` wrote. Raises DataError naming the file and the problem."""
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in _NEEDED if name not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{path}: no column {', '.join(missing)}; was it written by `rl-async queue export`?")
            lines = (line for batch in file.iter_batches(columns=list(_NEEDED)) for line in batch.to_pylist())
            for group_id, members in groupby(lines, key=lambda line: line["group_id"]):
                found = sorted(members, key=lambda line: (line["sample"], line["segment"]))
                task = msgspec.json.decode(found[0]["task"], type=Task)
                complete = found[0]["state"] not in INCOMPLETE
                yield StoredGroup(group_id, task, complete, [_row(line) for line in found])
    except (pa.ArrowInvalid, OSError, *UNDECODABLE, ProtocolError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _row(line: dict[str, Any]) -> Trajectory:
    return msgspec.structs.replace(
        _decode(line["rest"]),
        token_ids=np.array(line["token_ids"], np.int32),
        loss_mask=np.array(line["loss_mask"], bool),
        logprobs=np.array(line["logprobs"], np.float32),
    )


def import_tasks(queue: SyncQueueClient, path: Path, timeout_s: float) -> Moved:
    """Submit the task of each training group of a file. Raises UserError if it finds no room within ``timeout_s``."""
    groups = list(read(path))
    training = [group.task for group in groups if group.rows[0].partition == "train"]
    for at in range(0, len(training), SUBMIT_AT_ONCE):
        deadline = time.monotonic() + timeout_s
        while isinstance(refused := queue.submit(training[at : at + SUBMIT_AT_ONCE]), Refused):
            if refused.code != "full" or time.monotonic() > deadline:
                raise UserError(f"{path}: {at} of {len(training)} tasks were taken; then: {refused.reason}")
            time.sleep(WAIT_S)
    return Moved(len(training), 0, len(groups) - len(training))


def import_ready(queue: SyncQueueClient, path: Path, timeout_s: float) -> Moved:
    """Hand over the complete training groups of a file as if they had been generated here, each once it has a slot.

    Raises UserError for a group that does not fit this queue, that is older than what it has published, or that got no
    slot within ``timeout_s``; those before it are in the queue.
    """
    groups = rows = skipped = 0
    size = queue.inspect().group_size
    for group in read(path):
        if group.rows[0].partition != "train" or not group.complete:
            skipped += 1
            continue
        place = f"{path}: group {group.group_id}"
        samples = {sample: list(rows) for sample, rows in groupby(group.rows, key=lambda row: row.sample)}
        if sorted(samples) != list(range(size)):
            raise UserError(f"{place} has the samples {sorted(samples)}, and groups of this queue have {size}")
        _refuse_older(place, group, queue.status().published.step)
        leased = _lease(queue, group.task, place, timeout_s)
        _refuse_older(place, group, leased.min_version.step)
        for sample, members in samples.items():
            # The rows get the ids that they have in this queue.
            ids = {"group_id": leased.group_id, "attempt": leased.attempt, "sample": sample}
            answer = queue.put(*(msgspec.structs.replace(row, **ids) for row in members))
            if isinstance(answer, Refused):
                raise UserError(f"{place}, sample {sample}: the queue refused it: {answer.reason}")
        groups, rows = groups + 1, rows + len(group.rows)
    return Moved(groups, rows, skipped)


def _refuse_older(place: str, group: StoredGroup, published: int) -> None:
    """Raise UserError for tokens older than the version published at the lease, where the bound begins to count."""
    oldest = min((run.version.step for row in group.rows for run in row.versions), default=published)
    if oldest < published:
        raise UserError(
            f"{place} has tokens of version {oldest}, and the queue has published {published}; import it as a task "
            "(--as tasks) to generate it anew"
        )


def _lease(queue: SyncQueueClient, task: Task, place: str, timeout_s: float) -> LeasedGroup:
    """Waits for a slot; unblocked by publications, which free slots, or ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        answer: Leased = queue.lease(1, max(0.0, min(left, WAIT_S)), task)
        if answer.groups:
            return answer.groups[0]
        if answer.finished or left <= 0:
            why = "the run is over" if answer.finished else f"no slot became free within {timeout_s:g} s"
            raise UserError(f"{place}: rejected ({why}); earlier groups were imported")
