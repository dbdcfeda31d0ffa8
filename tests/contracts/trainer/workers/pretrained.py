"""One rank that loads models and compares them with Transformers' own loading; started by test_pretrained.py.

``python -m tests.contracts.trainer.workers.pretrained FOLDER HEAD ...``: folders of models, and the head of each.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM

from rl_async.trainer import model
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.pretrained import StoredWeights

READ: list[int] = []


# Their short convolutions are tensors of their own in files and parts of one here, and a rank reads whole ones.
STORED_APART = {"kimi_linear", "olmo_hybrid"}


class Counted(StoredWeights):
    """Counts the numbers that it reads."""

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        tensor = super().read(name, part)
        READ.append(tensor.numel())
        return tensor


def compare(folder: str, head: Any) -> None:
    READ.clear()
    got = Fsdp2Backend(folder, "float32", "cpu", None, head).model.lm
    kind: Any = AutoModel if head == "value" else AutoModelForCausalLM
    expected = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    parameters, plain = dict(got.named_parameters()), dict(expected.named_parameters())
    assert parameters.keys() == plain.keys() and not got.training
    for name, parameter in plain.items():
        whole = parameters[name].full_tensor()
        assert whole.dtype == torch.float32 and whole.equal(parameter), f"{folder}: {name}"
    buffers, computed = dict(got.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == computed.keys()
    for name, buffer in computed.items():
        assert buffers[name].dtype == buffer.dtype and buffers[name].equal(buffer), f"{folder}: {name}"
    stored = set(got.state_dict()) & buffers.keys()
    sharded = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor)]
    held = sum(parameter.to_local().numel() for parameter in sharded)
    # Of an expert whose rows are divided a rank reads all, if files have it by itself.
    divided = [parameter for parameter in sharded if any(placement.is_shard(1) for placement in parameter.placements)]
    more = sum(parameter.numel() - parameter.to_local().numel() for parameter in divided)
    needed = held + sum(buffers[name].numel() for name in stored)
    if got.config.model_type in STORED_APART:
        assert needed <= sum(READ) < 1.1 * needed, f"{folder}: read {sum(READ)} of {held}"
    else:
        assert sum(READ) in (needed, needed + more), f"{folder}: read {sum(READ)} of {held}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model.StoredWeights = Counted  # type: ignore[misc]
    for path, wanted in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        compare(path, wanted)
    dist.destroy_process_group()
