"""Low-rank adapters (LoRA, arXiv:2106.09685) by PEFT: y = W x + alpha / rank * B A x, where A and B train.

An adapter of ``layers.0.self_attn.q_proj`` is the parameters ``layers.0.self_attn.q_proj.lora_A.default.weight``
[rank, in] and ``...lora_B.default.weight`` [out, rank]; the layer's own weight [out, in] is ``...base_layer.weight``.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_async.configs.schema.trainer import LoraConfig
from rl_async.errors import UserError
from rl_async.trainer.pretrained import own_part
from rl_async.weight_sync.buckets import add

BASE_LAYER = ".base_layer"
NAMES = (".lora_A.default.weight", ".lora_B.default.weight")
# Every rank draws the same A. B is zero, so that the model begins as its base.
SEED = 0


def attach(lm: Any, config: LoraConfig, dtype: torch.dtype) -> list[str]:
    """Freeze ``lm`` in ``dtype`` and add float32 adapters that train, without memory; ``draw`` gives them values.

    Returns the names of the layers that have one.
    Raises UserError if PEFT is missing, or a target is not a linear layer of the decoder.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise UserError("trainer.lora needs PEFT; install it with pip install 'rl-async[lora]'") from error
    targets = chosen(lm, config.targets)
    # Buffers keep their type: rotary frequencies stay float32.
    for parameter in lm.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    inject_adapter_in_model(
        PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=targets,
            lora_dropout=0.0,
            use_rslora=config.rank_stabilized,
        ),
        lm,
        low_cpu_mem_usage=True,
    )
    for name, parameter in lm.named_parameters():
        if name.endswith(NAMES):
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return targets


def draw(lm: Any) -> None:
    """Set this rank's part of the first values of all adapters. Not a collective."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(SEED)
        for name, parameter in lm.named_parameters():
            if not name.endswith(NAMES):
                continue
            whole = torch.zeros(parameter.shape)
            if name.endswith(NAMES[0]):
                # As PEFT does.
                torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
            local, part = own_part(parameter)
            local.copy_(whole[part])


def chosen(lm: Any, targets: tuple[str, ...]) -> list[str]:
    """The full names of the decoder's linear layers that are meant; the last layer, over the vocabulary, is none."""
    # A vision tower has layers, too.
    decoder = set(lm.get_decoder().modules())
    linear = [
        name
        for name, part in lm.named_modules()
        if type(part) is torch.nn.Linear and ".layers." in f".{name}" and part in decoder
    ]
    last = {name.rpartition(".")[2] for name in linear}
    if wrong := [target for target in targets if target not in last]:
        raise UserError(
            f"trainer.lora.targets: {', '.join(wrong)} is no linear layer of the decoder; there are: "
            f"{', '.join(sorted(last))}"
        )
    return [name for name in linear if not targets or name.rpartition(".")[2] in targets]


def without_adapters(lm: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters of ``lm`` as they are, under the names that they have without adapters."""
    for name, parameter in lm.named_parameters():
        if not name.endswith(NAMES):
            yield name.replace(BASE_LAYER, ""), parameter


def adapters(lm: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of ``lm`` under their published names."""
    for name, parameter in lm.named_parameters():
        if name.endswith(NAMES):
            yield name.replace(".default.", "."), parameter


@contextmanager
def base_alone(lm: Any) -> Iterator[None]:
    """Let ``lm`` compute as its base until the block ends: adapters count nothing.

    PEFT's own switch would change ``requires_grad`` of parameters that FSDP holds.
    """
    layers = [module for module in lm.modules() if hasattr(module, "lora_A")]
    scales = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling.update(scale)


def merged(
    lm: Any, config: LoraConfig | None, shard: Callable[[Tensor], Tensor], full: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """This rank's rows of each parameter, adapters added to their layers; names as ``without_adapters``.

    ``shard`` gives the rows of a parameter, ``full`` all of it, which is a collective: a row of a layer takes its row
    of B, and all of A.
    """
    for name, parameter in lm.named_parameters():
        if name.endswith(NAMES):
            continue
        rows = shard(parameter)
        if config is not None and name.endswith(f"{BASE_LAYER}.weight"):
            layer = lm.get_submodule(name.removesuffix(f"{BASE_LAYER}.weight"))
            low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            rows = add(rows, full(low.detach()), shard(high), config.scale)
        yield name.replace(BASE_LAYER, ""), rows
