"""One rank that takes twenty steps of Muon with drawn gradients; started by test_muon_ranks.py."""

import json
import sys
import zlib
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.fsdp2 import Fsdp2Backend

STEPS = 20
TRAINING = {"optimizer": "muon", "learning_rate": 1e-2, "weight_decay": 0.1}


def gradient_of(step: int, name: str, shape: torch.Size) -> torch.Tensor:
    """The same for any number of ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + step))


def main() -> None:
    model, out, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    backend = Fsdp2Backend(model, "float32", "cpu", msgspec.convert(TRAINING | options, TrainerConfig))
    assert backend.optimizer is not None
    first = {name: parameter.full_tensor().detach().clone() for name, parameter in backend.model.named_parameters()}
    for step in range(STEPS):
        for name, parameter in backend.model.named_parameters():
            gradient = gradient_of(step, name, parameter.shape)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        backend.optimizer.step()
        backend.optimizer.zero_grad()
    found = {f"first|{name}": tensor for name, tensor in first.items()}
    for name, parameter in backend.model.named_parameters():
        found[f"last|{name}"] = parameter.full_tensor().detach()
        for key, moment in backend.optimizer.state[parameter].items():
            if isinstance(moment, DTensor):
                found[f"{key}|{name}"] = moment.full_tensor()
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
