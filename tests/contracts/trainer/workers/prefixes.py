"""One of two FSDP2 ranks that compute rows with and without shared prefixes; started by test_sharding.py.

``python -m tests.contracts.trainer.workers.prefixes MODEL OUT OPTIONS``: OPTIONS are the trainer's, by name, as JSON.
Rank 0 writes how far the gradients are from float64, as multiples of what rounding explains, and how large they are.
"""

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors
from tests.support.batches import loss_of, shared_rows
from tests.support.rounding import excess, in_float64


def gradients(backend: Fsdp2Backend, batch: Tensors) -> dict[str, Tensor]:
    """Summed over the ranks, whose losses differ, by the names of the parameters."""
    loss = loss_of(backend.model.outputs(batch, frozenset({"entropy", "sum_squares"})), batch.lengths)
    (loss * (1 + dist.get_rank())).backward()
    named = backend.model.named_parameters()
    found = {name: parameter.grad.full_tensor() for name, parameter in named if parameter.grad is not None}
    backend.model.zero_grad()
    return found


def main() -> None:
    model, out, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    found = {}
    for case, keys in options.items():
        backend = Fsdp2Backend(model, "float32", "cpu", msgspec.convert(keys, TrainerConfig))
        assert backend.row_cost.shares_prefixes
        batch = shared_rows(backend.hf_config.vocab_size)
        assert batch.tree is not None
        together, alone = (gradients(backend, x) for x in (batch, msgspec.structs.replace(batch, tree=None)))
        assert together.keys() == alone.keys()
        # Without checkpointing, which would compute again outside the mode.
        plainly = msgspec.convert(keys | {"activation_checkpointing": False}, TrainerConfig)
        exactly = Fsdp2Backend(model, "float32", "cpu", plainly)
        exactly.model.double()
        with in_float64():
            exact = gradients(exactly, msgspec.structs.replace(batch, tree=None))
        found[case] = {
            "excess": excess(together, alone, exact, int(batch.lengths.sum())),
            "size": max(gradient.abs().max().item() for gradient in alone.values()),
        }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
