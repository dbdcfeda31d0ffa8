"""Which rows a rank trains, and with whom it adds numbers up."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Cell:
    """The ranks that hold one copy of the model between them: all of a cell read and train the same rows.

    ``group`` has one rank of every cell, this one among them; None: all ranks, since each is a cell of its own. What
    is added up over it is equal on all ranks afterwards.
    """

    dp_rank: int
    dp_size: int
    is_recorder: bool  # one rank of each cell is; it writes down what the cell trained
    group: dist.ProcessGroup | None = None

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor on the host over the cells, in place. A collective."""
        dist.all_reduce(tensor, group=self.group)


def lone_ranks() -> Cell:
    """Every rank is a cell: plain data parallelism."""
    return Cell(dist.get_rank(), dist.get_world_size(), is_recorder=True)
