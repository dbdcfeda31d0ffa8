"""The trainer's ranks: join their process group, share out rows, agree to stop, and name ranks that were lost.

A data-parallel rank trains rows of its own, and may be several processes. SIGTERM and Ctrl-C ask to end early: between
two steps all ranks agree, save, and exit with 128 + the signal's number, so that schedulers do not take the run for
done. SIGTERM may come several times, from a supervisor and from a scheduler that signals every process, and is one
request.
"""

import errno
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.accelerators import backends_of
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL, RanksLost, UserError
from rl_async.process.private_folder import RENDEZVOUS
from rl_async.process.role import heeded
from rl_async.process.run_files import who_is_missing
from rl_async.torch_shared import pick_device
from rl_async.weight_sync.process_groups import bind_groups, file_store, joined_store, listening_store, own_address

COLLECTIVE_FAILURES = ("gloo", "pair closure", "Wait timeout", "Timeout waiting for key")


@contextmanager
def ranks_joined(config: RunConfig, folder: Path) -> Iterator[tuple[str, dist.Store]]:
    """Belong to the trainer's process group inside the block; yields this rank's device and the ranks' store.

    Raises RanksLost, naming the ranks that did not arrive, if a collective in the block fails.
    """
    try:
        device, store = start_process_group(config)
        try:
            yield device, store
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        # Gloo and FileStore raise RuntimeErrors that are known only by their text.
        if not isinstance(error, dist.DistError) and not any(text in str(error) for text in COLLECTIVE_FAILURES):
            raise
        rank = os.environ.get("RANK", "0")
        missing = who_is_missing(folder, int(rank), int(os.environ.get("WORLD_SIZE", "1")))
        hint = "one died, or did not answer within trainer.collective_timeout_s"
        raise RanksLost(f"rank {rank} lost the other ranks ({hint}): {missing}: {error}") from error


def start_process_group(config: RunConfig) -> tuple[str, dist.Store]:
    """Join the trainer's process group and seed this rank; return this rank's device and the ranks' store."""
    # By default the launcher's OMP_NUM_THREADS applies.
    if config.launcher.threads is not None:
        torch.set_num_threads(config.launcher.threads)
    device = pick_device(config.model.device)
    rank, ranks = int(os.environ.setdefault("RANK", "0")), int(os.environ.setdefault("WORLD_SIZE", "1"))
    timeout_s = config.trainer.collective_timeout_s
    store: dist.Store = dist.HashStore()
    if "MASTER_PORT" in os.environ:
        store = _shared_store(rank, ranks, timeout_s)
    else:
        # This is a single rank started by hand. Its devices may carry the weights to engines elsewhere.
        bind_groups("127.0.0.1", devices=False)
    timeout = timedelta(seconds=timeout_s)
    # Counts and flags are reduced on the host.
    dist.init_process_group(backends_of(device), store=store, rank=rank, world_size=ranks, timeout=timeout)
    random.seed(config.seed + rank)
    torch.manual_seed(config.seed + rank)
    if device == "cpu":
        return "cpu", store
    local = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(local)
    # NCCL needs all ranks in the first exchange of a group.
    dist.all_reduce(torch.zeros(1, device=device))
    return f"{device}:{local}", store


def as_rank_0(decision: bool) -> bool:
    """Return rank 0's decision on every rank. A collective."""
    decided = torch.tensor([decision])
    dist.broadcast(decided, 0)
    return bool(decided.item())


def _shared_store(rank: int, ranks: int, timeout_s: float) -> dist.Store:
    """Meet the other ranks at RL_ASYNC_RENDEZVOUS, a file of the launcher for ranks on its machine; without one, at
    MASTER_ADDR and MASTER_PORT, where rank 0 opens a store. Return the store.

    Raises UserError if rank 0 cannot listen there.
    """
    host, port = os.environ.setdefault("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
    bind_groups(own_address(host, port))
    if file := os.environ.get(RENDEZVOUS):
        return file_store(Path(file), rank, ranks, timeout_s)
    if rank > 0:
        return joined_store(host, port, timeout_s, ranks)
    try:
        return listening_store(host, port, timeout_s, ranks)
    except OSError as error:
        # An address in use may become free, so this error is one that starting again mends.
        if error.errno == errno.EADDRINUSE:
            raise RanksLost(f"rank 0 cannot listen on {host}:{port} (MASTER_PORT): {error}") from error
        raise UserError(f"MASTER_ADDR={host}: rank 0 cannot listen there ({error}); give its own address") from error


@dataclass(frozen=True)
class DataParallel:
    """This process's place among the data-parallel ranks.

    A data-parallel rank is one process, or all the processes that hold one copy of the model between them (tensor,
    pipeline or sequence parallel): they read and train the same rows. ``group`` holds one process of each data-parallel
    rank, this one among them; None stands for all processes. One process of each data-parallel rank ``is_recorder``
    and records its rows.
    """

    rank: int
    size: int
    is_recorder: bool
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


class StopRequest:
    """Ends the process at once while there is nothing to save, else at the end of the step.

    A Ctrl-C after a request ends it at once.
    """

    def __init__(self) -> None:
        self.requested = False
        # The exit code, also when another rank received the signal.
        self.code = EXIT_SIGNAL + signal.SIGTERM
        self._training = False

    def listen(self) -> None:
        """Install the handlers of SIGTERM and SIGINT, unless ignored; call it in the main thread."""
        for number in heeded(signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait_for_step(self, training: bool) -> None:
        """Choose whether a request waits for the end of the step from now on."""
        self._training = training

    def agreed(self) -> bool:
        """Return whether any rank received a request. A collective, and a barrier."""
        requested = torch.tensor([self.requested], dtype=torch.int64)
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested.item())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.requested and number == signal.SIGINT
        self.code = EXIT_SIGNAL + number
        # Set before the exit below too: Python drops an exception of a handler in the callback of a weak reference.
        self.requested = True
        if again or not self._training:
            sys.exit(self.code)
