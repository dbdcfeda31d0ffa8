"""The transfer queue: the only shared state of a run, which also works without one (``serve``).

    from rl_async.transfer_queue import QueueClient, SyncQueueClient, read_batches, read_groups, serve

Names are imported on first use, so that a program loads only what it needs. In: tasks and finished rows of agent
workers. Out: leases, batches for the trainer, trained groups for other readers. To add a verb, see ``verbs.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_async.transfer_queue.client import (
        Batch,
        QueueClient,
        SyncQueueClient,
        TrainedGroup,
        read_batches,
        read_groups,
    )
    from rl_async.transfer_queue.server import serve
    from rl_async.transfer_queue.torch_dataset import QueueDataset

__all__ = [
    "Batch",
    "QueueClient",
    "QueueDataset",
    "SyncQueueClient",
    "TrainedGroup",
    "read_batches",
    "read_groups",
    "serve",
]

_HOMES = {
    "Batch": "client",
    "QueueClient": "client",
    "QueueDataset": "torch_dataset",
    "SyncQueueClient": "client",
    "TrainedGroup": "client",
    "read_batches": "client",
    "read_groups": "client",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
