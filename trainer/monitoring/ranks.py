"""Joins the trainer's process group at a rank's start, and names the ranks that were lost when it fails."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RanksLost
from rl_async.process.heartbeat import who_is_missing


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
    """Return whether a collective raised the error; gloo raises plain RuntimeErrors, known only by their text."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "pair closure" in str(error)


def start_process_group(config: RunConfig) -> tuple[str, dist.Store]:
    """Join the trainer's process group and seed this rank; return this rank's device and the ranks' store."""
    torch.set_num_threads(config.launcher.threads)
    cuda = config.model.device == "cuda" or (config.model.device == "auto" and torch.cuda.is_available())
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)
    backends = "cpu:gloo,cuda:nccl" if cuda else "gloo"  # counts and flags are reduced on the host with gloo
    timeout = timedelta(seconds=config.trainer.collective_timeout_s)
    store, rank, ranks = dist.HashStore(), 0, 1
    if "MASTER_PORT" in os.environ:  # without it this is a single rank started by hand
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(backends, store=store, rank=rank, world_size=ranks, timeout=timeout)
    random.seed(config.seed + rank)
    torch.manual_seed(config.seed + rank)
    if not cuda:
        return "cpu", store
    local = rank % torch.cuda.device_count()
    torch.cuda.set_device(local)
    dist.all_reduce(torch.zeros(1, device="cuda"))  # NCCL needs all ranks in the first exchange of a group
    return f"cuda:{local}", store
