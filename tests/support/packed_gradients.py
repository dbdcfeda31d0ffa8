"""Gradients of packed rows against those of padded ones, for every model whose layers carry a state.

``python -m tests.support.packed_gradients`` prints the largest difference from padded rows in float64, over all weights
and as a share of the largest gradient: with rows packed, and with their shared prefixes computed once, in float64, and
the same and padded rows in float32. The padded ones are of Transformers' own model.
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.model_files import MIXERS
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors
from tests.support.batches import shared_rows
from tests.support.families import VOCAB, saved
from tests.support.rounding import in_float64, to_float64

Gradients = dict[str, Tensor]


class Found(NamedTuple):
    """Gradients of one loss: of padded rows, of packed ones, and of packed ones with shared prefixes."""

    padded: Gradients
    packed: Gradients
    shared: Gradients


def gradients(kind: str, dtype: torch.dtype) -> Found:
    """Compute them all with the weights and in the type given, which float64 widens."""
    exactly = dtype == torch.float64
    batch = shared_rows(VOCAB)
    with tempfile.TemporaryDirectory() as folder:
        plain = saved(kind, Path(folder))
        backend = Fsdp2Backend(folder, "float32", "cpu", TrainerConfig())
    assert backend.model.packs and backend.model.shares_prefixes
    if exactly:
        to_float64(plain), to_float64(backend.model.lm)
    with in_float64() if exactly else nullcontext():
        apart = msgspec.structs.replace(batch, tree=None)
        found = Found(_padded(plain, batch), _packed(backend, apart), _packed(backend, batch))
    assert found.packed.keys() == found.shared.keys() == found.padded.keys()
    return found


def largest_difference(found: Gradients, expected: Gradients) -> float:
    """The largest over all weights, as a share of the largest gradient."""
    largest = max(part.abs().max().item() for part in expected.values())
    return max((found[name].double() - expected[name]).abs().max().item() for name in expected) / largest


def _padded(model: Any, batch: Tensors) -> Gradients:
    logits = model(input_ids=batch.tokens, use_cache=False).logits[:, :-1] / batch.temperature
    _loss(logits.log_softmax(-1).gather(2, batch.tokens[:, 1:, None])[..., 0], batch).backward()
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def _packed(backend: Fsdp2Backend, batch: Tensors) -> Gradients:
    outputs = backend.model.outputs(batch, frozenset())
    assert outputs.logprobs is not None
    _loss(outputs.logprobs, batch).backward()
    named = backend.model.lm.named_parameters()
    found = {name: part.grad.full_tensor() for name, part in named if part.grad is not None}
    backend.model.zero_grad()
    return found


def _loss(logprobs: Tensor, batch: Tensors) -> Tensor:
    """A sum of the log-probabilities [B, T-1], each with a weight of its own."""
    width = logprobs.shape[1]
    weights = torch.linspace(0.5, 1.5, logprobs.numel(), dtype=logprobs.dtype).reshape(logprobs.shape)
    return (logprobs * weights)[torch.arange(width) < batch.lengths[:, None] - 1].sum()


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"{'':17} float64{'':14} float32")
    print(f"{'':17}", *(f"{rows:>10}" for rows in ("packed", "shared", "padded", "packed", "shared")))
    for kind in sorted(MIXERS):
        exact, rounded = (gradients(kind, dtype) for dtype in (torch.float64, torch.float32))
        far = [largest_difference(found, exact.padded) for found in (exact.packed, exact.shared, *rounded)]
        print(f"{kind:17}", *(f"{one:10.1e}" for one in far), flush=True)
    dist.destroy_process_group()
