"""Atomic checkpoints: a folder is complete or not there. ``step-000010`` holds the state after 10 completed steps.

model/               Hugging Face folder (float32 master weights), usable by any other tool
optimizer.safetensors
value_head.safetensors     of a critic that shares the policy's backbone
critic/              the same three of a critic with a model of its own
random-rankN.safetensors   torch's random state
queue.msgpack        what the queue needs to admit unfinished work again
state.json           step, lineage and the KL's coefficient
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rl_async.configs.schema import RunConfig
from rl_async.trainer.backend import Backend

log = logging.getLogger("rl_async.checkpoint")

PREFIX = "step-"


class CheckpointState(msgspec.Struct, frozen=True):
    """``step`` completed steps, trained in ``lineage``; ``kl_coef`` is where the controller had got to."""

    step: int
    lineage: int
    kl_coef: float


class CheckpointSchedule:
    """When to write one. Every rank keeps its own and comes to the same answers, from the headers of whole batches.

    The queue holds the payloads of trained steps until a checkpoint makes going back to them pointless. Were they to
    fill its budget, it would admit too few groups to keep the engines busy; so they may take half of it.
    """

    def __init__(self, config: RunConfig) -> None:
        self._every, self._steps = config.trainer.checkpoint_every, config.trainer.steps
        self._most_bytes = config.queue.max_bytes // 2
        self._unsaved_bytes = 0

    def is_due(self, completed: int, batch_bytes: int) -> bool:
        """Call once after each step; ``batch_bytes``: payloads of the batch it trained. True asks for a checkpoint."""
        self._unsaved_bytes += batch_bytes
        planned = completed == self._steps or (self._every > 0 and completed % self._every == 0)
        full = self._unsaved_bytes >= self._most_bytes
        if not planned and not full:
            return False
        if not planned:
            log.warning(
                "checkpoint after step %d, out of turn: the queue holds %d bytes trained since the last one, half of "
                "queue.max_bytes; raise that or lower trainer.checkpoint_every",
                completed,
                self._unsaved_bytes,
            )
        self._unsaved_bytes = 0
        return True


def save_checkpoint(
    root: Path, backends: Mapping[str, Backend], state: CheckpointState, snapshot: bytes, keep: int
) -> Path:
    """Write the checkpoint of ``state.step`` and delete all but the newest ``keep``. A collective.

    ``backends`` is by folder within the checkpoint.
    Everything is written to a hidden folder, forced to disk, and then renamed, so a reader never sees a part of it.
    """
    final = root / f"{PREFIX}{state.step:06d}"
    temporary = root / f".{final.name}.tmp"
    rank0 = dist.get_rank() == 0
    if rank0:
        shutil.rmtree(temporary, ignore_errors=True)
        for name in backends:
            (temporary / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    for name, backend in backends.items():
        backend.save(temporary / name)
    save_file({"torch": torch.get_rng_state()}, temporary / f"random-rank{dist.get_rank()}.safetensors")
    dist.barrier()
    if rank0:
        (temporary / "queue.msgpack").write_bytes(snapshot)
        (temporary / "state.json").write_bytes(msgspec.json.encode(state))
        _force_to_disk(temporary)
        shutil.rmtree(final, ignore_errors=True)  # only after a resume, from the abandoned lineage
        temporary.rename(final)
        _fsync(root)
        for old in list_checkpoints(root)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in root.glob(f"{PREFIX}*") if (path / "state.json").is_file())


def load_checkpoint(folder: Path, backends: Mapping[str, Backend]) -> tuple[CheckpointState, bytes]:
    """Load models, optimizers and random state; returns the state and the queue's snapshot. A collective.

    The random state is restored only on as many ranks as wrote one.
    """
    for name, backend in backends.items():
        backend.load(folder / name)
    random = folder / f"random-rank{dist.get_rank()}.safetensors"
    if random.is_file():
        torch.set_rng_state(load_file(random)["torch"])
    state = msgspec.json.decode((folder / "state.json").read_bytes(), type=CheckpointState)
    return state, (folder / "queue.msgpack").read_bytes()


def _force_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
