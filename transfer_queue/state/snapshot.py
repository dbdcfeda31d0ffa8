"""What a checkpoint keeps of the queue, and what may be wrong with it when it comes back."""

import msgspec

from rl_async.transfer_queue.state.groups import EVAL_GROUPS
from rl_async.transfer_queue.state.transitions import ReadmittedGroup


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the queue: enough to generate again what was not trained."""

    next_group: int
    cursor: bytes  # of the task source, behind next_group
    groups: list[ReadmittedGroup]  # not trained yet


def decode_snapshot(body: bytes, step: int) -> QueueSnapshot:
    """Decode the snapshot of a checkpoint after ``step`` steps. Raises ValueError if it makes no sense.

    Its cursor is opaque here; the task source judges it.
    """
    snapshot = msgspec.msgpack.decode(body, type=QueueSnapshot)
    if step < 0 or not 0 <= snapshot.next_group <= EVAL_GROUPS:
        raise ValueError(f"step {step}, next_group={snapshot.next_group}")
    ids = [group.group for group in snapshot.groups]
    if len(set(ids)) < len(ids) or not all(0 <= group_id < snapshot.next_group for group_id in ids):
        raise ValueError(f"groups {ids} are not different ones below {snapshot.next_group}")
    if late := [group.group for group in snapshot.groups if group.step is not None and group.step < step]:
        raise ValueError(f"groups {late} belong to steps before {step}")
    return snapshot
