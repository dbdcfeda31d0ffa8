"""The batches of a queue as a torch dataset. The only file of this room that imports torch."""

from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from rl_async.errors import UserError
from rl_async.transfer_queue.client import Batch, SyncQueueClient, read_batches


class QueueDataset(IterableDataset[Batch]):
    """Yields reserved batches; each iteration opens a connection of its own and continues where the queue stands.

    Give it to ``DataLoader(dataset, batch_size=None)``: the queue has made the batches. A loader without workers asks
    for the next batch only when its caller does, so a batch is done when the loop's body is.
    """

    def __init__(self, address: str, *, steps: int | None = None, timeout_s: float = 600.0) -> None:
        self._address, self._steps, self._timeout_s = address, steps, timeout_s

    def __iter__(self) -> Iterator[Batch]:
        """Raises UserError in a loader's worker process, which would call a batch done before it was used."""
        if get_worker_info() is not None:
            raise UserError("QueueDataset: use DataLoader(..., num_workers=0); workers read ahead of what is done")
        with SyncQueueClient(self._address, role="trainer", name="dataset") as client:
            yield from read_batches(client, steps=self._steps, timeout_s=self._timeout_s)
