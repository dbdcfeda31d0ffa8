"""One rank that puts a backend through everything test_backend.py asks about, for one model after another.

``python -m tests.contracts.backends.worker SIZES OUT FOLDER...`` where SIZES is ``fsdp2`` or Megatron's, as JSON.
"""

import json
import math
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged
from rl_async.trainer.backend import Backend, Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.contracts.backends.models import STEPS, TRAINING, cell_rows, loss_of, micro_batches, whole_batch
from tests.support.weights import whole_weights

ENTROPY = frozenset({"entropy"})


def make(config: TrainerConfig, folder: Path) -> Backend:
    """The backend that the config names."""
    if config.backend == "fsdp2":
        return Fsdp2Backend(str(folder), "float32", "cpu", config)
    from rl_async.trainer.megatron.backend import MegatronBackend

    return MegatronBackend(str(folder), "float32", "cpu", config)


def exported(backend: Backend, stage: str) -> dict[str, Tensor]:
    """Copies of all weights, named after a stage of the test."""
    return {f"{stage}.{name}": tensor for name, tensor in whole_weights(backend).items()}


def step(backend: Backend) -> tuple[float, float]:
    """One step on this rank's rows; returns the loss over all ranks, and the norm."""
    batches = micro_batches(cell_rows(backend.data_parallel.rank, backend.data_parallel.size))
    loss, norm = backend.step(batches, loss_of(batches), ENTROPY)
    total = torch.tensor([loss], dtype=torch.float64)
    backend.data_parallel.all_reduce(total)
    return total.item(), norm


def diverge(backend: Backend) -> str:
    """A step in which the first data-parallel rank's last micro-batch has no finite loss; returns what was raised."""
    batches = micro_batches(cell_rows(backend.data_parallel.rank, backend.data_parallel.size))
    sound = loss_of(batches)

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        broken = backend.data_parallel.rank == 0 and number == len(batches) - 1
        return sound(number, outputs) * (math.nan if broken else 1.0)

    try:
        backend.step(batches, loss_fn, ENTROPY)
    except TrainingDiverged as error:
        return str(error)
    return ""


def examine(config: TrainerConfig, folder: Path, out: Path, rank: int) -> None:
    """Write down what the backend does with one model."""
    backend = make(config, folder)
    found = exported(backend, "imported")
    (whole,) = whole_batch()
    outputs = backend.forward(whole, frozenset({"entropy", "sum_squares"}))
    for name in ("logprobs", "entropy", "sum_squares"):
        part = getattr(outputs, name)
        assert part is not None
        found[f"forward.{name}"] = part
    steps = [step(backend) for _ in range(STEPS)]
    found |= exported(backend, "trained")
    said = diverge(backend)
    found |= exported(backend, "diverged")

    saved = out / f"{folder.name}-checkpoint"
    if rank == 0:
        saved.mkdir()
    dist.barrier()
    backend.save(saved)
    dist.barrier()
    backend.sleep()
    backend.wake()
    continued = step(backend)
    found |= exported(backend, "continued")
    resumed = make(config, folder)
    resumed.load(saved)
    found |= exported(resumed, "loaded")
    resumed_step = step(resumed)
    found |= exported(resumed, "resumed")
    if config.tensor_parallel > 1:  # the other backend goes on from the same files
        other = Fsdp2Backend(str(folder), "float32", "cpu", TRAINING)
        other.load(saved)
        step(other)
        found |= exported(other, "adopted")
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out / f"{folder.name}-{rank}.safetensors")
    told = {"steps": steps, "diverged": said, "continued": continued, "resumed": resumed_step}
    (out / f"{folder.name}-{rank}.json").write_text(json.dumps(told))


def main() -> None:
    sizes, out, folders = json.loads(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = msgspec.structs.replace(TRAINING, **sizes)
    for folder in folders:
        examine(config, folder, out, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
