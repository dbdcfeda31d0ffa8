"""One model in several layouts of both trainer backends: how far apart are the numbers that they train with?

FSDP2 on one rank, Megatron-Core with tensor, pipeline and data parallelism of two, on the same rows: log-probabilities
before and after each of some steps, the loss, the gradient norm (relative) and the weights at the end, in float32. As
tests/contracts/backends/test_backend.py measures them, with the demo's model.

    python -m benchmarks.trainer --only megatron_max_diff
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.processes.ranks import run_ranks
from benchmarks.processes.trainer_arms import long_tailed, micro_batches, rows_of, save_model
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.backend import Backend, Outputs
from rl_async.weight_sync.buckets import unpack
from rl_async.weight_sync.reshard import Gathering, PointToPoint

INSTALL = "pip install 'rl-async[megatron]'"
MEGATRON: dict[str, Any] = {"backend": "megatron"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP2 x1": (1, {"backend": "fsdp2"}),
    "Megatron TP2": (2, MEGATRON | {"tensor_parallel": 2}),
    "Megatron PP2": (2, MEGATRON | {"pipeline_parallel": 2}),
    "Megatron DP2": (2, MEGATRON),
}
STEPS, ROWS, LONGEST, TOGETHER = 3, 16, 128, 4
# AdamW divides by the root of the squared gradient, which magnifies the last bits of tiny gradients to a part of this.
LEARNING_RATE = 2e-4
DEADLINE_S = 300


def megatron_max_diff() -> float | None:
    """The largest difference between any two layouts; None if Megatron-Core is not installed."""
    if importlib.util.find_spec("megatron") is None:
        print(f"  Megatron-Core is not here; install it with {INSTALL}")
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        found = {layout: numbers_of(folder, *sizes) for layout, sizes in LAYOUTS.items()}
    parts = {part: max(furthest(a, b, part) for a in found.values() for b in found.values()) for part in COMPARED}
    print("  " + ", ".join(f"{part} {value:.2g}" for part, value in parts.items()))
    moved = found["FSDP2 x1"]
    if (moved[f"logprobs.{STEPS}"] - moved["logprobs.0"]).abs().max() < 1e-3:
        sys.exit("the steps changed nothing, so nothing was compared")
    return max(parts.values())


COMPARED = ("logprobs", "loss", "norm", "weights")


def furthest(one: dict[str, Tensor], other: dict[str, Tensor], part: str) -> float:
    """The largest difference of any number of a part; of norms as a share."""
    assert one.keys() == other.keys()
    names = [name for name in one if name.startswith(f"{part}.")]
    differences = [(one[name] - other[name]).abs() for name in names]
    if part == "norm":
        differences = [difference / one[name] for name, difference in zip(names, differences, strict=True)]
    return max(difference.max().item() for difference in differences)


def numbers_of(folder: Path, ranks: int, sizes: dict[str, Any]) -> dict[str, Tensor]:
    """What the first rank of a layout wrote down."""
    out = folder / "numbers.safetensors"
    command = [sys.executable, "-m", "benchmarks.processes.backend_ranks", str(folder / "model"), str(out)]
    run_ranks([*command, json.dumps(sizes)], ranks, timeout_s=DEADLINE_S)
    return load_file(out)


def step(backend: Backend, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """One policy gradient step on this rank's rows; the loss over all ranks and the gradient's norm."""
    data_parallel, rows = backend.data_parallel, rows_of(lengths)
    mine = list(range(ROWS))[data_parallel.rank :: data_parallel.size]
    parts = [mine[at : at + TOGETHER] for at in range(0, len(mine), TOGETHER)]
    batches, count = micro_batches(rows, parts), sum(row.header().sampled for row in rows)

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        advantages = torch.tensor([(-1.0) ** row for row in parts[number]])[:, None]
        return torch.where(batches[number].mask, -advantages * outputs.logprobs, 0.0).sum() / count

    loss, norm = backend.step(batches, loss_fn)
    total = torch.tensor([loss], dtype=torch.float64)
    data_parallel.all_reduce(total)
    return total, torch.tensor([norm], dtype=torch.float64)


def rank_process(model: str, out: str, sizes: str) -> None:
    """Train as one rank of a layout; rank 0 writes outputs and weights to the file ``out``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = TrainerConfig(learning_rate=LEARNING_RATE, minibatches=1, steps=10, **json.loads(sizes))
    config = RunConfig(model=ModelConfig(model, "float32", device="cpu"), data=DataConfig(""), trainer=trainer)
    backend = build_models(config, "cpu").policy
    lengths = [min(length, LONGEST) for length in long_tailed(ROWS)]
    (whole,) = micro_batches(rows_of(lengths), [range(ROWS)])
    found: dict[str, Tensor] = {}
    for number in range(STEPS + 1):
        logprobs = backend.forward(whole).logprobs
        assert logprobs is not None
        found[f"logprobs.{number}"] = torch.where(whole.mask, logprobs, 0.0)
        if number < STEPS:
            found[f"loss.{number}"], found[f"norm.{number}"] = step(backend, lengths)
    gathering = Gathering(PointToPoint(dist.HashStore()), dist.get_rank(), 1 << 30, DEADLINE_S)
    for bucket in gathering.buckets(backend.sharded_weights()):
        found |= {f"weights.{piece.name}": piece.data.view(piece.shape) for piece in unpack(bucket.data, bucket.info)}
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_process(*sys.argv[1:])
