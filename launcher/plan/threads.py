"""Divides a machine's cores among the processes that compute on them."""

import os
from pathlib import Path

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.memory import ModelSize

CGROUP = Path("/sys/fs/cgroup")
SMALL = 10_000_000  # parameters; the layers of a smaller model are not worth dividing


def cores(root: Path = CGROUP) -> float:
    """Return the number of cores that this process may use at once."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota = root / "cpu.max"
    if quota.is_file() and (words := quota.read_text().split())[0] != "max":
        return min(allowed, int(words[0]) / int(words[1]))
    return allowed


def with_threads(config: RunConfig, size: ModelSize | None, available: float, *, engine_ranks: int) -> RunConfig:
    """Fill in ``launcher.threads`` for ``available`` cores, unless it is set.

    Processes that compute at the same time share the cores: ranks of engines and of the trainer, or when they take
    turns (colocated), whichever are more. A model of less than ``SMALL`` parameters gets one thread.
    """
    if config.launcher.threads is not None:
        return config
    ranks = config.trainer.ranks
    together = max(engine_ranks, ranks) if config.mode == "colocated" else engine_ranks + ranks
    small = size is not None and size.parameters < SMALL
    threads = 1 if small else max(1, int(available) // together)
    return msgspec.structs.replace(config, launcher=msgspec.structs.replace(config.launcher, threads=threads))
