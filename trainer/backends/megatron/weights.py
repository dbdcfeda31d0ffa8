"""Says which shards of Hugging Face tensors this rank's parameters are, and reads and publishes them as such."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rl_async.errors import UserError
from rl_async.trainer.backends.megatron.mapping import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TIED_OUTPUT,
    VALUES,
    Rule,
    Shape,
    config_key,
    expert_rules,
    layer_rules,
)
from rl_async.trainer.backends.megatron.parallel import Parallel
from rl_async.trainer.backends.megatron.slices import Fill, Place, Shard
from rl_async.trainer.checkpoints.export import WEIGHTS
from rl_async.trainer.checkpoints.shards import StoredShards
from rl_async.trainer.model.heads import MODEL_FOLDER, VALUE_HEAD, VALUE_HEAD_FILE, Head, ValueHead
from rl_async.trainer.model.pretrained import StoredWeights
from rl_async.weight_sync.buckets.buckets import dtype_name
from rl_async.weight_sync.layout import Box, Layout, TensorSpec, lengths
from rl_async.weight_sync.reshard.execute import split_fused
from rl_async.weight_sync.reshard.gather import ShardedWeights
from rl_async.weight_sync.reshard.model_layouts import fused_parts, megatron

DECODER = "model."  # prefix of what a critic has too, in a causal language model


@dataclass(frozen=True)
class ShardedModel:
    """A model of which this rank holds some parts: those parts, its shape, and the axes it is spread along."""

    chunks: list[Any]  # GPTModel, one per virtual stage
    shape: Shape
    parallel: Parallel

    @property
    def layers(self) -> dict[int, Any]:
        """This rank's layers by their index in the model."""
        return {layer.layer_number - 1: layer for chunk in self.chunks for layer in chunk.decoder.layers}

    @property
    def local_experts(self) -> range:
        """Indices, from 0, of the experts that this rank holds in each layer."""
        return range(self.shape.experts // self.parallel.expert.size)


class LocalParameter(NamedTuple):
    """A parameter of this rank, and which shard it is of which tensors."""

    parameter: torch.nn.Parameter
    shard: Shard


def local_parameters(model: ShardedModel) -> Iterator[LocalParameter]:
    """Yield every parameter of this rank with the shard that it is. Not a collective."""
    shape, tensor = model.shape, model.parallel.tensor

    def of(owner: Any, rule: Rule, prefix: str = "") -> LocalParameter:
        parameter = owner.get_parameter(rule.megatron)
        rank, ranks = (0, 1) if rule.is_expert else (tensor.rank, tensor.size)
        names = [prefix + name for name in rule.hugging_face]
        return LocalParameter(parameter, Shard(rule, names, tuple(parameter.shape), rank, ranks))

    for chunk in model.chunks:
        if chunk.pre_process:
            yield of(chunk, EMBEDDING)
        if chunk.post_process:
            yield of(chunk, FINAL_NORM)
            if shape.has_output:
                yield of(chunk, OUTPUT)
            elif shape.tied and not chunk.pre_process:
                yield of(chunk, TIED_OUTPUT)
            if shape.has_values:
                yield from (of(chunk, rule) for rule in VALUES)
    first_expert = model.parallel.expert.rank * len(model.local_experts)
    for number, layer in model.layers.items():
        rules = layer_rules(shape)
        for local in model.local_experts:
            rules += expert_rules(local, first_expert + local)
        for rule in rules:
            yield of(layer, rule, f"model.layers.{number}.")


def layout_of(model: ShardedModel, folder: Path, dtype: torch.dtype) -> Layout:
    """Return the layout over all ranks; shapes come from the weights in ``folder``, which are sent in ``dtype``."""
    shape, parallel = model.shape, model.parallel
    shapes = StoredWeights(folder, config_key(shape.head)).shapes
    specs = {name: TensorSpec(shapes[name], dtype_name(dtype)) for name in names_of(shape)}
    return megatron(
        specs,
        kv_heads=shape.groups,
        tp=parallel.tensor.size,
        pp=parallel.pipeline.size,
        ep=parallel.expert.size,
        dp=parallel.context.size * parallel.data.size,
        virtual_stages=parallel.virtual_stages,
    )


def local_shards(model: ShardedModel, layout: Layout) -> ShardedWeights:
    """Return this rank's parameters as views under Hugging Face names."""
    rank = dist.get_rank()
    found: dict[tuple[str, Box], Tensor] = {}
    for parameter, shard in local_parameters(model):
        if shard.rule in VALUES:
            continue  # engines have none
        values = parameter.detach()
        rows = sum(lengths(box)[0] for _, box in fused_parts(layout, rank, shard.names))
        found |= split_fused(values[:rows], layout, rank, shard.names)  # the rows after them pad the vocabulary
    return ShardedWeights(layout, found)


def names_of(shape: Shape) -> list[str]:
    """List the Hugging Face names of all tensors, tied duplicates and the value head left out."""
    ends = [FINAL_NORM, OUTPUT] if shape.has_output else [FINAL_NORM]
    layer = layer_rules(shape) + [rule for number in range(shape.experts) for rule in expert_rules(number, number)]
    inner = [f"model.layers.{i}.{name}" for i in range(shape.layers) for rule in layer for name in rule.hugging_face]
    return [*EMBEDDING.hugging_face, *inner, *(name for rule in ends for name in rule.hugging_face)]


def checkpoint_name(name: str, head: Head) -> str:
    """Return the name of a tensor in checkpoints. A critic is a decoder, which is not part of another model."""
    if name.startswith(VALUE_HEAD):
        return name
    return WEIGHTS + (name.removeprefix(DECODER) if head == "value" else name)


def weights_folder(path: Path) -> Path:
    """Return the Hugging Face folder of ``path``, which is one or a checkpoint's folder of a model."""
    saved = path / MODEL_FOLDER
    return saved if saved.is_dir() else path


def open_model(path: Path, shape: Shape) -> Fill:
    """Return a function that reads a box of a tensor of a Hugging Face folder, or of a checkpoint's of a model.

    A value head that is not stored is a new one. Raises UserError if there are no safetensors files; the function does
    if there is no such tensor, or one of another shape.
    """
    folder, key = weights_folder(path), config_key(shape.head)
    stored = StoredWeights(folder, key)
    (final_norm,) = FINAL_NORM.hugging_face

    def called(name: str) -> str:
        decoder_alone = name.removeprefix(DECODER)
        return name if name in stored.shapes or decoder_alone not in stored.shapes else decoder_alone

    head: dict[str, Tensor] = {}
    if shape.has_values:
        values = path / VALUE_HEAD_FILE
        new = ValueHead(len(stored.read(called(final_norm))))
        head = load_file(values) if values.is_file() else new.state_dict()

    def read(target: Tensor, name: str, place: Place, size: tuple[int, ...]) -> None:
        if name.startswith(VALUE_HEAD):
            target.copy_(head[name.removeprefix(VALUE_HEAD)][place])
            return
        found = stored.shapes.get(called(name), size)  # without one, reading it raises
        if found != size:
            raise UserError(
                f"{key}: the weights in {folder} have {list(found)} of {name}, and config.json {list(size)}"
            )
        target.copy_(stored.read(called(name), place))

    return read


def open_shards(shards: StoredShards, head: Head, ending: str = "") -> Fill:
    """Return a function that reads a box of a tensor of a checkpoint, or with ``ending`` of a moment of it.

    It raises KeyError if there is none, and ValueError if it has another shape or lacks parts.
    """

    def read(target: Tensor, name: str, place: Place, size: tuple[int, ...]) -> None:
        shards.read_into(target, f"{checkpoint_name(name, head)}{ending}", place, size)

    return read
