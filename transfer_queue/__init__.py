"""The transfer queue: the only shared state of a run, which also works without one (``serve``).

    from rl_async.transfer_queue import QueueClient, SyncQueueClient, read_batches, read_groups, serve

Names are imported on first use, so that a program loads only what it needs. In: tasks and finished rows of agent
workers. Out: leases, batches for the trainer, trained groups for other readers. To add a verb, see ``server/verbs.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_async.transfer_queue.client.async_client import QueueClient
    from rl_async.transfer_queue.client.readers import Batch, TrainedGroup, read_batches, read_groups
    from rl_async.transfer_queue.client.sync_client import SyncQueueClient
    from rl_async.transfer_queue.client.torch_dataset import QueueDataset
    from rl_async.transfer_queue.server.standalone import serve

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
    "Batch": "client.readers",
    "QueueClient": "client.async_client",
    "QueueDataset": "client.torch_dataset",
    "SyncQueueClient": "client.sync_client",
    "TrainedGroup": "client.readers",
    "read_batches": "client.readers",
    "read_groups": "client.readers",
    "serve": "server.standalone",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
