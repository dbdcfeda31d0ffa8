"""Whether a run's queue is closed to strangers, and where its keys are; roles and launcher must agree on both."""

import ipaddress
from pathlib import Path

from rl_async.configs.schema.run import QueueConfig, RunConfig


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
