"""Data parallelism: which rows a process trains, and with whom it sums what it found about them."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class DataParallel:
    """This process's place among the data-parallel ranks.

    A data-parallel rank is one process, or all the processes that hold one copy of the model between them (tensor,
    pipeline or sequence parallel): they read and train the same rows. ``group`` holds one process of each data-parallel
    rank, this one among them; None stands for all processes.
    """

    rank: int
    size: int
    is_recorder: bool  # one process of each data-parallel rank records what was trained
    group: dist.ProcessGroup | None = None

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a host tensor over data-parallel ranks, in place; afterwards it is equal on all processes. A collective.

        A single data-parallel rank sends nothing.
        """
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)


def pure_data_parallel() -> DataParallel:
    """Make every process a data-parallel rank of its own."""
    return DataParallel(dist.get_rank(), dist.get_world_size(), is_recorder=True)


def adjacent_and_strided(size: int, timeout_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Split the processes into runs of ``size`` and return this one's run, and the group across runs.

    With size 2 the runs are (0, 1), (2, 3), ...; the groups across them (0, 2, 4, ...) and (1, 3, 5, ...). A
    collective; ``size`` divides the number of processes. Collectives of both groups time out after ``timeout_s``.
    """
    runs = [list(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    timeout = timedelta(seconds=timeout_s)
    adjacent, _ = dist.new_subgroups_by_enumeration(runs, timeout=timeout)
    strided, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*runs, strict=True)], timeout=timeout)
    return adjacent, strided
