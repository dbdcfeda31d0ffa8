"""Which rows a rank trains, and with whom it adds numbers up."""

from dataclasses import dataclass
from datetime import timedelta

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


def neighbours(size: int, timeout_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two groups of this rank's: ``size`` neighbours, as ranks 2 and 3 are, and those in its place among theirs, as
    ranks 0, 2 and 4 are. A collective; ``size`` divides the number of ranks. Their collectives wait ``timeout_s``.
    """
    rows = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    timeout = timedelta(seconds=timeout_s)
    beside, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)
    across, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*rows, strict=True)], timeout=timeout)
    return beside, across


def lone_ranks() -> Cell:
    """Every rank is a cell: plain data parallelism."""
    return Cell(dist.get_rank(), dist.get_world_size(), is_recorder=True)
