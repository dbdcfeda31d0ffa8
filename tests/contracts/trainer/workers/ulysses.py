"""One of two ranks that compute models with rows of their own and with shared ones; started by test_sharding.py.

``python -m tests.contracts.trainer.workers.ulysses DEVICE FOLDER OUT NAME...``: DEVICE is cpu or cuda, models are
FOLDER/NAME, and a name that begins with a head has it. Rank 0 writes the largest differences.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.model_files import experts_of
from rl_async.trainer.backend import OutputName, Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import Head
from rl_async.trainer.packing import Tensors, empty_tensors
from tests.support.batches import bent_means
from tests.support.families import COMMON
from tests.support.rounding import excess, in_float64, pass_rounding, to_float64

LENGTHS = [23, 2, 9, 9, 14, 23, 5, 1, 3]  # 89 tokens: cut within the second of 23, and filled up by one
HEADS: dict[str, tuple[Head, frozenset[OutputName]]] = {
    "value": ("value", frozenset()),
    "both": ("both", frozenset({"values"})),
    "policy": ("policy", frozenset({"entropy", "sum_squares", "distribution"})),
}


def batch(vocab: int, device: str) -> Tensors:
    draw = torch.Generator().manual_seed(1)
    tensors = empty_tensors(device)
    tensors.tokens = torch.randint(3, vocab, (len(LENGTHS), max(LENGTHS)), generator=draw).to(device)
    tensors.lengths = torch.tensor(LENGTHS)
    tensors.temperature = torch.linspace(0.5, 1.5, len(LENGTHS), device=device)[:, None, None]
    return tensors


def experts_for(config: Any, batch: Tensors) -> Tensor:
    """A record of experts at random, and of none for some tokens."""
    shape = (*batch.tokens.shape, config.num_hidden_layers, experts_of(config))
    draw = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    experts = draw.argsort(-1)[..., : config.num_experts_per_tok].to(torch.int16)
    experts[:, ::7] = -1
    return experts


def loss_of(outputs: Outputs, lengths: Tensor) -> Tensor:
    """Return the sum of the bent means of all outputs, which parts of a batch add up to."""
    return torch.stack([bent.sum() for bent in bent_means(outputs, lengths)]).sum()


def computed(folder: Path, ranks_per_row: int, device: str, exactly: bool = False) -> dict[str, Tensor]:
    """The loss, the outputs and the gradients, by name, of one micro-batch that both ranks have.

    In float32, or in float64 if ``exactly``.
    """
    head, requested = HEADS.get(folder.name.partition(" ")[0], HEADS["policy"])
    backend = Fsdp2Backend(str(folder), "float32", device, TrainerConfig(sequence_parallel=ranks_per_row), head)
    if backend.model.value_head is not None:
        torch.nn.init.constant_(backend.model.value_head.weight, 0.1)
    if exactly:
        to_float64(backend.model.lm)
        backend.model.double()
    seen: list[int] = []
    backend.model.lm.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    x = batch(backend.hf_config.vocab_size, device)
    if backend.replays_routers:
        x.experts = experts_for(backend.hf_config, x)
    with in_float64() if exactly else nullcontext():
        outputs = backend.model.outputs(x, requested)
        loss = loss_of(outputs, x.lengths)
        (loss * ranks_per_row).backward()  # FSDP averages over both ranks, of which each has all of it, or a part
    assert seen == [-(-sum(LENGTHS) // ranks_per_row)], "tokens of this rank"
    found = {"loss": loss.detach()}
    for name in outputs.__struct_fields__:
        part = getattr(outputs, name)
        if part is not None:
            found[name] = part.detach()
    for name, parameter in backend.model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.full_tensor()
    return found


def compared(folder: Path, device: str) -> dict[str, float]:
    """How far shared rows are from own ones: the numbers, the gradients, and how large those are at all.

    On a CPU also how far from float64, as a multiple of what rounding explains; a GPU's kernels lack the type.
    """
    own, shared = computed(folder, 1, device), computed(folder, 2, device)
    assert own.keys() == shared.keys()
    far = {name: (own[name] - shared[name]).abs().max().item() for name in own}
    exact = {}
    if device == "cpu" and any("value_head" in name for name in own):
        # FSDP keeps the value head in float32 whatever is asked of the model.
        sizes = {name: own[name].abs().max().item() for name in own if far[name]}
        rounded = pass_rounding(1.0, COMMON["num_hidden_layers"], sum(LENGTHS), backward=True)
        exact = {"excess": max(far[name] / (rounded * size) for name, size in sizes.items())}
    elif device == "cpu":
        exact = {"excess": excess(shared, own, computed(folder, 1, device, True), sum(LENGTHS))}
    gradients = [name for name in own if name.startswith("gradient")]
    return exact | {
        "loss": far["loss"],
        "outputs": max(far[name] for name in own if name != "loss" and name not in gradients),
        "gradients": max(far[name] for name in gradients),
        "size": max(own[name].abs().max().item() for name in gradients),
    }


def main() -> None:
    device, folder, out, names = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
        device = f"cuda:{dist.get_rank()}"
    found = {name: compared(folder / name, device) for name in names}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if sys.argv[1] == "cpu" else "cpu:gloo,cuda:nccl")
    main()
    dist.destroy_process_group()
