"""One rank of a backend that computes in bfloat16; started by test_bfloat16.py, which compares backends.

``python -m tests.contracts.backends.bfloat16_worker SIZES MODEL OUT`` with Megatron's sizes or FSDP2's, as JSON.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl_async.trainer.backend import Backend
from rl_async.trainer.export import WHOLE
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import MODEL_FOLDER
from rl_async.trainer.pretrained import StoredWeights
from tests.contracts.backends.models import TRAINING, whole_batch
from tests.contracts.backends.worker import exported, step
from tests.support.weights import whole_weights

RATE = 1e-6  # far below the last bit of a bfloat16 weight of 0.1, which is 5e-4
STEPS = 3


def make(sizes: dict[str, object], folder: str) -> Backend:
    config = msgspec.structs.replace(TRAINING, learning_rate=RATE, weight_decay=0.0, **sizes)
    if config.backend == "fsdp2":
        return Fsdp2Backend(folder, "bfloat16", "cpu", config)
    from rl_async.trainer.megatron.backend import MegatronBackend

    with reads_of_stored_weights() as reads:
        backend = MegatronBackend(folder, "bfloat16", "cpu", config)
    assert reads and set(reads.values()) == {1}, "weights and their masters are made of one reading"
    for chunk in backend._chunks:
        for parameter in chunk.parameters():
            assert (parameter.dtype, parameter.main_grad.dtype) == (torch.bfloat16, torch.float32)
    return backend


@contextmanager
def reads_of_stored_weights() -> Iterator[Counter[str]]:
    """Count how often each tensor of a model's folder is read meanwhile."""
    counts = Counter[str]()
    read = StoredWeights.read

    def counted(self: StoredWeights, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        counts[name] += 1
        return read(self, name, part)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoredWeights, "read", counted)
        yield counts


def sleep(backend: Backend) -> None:
    """Sleep and wake, with a look at what is released: all but the weights, of which engines may still ask."""
    weights = whole_weights(backend)
    backend.sleep()
    for chunk in getattr(backend, "_chunks", ()):
        for parameter in chunk.parameters():
            assert parameter.main_grad.untyped_storage().size() == 0 < parameter.untyped_storage().size()
    for name, tensor in whole_weights(backend).items():
        assert tensor.equal(weights[name]), name
    backend.wake()


class Elsewhere(TorchFunctionMode):
    """A second device, which this machine lacks: what is moved ``to`` it is copied, and listed."""

    def __init__(self) -> None:
        self.holds: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.to or tuple(args[1:]) != ("elsewhere",):
            return func(*args, **(kwargs or {}))
        self.holds.append(args[0].clone())
        return self.holds[-1]


def leave(backend: Backend) -> None:
    """Move the optimizer elsewhere: masters and moments all are there, and weights are not."""
    optimizer, weights = backend._optimizer, whole_weights(backend)  # type: ignore[attr-defined]
    with Elsewhere() as elsewhere:
        optimizer.move("elsewhere")
    there = {tensor.data_ptr() for tensor in elsewhere.holds}
    masters = [master for group in optimizer._optimizer.param_groups for master in group["params"]]
    states = [state for owner in optimizer._optimizer.chained_optimizers for state in owner.optimizer.state.values()]
    moments = [part for state in states for part in state.values() if part.dim()]
    assert len(moments) == 2 * len(masters) > 0
    assert {tensor.data_ptr() for tensor in (*masters, *moments)} == there
    assert all(tensor.dtype == torch.float32 for tensor in elsewhere.holds)
    for name, tensor in whole_weights(backend).items():
        assert tensor.equal(weights[name]), name


def main() -> None:
    sizes, folder, out = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    backend, rank = make(sizes, folder), dist.get_rank()
    found = exported(backend, "imported")
    logprobs = backend.forward(*whole_batch()).logprobs
    assert logprobs is not None
    told = [step(backend) for _ in range(STEPS)]
    saved = out / "checkpoint"
    saved.mkdir(exist_ok=True)
    dist.barrier()
    backend.save(saved)
    again = make(sizes, folder)
    again.load(saved)
    found |= exported(again, "loaded") | exported(backend, "trained")
    sleep(again)
    if sizes["backend"] == "megatron":
        leave(again)
    assert step(again) == step(backend)
    for name, tensor in whole_weights(backend).items():
        assert tensor.equal(whole_weights(again)[name]), name
    if rank == 0:
        masters = {f"masters.{name}": tensor for name, tensor in load_file(saved / MODEL_FOLDER / WHOLE).items()}
        save_file(found | masters | {"logprobs": logprobs.contiguous()}, out / "found.safetensors")
        (out / "steps.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
