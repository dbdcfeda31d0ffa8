"""One rank that computes the gradients of a batch under several options; started by test_sharding.py.

``python -m tests.contracts.trainer.workers.sharding MODEL OUT OPTIONS``: OPTIONS are the trainer's, by name, as JSON.
Of adapters also the weights that engines get after a step, as ``merged`` and as ``alone``.
"""

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig
from rl_async.messages import Version
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.weight_sync.buckets import as_adapters, numbered
from rl_async.weight_sync.reshard import Gathering, PointToPoint
from tests.contracts.backends.models import cell_rows, loss_of, micro_batches
from tests.support.weights import Received

BUCKET = 1 << 14


def gradients(backend: Fsdp2Backend) -> dict[str, Tensor]:
    """Of the test batch, summed over all ranks, by the names of the parameters."""
    batches = micro_batches(cell_rows(backend.data_parallel.rank, backend.data_parallel.size))
    backend.add_gradients(batches, loss_of(batches), frozenset({"entropy"}))
    named = backend.model.named_parameters()
    return {name: parameter.grad.full_tensor() for name, parameter in named if parameter.grad is not None}


def published(backend: Fsdp2Backend, lora: LoraConfig) -> dict[str, Tensor]:
    """After a step on the gradients: merged weights, and what an engine makes of adapters alone. On rank 0."""
    assert backend.optimizer is not None
    backend.optimizer.step()
    wire = PointToPoint(dist.HashStore(), device="cpu")
    gathering = Gathering(wire, dist.get_rank(), BUCKET, 60.0)
    merged, base, adapters = (
        gathering.buckets(backend.sharded_weights(what)) for what in ("merged", "base", "adapters")
    )
    if dist.get_rank() > 0:
        return {}
    ways = {"merged": merged, "alone": numbered([*base, *as_adapters(adapters, lora.scale)], Version(), "no")}
    return {f"{way}|{name}": t for way, sent in ways.items() for name, t in Received().take(sent).items()}


def main() -> None:
    model, out, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    found = {}
    for case, keys in options.items():
        backend = Fsdp2Backend(model, "float32", "cpu", msgspec.convert(keys, TrainerConfig))
        found |= {f"{case}|{name}": gradient for name, gradient in gradients(backend).items()}
        if backend.config is not None and backend.config.lora is not None:
            sent = published(backend, backend.config.lora)
            found |= {f"{case}, {name}": tensor for name, tensor in sent.items()}
    if dist.get_rank() == 0:
        save_file(found, out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
