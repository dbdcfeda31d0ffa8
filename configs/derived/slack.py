"""How many steps of the staleness bound admission leaves to the sampling policy."""

from rl_async.configs.schema.run import QueueConfig


def slack(queue: QueueConfig) -> int:
    """``queue.slack``; if it is null, none for first in first out, and 1 for a policy that chooses."""
    if queue.slack is not None:
        return queue.slack
    return 0 if queue.sampling == "fifo" else 1
