"""One of two ranks on which each backend continues from the other's checkpoint; started by test_interchange.py.

``python -m tests.contracts.backends.interchange_worker SIZES MODEL OUT`` with Megatron's sizes, as JSON.
"""

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.trainer.backend import Backend
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.contracts.backends.models import ROUNDED, TRAINING, assert_alike
from tests.contracts.backends.worker import make, step
from tests.support.weights import whole_weights


def saved(backend: Backend, folder: Path) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)
    dist.barrier()
    return folder


def compare(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.equal(two[name]), name


def main() -> None:
    sizes, model, out = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    config = msgspec.structs.replace(TRAINING, backend="megatron", **sizes)
    fsdp2 = Fsdp2Backend(str(model), "float32", "cpu", TRAINING)
    untouched = make(config, model)
    untouched.load(saved(fsdp2, out / "first"))  # has no moments yet
    compare(whole_weights(untouched), whole_weights(fsdp2))
    for _ in range(2):
        step(fsdp2)
    megatron = make(config, model)
    megatron.load(saved(fsdp2, out / "fsdp2"))
    compare(whole_weights(megatron), whole_weights(fsdp2))
    norm, other = step(megatron)[1], step(fsdp2)[1]
    assert abs(norm - other) <= ROUNDED * other
    assert_alike(whole_weights(megatron), whole_weights(fsdp2), steps=1)

    again = Fsdp2Backend(str(model), "float32", "cpu", TRAINING)
    again.load(saved(megatron, out / "megatron"))
    compare(whole_weights(again), whole_weights(megatron))
    before = whole_weights(again)
    step(again)
    step(megatron)
    assert_alike(whole_weights(again), whole_weights(megatron), steps=1)
    moved = max((tensor - before[name]).abs().max().item() for name, tensor in whole_weights(again).items())
    assert moved > 1e-4, "a step moves weights further than the backends are apart"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
