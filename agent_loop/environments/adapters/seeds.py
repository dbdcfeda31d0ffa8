"""The seed of a task's world: the samples of a group must meet the same one."""

import zlib

from rl_async.messages import Task


def seed_of(task: Task) -> int:
    """Return ``extra_info.seed``, or a number made from the task's id."""
    seed = task.extra.get("seed")
    return seed if isinstance(seed, int) else zlib.crc32(task.task_id.encode()) & 0x7FFFFFFF
