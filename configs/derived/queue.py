"""What the section `queue` implies: whether clients need keys, where these are, and how many steps of the staleness
bound are left to the sampling policy."""

import ipaddress
from pathlib import Path

from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``; anything but an IPv4 address is taken for reachable."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def is_closed(queue: QueueConfig) -> bool:
    """Whether every connection to the queue needs a CURVE key."""
    return queue.curve == "always" or bool(queue.keys) or not is_loopback(queue.host)


def key_folder(config: RunConfig, run: Path) -> Path | None:
    """The folder of the run's keys; None if its queue is open."""
    if not is_closed(config.queue):
        return None
    return Path(config.queue.keys) if config.queue.keys else run / "keys"


def slack(queue: QueueConfig) -> int:
    """``queue.slack``; if it is null, none for first in first out, and 1 for a policy that chooses."""
    if queue.slack is not None:
        return queue.slack
    return 0 if queue.sampling == "fifo" else 1
