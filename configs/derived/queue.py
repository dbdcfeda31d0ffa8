"""What the section `queue` implies: how clients reach the queue, where their keys are, and how many steps of the
staleness bound are left to the sampling policy."""

import ipaddress
from pathlib import Path

from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``; anything but an IPv4 address counts as reachable."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def is_encrypted(queue: QueueConfig) -> bool:
    """Return whether clients come by TCP and CURVE; otherwise by socket files that only this user can open."""
    return queue.curve == "always" or not is_loopback(queue.host)


def key_folder(config: RunConfig, run: Path) -> Path:
    """Return the folder with the run's keys."""
    return Path(config.queue.keys) if config.queue.keys else run / "keys"


def slack(queue: QueueConfig) -> int:
    """Return ``queue.slack`` or, if it is null, 0 for fifo and 1 for any other sampling policy."""
    if queue.slack is not None:
        return queue.slack
    return 0 if queue.sampling == "fifo" else 1
