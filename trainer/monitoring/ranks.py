"""Joins the trainer's process group at a rank's start, and names the ranks that were lost when it fails."""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rl_async.accelerators import backends_of
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RanksLost, UserError
from rl_async.process.private_folder import RENDEZVOUS
from rl_async.process.run_files import who_is_missing
from rl_async.torch_shared import pick_device
from rl_async.weight_sync.transports.rendezvous import (
    bind_groups,
    file_store,
    joined_store,
    listening_store,
    own_address,
)

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
        if not is_collective_failure(error):
            raise
        rank = os.environ.get("RANK", "0")
        missing = who_is_missing(folder, int(rank), int(os.environ.get("WORLD_SIZE", "1")))
        hint = "one died, or did not answer within trainer.collective_timeout_s"
        raise RanksLost(f"rank {rank} lost the other ranks ({hint}): {missing}: {error}") from error


def is_collective_failure(error: RuntimeError) -> bool:
    """Return whether a collective raised the error; gloo and FileStore raise RuntimeErrors known only by their text."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in COLLECTIVE_FAILURES)


def start_process_group(config: RunConfig) -> tuple[str, dist.Store]:
    """Join the trainer's process group and seed this rank; return this rank's device and the ranks' store."""
    if config.launcher.threads is not None:  # else as the launcher's OMP_NUM_THREADS says
        torch.set_num_threads(config.launcher.threads)
    device = pick_device(config.model.device)
    rank, ranks = int(os.environ.setdefault("RANK", "0")), int(os.environ.setdefault("WORLD_SIZE", "1"))
    timeout_s = config.trainer.collective_timeout_s
    store: dist.Store = dist.HashStore()
    if "MASTER_PORT" in os.environ:  # without it this is a single rank started by hand
        store = _shared_store(rank, ranks, timeout_s)
    else:
        bind_groups("127.0.0.1", devices=False)  # which may carry the weights to engines elsewhere
    timeout = timedelta(seconds=timeout_s)
    # counts and flags are reduced on the host
    dist.init_process_group(backends_of(device), store=store, rank=rank, world_size=ranks, timeout=timeout)
    random.seed(config.seed + rank)
    torch.manual_seed(config.seed + rank)
    if device == "cpu":
        return "cpu", store
    local = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(local)
    dist.all_reduce(torch.zeros(1, device=device))  # NCCL needs all ranks in the first exchange of a group
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
        if error.errno == errno.EADDRINUSE:  # for the moment
            raise RanksLost(f"rank 0 cannot listen on {host}:{port} (MASTER_PORT): {error}") from error
        raise UserError(f"MASTER_ADDR={host}: rank 0 cannot listen there ({error}); give its own address") from error
