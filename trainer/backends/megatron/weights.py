"""Moves weights into and out of a model that is spread over ranks, under Hugging Face names, layer by layer.

An optimizer's moments go the same way: the caller says which tensor stands for a parameter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rl_async.trainer.backends.megatron.mapping import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TIED_OUTPUT,
    VALUE_HEAD,
    VALUES,
    Rule,
    Shape,
    config_key,
    expert_rules,
    join,
    layer_rules,
    split,
)
from rl_async.trainer.backends.megatron.parallel import Parallel
from rl_async.trainer.checkpoints.export import WEIGHTS
from rl_async.trainer.checkpoints.shards import StoredShards
from rl_async.trainer.model.heads import MODEL_FOLDER, VALUE_HEAD_FILE, Head, ValueHead
from rl_async.trainer.model.pretrained import StoredWeights
from rl_async.weight_sync.buckets.buckets import dtype_name
from rl_async.weight_sync.experts import expert_parts
from rl_async.weight_sync.layout import Box, Layout, TensorSpec, lengths
from rl_async.weight_sync.reshard.execute import split_fused
from rl_async.weight_sync.reshard.gather import ShardedWeights
from rl_async.weight_sync.reshard.model_layouts import fused_parts, megatron

DECODER = "model."  # prefix of what a critic has too, in a causal language model
Read = Callable[[torch.nn.Parameter], Tensor]  # a tensor of the parameter's shape: its values, or a moment
Write = Callable[[torch.nn.Parameter, Tensor], None]
Fetch = Callable[[str], Tensor]  # a whole tensor by its Hugging Face name


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

    def stage_of(self, layer: int) -> int:
        """Return the pipeline rank that holds a layer; virtual stages are dealt to the ranks in turn."""
        stages = self.parallel.pipeline.size
        per_chunk = self.shape.layers // (stages * self.parallel.virtual_stages)
        return layer // per_chunk % stages

    @property
    def local_experts(self) -> range:
        """Indices, from 0, of the experts that this rank holds in each layer."""
        return range(self.shape.experts // self.parallel.expert.size)


class LocalParameter(NamedTuple):
    """A parameter of this rank, and the full names of the tensors of which it holds a part."""

    parameter: torch.nn.Parameter
    rule: Rule
    names: list[str]


def local_parameters(model: ShardedModel) -> Iterator[LocalParameter]:
    """Yield every parameter of this rank with its rule and tensor names. Not a collective."""
    shape = model.shape

    def of(owner: Any, rule: Rule, prefix: str = "") -> LocalParameter:
        return LocalParameter(owner.get_parameter(rule.megatron), rule, [prefix + name for name in rule.hugging_face])

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


def fill(model: ShardedModel, fetch: Fetch, write: Write) -> None:
    """Write to every parameter of this rank its part of the tensors from ``fetch``. Not a collective."""
    tensor = model.parallel.tensor
    for parameter, rule, names in local_parameters(model):
        ranks, rank = (1, 0) if rule.is_expert else (tensor.size, tensor.rank)
        whole = [fetch(name) for name in names]
        write(parameter, split(rule, whole, model.shape, ranks)[rank])


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
    for parameter, rule, names in local_parameters(model):
        if rule in VALUES:
            continue  # engines have none
        values = parameter.detach()
        rows = sum(lengths(box)[0] for _, box in fused_parts(layout, rank, names))
        found |= split_fused(values[:rows], layout, rank, names)  # the rows after them pad the vocabulary
    return ShardedWeights(layout, found)


def names_of(shape: Shape) -> list[str]:
    """List the Hugging Face names of all tensors, tied duplicates and the value head left out, as ``stream`` does."""
    ends = [FINAL_NORM, OUTPUT] if shape.has_output else [FINAL_NORM]
    layer = layer_rules(shape) + [rule for number in range(shape.experts) for rule in expert_rules(number, number)]
    inner = [f"model.layers.{i}.{name}" for i in range(shape.layers) for rule in layer for name in rule.hugging_face]
    return [*EMBEDDING.hugging_face, *inner, *(name for rule in ends for name in rule.hugging_face)]


def stream(model: ShardedModel, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors under Hugging Face names, tied duplicates left out, on every rank. A collective."""
    yield from _gather(model, EMBEDDING, model.chunks[0], 0, read)
    for number in range(model.shape.layers):
        stage, layer = model.stage_of(number), model.layers.get(number)
        for rule in layer_rules(model.shape):
            yield from _gather(model, rule, layer, stage, read, f"model.layers.{number}.")
        for local in model.local_experts:
            yield from _gather_experts(model, local, layer, stage, read, f"model.layers.{number}.")
    last = model.parallel.pipeline.size - 1
    yield from _gather(model, FINAL_NORM, model.chunks[-1], last, read)
    for rule in (*([OUTPUT] if model.shape.has_output else ()), *(VALUES if model.shape.has_values else ())):
        yield from _gather(model, rule, model.chunks[-1], last, read)


def _gather(
    model: ShardedModel, rule: Rule, owner: Any, stage: int, read: Read, prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    shard = _from_stage(model, rule, owner, stage, read)
    shards = _all_gather(shard, model.parallel.tensor.size, model.parallel.tensor.group)
    for name, whole in zip(rule.hugging_face, join(rule, shards, model.shape), strict=True):
        yield prefix + name, whole


def _gather_experts(
    model: ShardedModel, local: int, owner: Any, stage: int, read: Read, prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the ``local``-th expert of every expert-parallel rank; each expert is whole on its rank."""
    expert, count = model.parallel.expert, len(model.local_experts)
    for mine, *others in zip(*(expert_rules(local, rank * count + local) for rank in range(expert.size)), strict=True):
        shard = _from_stage(model, mine, owner, stage, read)
        for rule, part in zip((mine, *others), _all_gather(shard, expert.size, expert.group), strict=True):
            for name, whole in zip(rule.hugging_face, join(rule, [part], model.shape), strict=True):
                yield prefix + name, whole


def _from_stage(model: ShardedModel, rule: Rule, owner: Any, stage: int, read: Read) -> Tensor:
    """Return this tensor-parallel rank's shard, broadcast from the pipeline stage that holds it."""
    pipeline = model.parallel.pipeline
    if pipeline.size == 1:
        return read(owner.get_parameter(rule.megatron))
    header = torch.zeros(3, dtype=torch.int64)
    shard = None
    if pipeline.rank == stage:
        shard = read(owner.get_parameter(rule.megatron)).contiguous()
        header[: 1 + shard.dim()] = torch.tensor([shard.dim(), *shard.shape])
    source = dist.get_global_rank(pipeline.group, stage)
    device = next(model.chunks[0].parameters()).device
    header = header.to(device)
    dist.broadcast(header, source, group=pipeline.group)
    dimensions, *sizes = header.tolist()
    if shard is None:
        shard = torch.empty(sizes[:dimensions], device=device)
    dist.broadcast(shard, source, group=pipeline.group)
    return shard


def _all_gather(shard: Tensor, size: int, group: dist.ProcessGroup) -> list[Tensor]:
    if size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def checkpoint_name(name: str, head: Head) -> str:
    """Return the name of a tensor in checkpoints. A critic is a decoder, which is not part of another model."""
    if name.startswith(VALUE_HEAD):
        return name
    return WEIGHTS + (name.removeprefix(DECODER) if head == "value" else name)


def weights_folder(path: Path) -> Path:
    """Return the Hugging Face folder of ``path``, which is one or a checkpoint's folder of a model."""
    saved = path / MODEL_FOLDER
    return saved if saved.is_dir() else path


def open_model(path: Path, shape: Shape) -> Fetch:
    """Return a function that reads one tensor of a Hugging Face folder, or of a checkpoint's of a model, as float32.

    A value head that is not stored is a new one. Raises UserError if there are no safetensors files; the function does
    if there is no such tensor.
    """
    stored = StoredWeights(weights_folder(path), config_key(shape.head))
    values = path / VALUE_HEAD_FILE
    head = load_file(values) if shape.has_values and values.is_file() else None

    def of_model(name: str) -> Tensor:
        found = name if name in stored.shapes else name.removeprefix(DECODER)  # of a decoder alone
        return stored.read(found if found in stored.shapes else name).float()

    def fetch(name: str) -> Tensor:
        if not name.startswith(VALUE_HEAD):
            return of_model(name)
        known = head or ValueHead(len(of_model(*FINAL_NORM.hugging_face))).state_dict()
        return known[name.removeprefix(VALUE_HEAD)].float()

    return fetch


def open_shards(shards: StoredShards, head: Head, ending: str = "") -> Fetch:
    """Return a function that reads one tensor of what the FSDP2 backend stored, or with ``ending`` a moment of it.

    It raises KeyError if there is none, and ValueError if parts of it are missing.
    """
    experts = {
        part.name: (stored, part)
        for stored, size in shards.sizes.items()
        if stored.startswith(WEIGHTS)
        for part in expert_parts(stored.removesuffix(ending), size)
    }

    def fetch(called: str) -> Tensor:
        name = checkpoint_name(called, head)
        if name not in experts:
            return shards.whole(f"{name}{ending}").float()
        stored, part = experts[name]
        columns = shards.sizes[stored][2]
        where = (slice(part.expert, part.expert + 1), slice(part.rows.start, part.rows.stop), slice(0, columns))
        expert = torch.empty(1, len(part.rows), columns)
        shards.read_into(expert, stored, where, shards.sizes[stored])
        return expert[0]

    return fetch
