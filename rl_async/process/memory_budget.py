"""Who may have how much of a device's memory, in which phase of a step: ``RUN/memory.json``.

The launcher plans it (``launcher/plan/budget.py``) and sets it on the engines. Trainer ranks compare what they measure.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.files import replace_file

FILE = "memory.json"

Stage = Literal["start", "rollout", "train", "gather", "load"]
Part = Literal[
    "runtime",
    "weights",
    "reference",
    "optimizer",
    "gradients",
    "activations",
    "batch",
    "KV cache",
    "bucket",
    "published",
]
Parts = Mapping[Part, int]  # bytes

TRAINER_REMEDY: Mapping[Part, str] = {
    "runtime": "use fewer trainer.ranks on this device",
    "weights": "raise trainer.ranks, over which they are sharded, or set trainer.cpu_offload",
    "reference": "raise trainer.ranks, over which it is sharded, or set algorithm.kl.coef=0",
    "optimizer": "raise trainer.ranks, over which it is sharded, or set trainer.cpu_offload",
    "gradients": "raise trainer.ranks, or train fewer weights with trainer.lora",
    "activations": "lower trainer.max_tokens_per_microbatch, or set trainer.activation_checkpointing",
    "batch": "lower data.train_batch_groups or rollout.max_model_len",
    "bucket": "lower weight_sync.bucket_bytes",
    "published": "set model.dtype=bfloat16; on a GPU also set weight_sync.transport=disk, which has it on the host, "
    "or raise trainer.ranks, over which it is divided without weight_sync.delta, weight_sync.adapters and SGLang",
}
ENGINE_REMEDY: Mapping[Part, str] = {
    "runtime": "use fewer rollout.engines on this device",
    "weights": "raise rollout.tensor_parallel, over which they are divided, or set model.dtype=bfloat16",
    "activations": "lower rollout.max_batch_size",
    "KV cache": "lower rollout.cache_bytes, rollout.max_batch_size or rollout.max_model_len",
    "bucket": "lower weight_sync.bucket_bytes",
    "published": "leave out weight_sync.delta, weight_sync.staged and weight_sync.adapters",
}


class Holder(msgspec.Struct, frozen=True):
    """What one process, or one rank of an engine, may have on a device in each stage."""

    process: str
    role: Literal["trainer", "engine"]
    stages: dict[Stage, dict[Part, int]]

    def total(self, stage: Stage) -> int:
        """Return the bytes of all its parts."""
        return sum(self.stages[stage].values())

    def remedy(self, stage: Stage) -> str:
        """Return what to do if it needs less in this stage: by its largest part that is not the runtime's."""
        parts = self.stages[stage]
        part = max(parts, key=lambda part: (part != "runtime") * parts[part])
        remedies = TRAINER_REMEDY if self.role == "trainer" else ENGINE_REMEDY
        return f"most of it is for {part}: {remedies[part]}"


class DeviceBudget(msgspec.Struct, frozen=True):
    """The holders of one device's memory. ``capacity``: what it has, in bytes; None: unknown. ``limit``: the share of
    that with which the run plans."""

    device: str
    capacity: int | None
    limit: int | None
    holders: tuple[Holder, ...]

    def total(self, stage: Stage) -> int:
        """Return the bytes that all holders may have together."""
        return sum(holder.total(stage) for holder in self.holders)


class MemoryBudget(msgspec.Struct, frozen=True):
    """The budgets of all devices of a run; none if the model's size is unknown."""

    devices: tuple[DeviceBudget, ...] = ()

    def of(self, process: str) -> tuple[DeviceBudget, Holder] | None:
        """Return the budget of a process, and its device's; None if there is none."""
        found = ((device, holder) for device in self.devices for holder in device.holders)
        return next(((device, holder) for device, holder in found if holder.process == process), None)


def write_budget(run: Path, budget: MemoryBudget) -> None:
    """Write the budget, in place of that of an earlier start."""
    replace_file(run / FILE, msgspec.json.encode(budget) + b"\n")


def read_budget(run: Path) -> MemoryBudget:
    """Read the budget of the last start; one without devices if the run was started by hand."""
    file = run / FILE
    return msgspec.json.decode(file.read_bytes(), type=MemoryBudget) if file.is_file() else MemoryBudget()
