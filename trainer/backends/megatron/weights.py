"""Weights in and out of a model that is spread over ranks, under Hugging Face names, one layer in memory at a time.

The same walk carries an optimizer's moments: what a parameter stands for is up to the caller.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from rl_async.errors import UserError
from rl_async.trainer.backends.megatron.mapping import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TIED_OUTPUT,
    Rule,
    Shape,
    expert_rules,
    join,
    layer_rules,
    split,
)
from rl_async.trainer.backends.megatron.parallel import Parallel

Read = Callable[[torch.nn.Parameter], Tensor]  # a tensor of the parameter's shape, which stands for it
Write = Callable[[torch.nn.Parameter, Tensor], None]
Fetch = Callable[[str], Tensor]  # a whole tensor by its Hugging Face name


@dataclass(frozen=True)
class Spread:
    """A model, the parts of it that this rank holds, and where the others are."""

    chunks: list[Any]  # GPTModel, one per virtual stage
    shape: Shape
    parallel: Parallel

    @property
    def layers(self) -> dict[int, Any]:
        """This rank's layers by their number in the model."""
        return {layer.layer_number - 1: layer for chunk in self.chunks for layer in chunk.decoder.layers}

    def stage_of(self, layer: int) -> int:
        """Virtual stages are dealt out to the pipeline's ranks in turn."""
        stages = self.parallel.pipeline.size
        per_chunk = self.shape.layers // (stages * self.parallel.virtual_stages)
        return layer // per_chunk % stages

    @property
    def local_experts(self) -> range:
        """The experts of a layer that this rank holds, counted from 0."""
        return range(self.shape.experts // self.parallel.expert.size)


class Held(NamedTuple):
    """A parameter of this rank, and the tensors that it has a part of, by their whole names."""

    parameter: torch.nn.Parameter
    rule: Rule
    names: list[str]


def held(spread: Spread) -> Iterator[Held]:
    """Every parameter of this rank. No collective."""
    shape = spread.shape

    def of(owner: Any, rule: Rule, prefix: str = "") -> Held:
        return Held(owner.get_parameter(rule.megatron), rule, [prefix + name for name in rule.hugging_face])

    for chunk in spread.chunks:
        if chunk.pre_process:
            yield of(chunk, EMBEDDING)
        if chunk.post_process:
            yield of(chunk, FINAL_NORM)
            if not shape.tied:
                yield of(chunk, OUTPUT)
            elif not chunk.pre_process:
                yield of(chunk, TIED_OUTPUT)
    first_expert = spread.parallel.expert.rank * len(spread.local_experts)
    for number, layer in spread.layers.items():
        rules = layer_rules(shape)
        for local in spread.local_experts:
            rules += expert_rules(local, first_expert + local)
        for rule in rules:
            yield of(layer, rule, f"model.layers.{number}.")


def fill(spread: Spread, fetch: Fetch, write: Write) -> None:
    """Give every parameter of this rank its part of the tensors that ``fetch`` finds. No collective."""
    tensor = spread.parallel.tensor
    for parameter, rule, names in held(spread):
        whole = [fetch(name) for name in names]
        write(parameter, split(rule, whole, spread.shape, tensor.size)[tensor.rank])


def names_of(shape: Shape) -> list[str]:
    """Of all tensors of the model, tied duplicates left out, as ``stream`` has them."""
    ends = [FINAL_NORM] if shape.tied else [FINAL_NORM, OUTPUT]
    layer = layer_rules(shape) + [rule for number in range(shape.experts) for rule in expert_rules(number, number)]
    inner = [f"model.layers.{i}.{name}" for i in range(shape.layers) for rule in layer for name in rule.hugging_face]
    return [*EMBEDDING.hugging_face, *inner, *(name for rule in ends for name in rule.hugging_face)]


def stream(spread: Spread, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors under Hugging Face names, tied duplicates left out, on every rank. A collective."""
    yield from _gather(spread, EMBEDDING, spread.chunks[0], 0, read)
    for number in range(spread.shape.layers):
        stage, layer = spread.stage_of(number), spread.layers.get(number)
        for rule in layer_rules(spread.shape):
            yield from _gather(spread, rule, layer, stage, read, f"model.layers.{number}.")
        for local in spread.local_experts:
            yield from _gather_experts(spread, local, layer, stage, read, f"model.layers.{number}.")
    last = spread.parallel.pipeline.size - 1
    yield from _gather(spread, FINAL_NORM, spread.chunks[-1], last, read)
    if not spread.shape.tied:
        yield from _gather(spread, OUTPUT, spread.chunks[-1], last, read)


def _gather(
    spread: Spread, rule: Rule, owner: Any, stage: int, read: Read, prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    shard = _from_stage(spread, rule, owner, stage, read)
    shards = _all_gather(shard, spread.parallel.tensor.size, spread.parallel.tensor.group)
    for name, whole in zip(rule.hugging_face, join(rule, shards, spread.shape), strict=True):
        yield prefix + name, whole


def _gather_experts(
    spread: Spread, local: int, owner: Any, stage: int, read: Read, prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """The ``local``-th expert of every expert-parallel rank; each is whole on its rank."""
    expert, count = spread.parallel.expert, len(spread.local_experts)
    for mine, *others in zip(*(expert_rules(local, rank * count + local) for rank in range(expert.size)), strict=True):
        shard = _from_stage(spread, mine, owner, stage, read)
        for rule, part in zip((mine, *others), _all_gather(shard, expert.size, expert.group), strict=True):
            for name, whole in zip(rule.hugging_face, join(rule, [part], spread.shape), strict=True):
                yield prefix + name, whole


def _from_stage(spread: Spread, rule: Rule, owner: Any, stage: int, read: Read) -> Tensor:
    """This rank's shard as the pipeline stage that holds it has it."""
    pipeline = spread.parallel.pipeline
    if pipeline.size == 1:
        return read(owner.get_parameter(rule.megatron))
    header = torch.zeros(3, dtype=torch.int64)
    shard = None
    if pipeline.rank == stage:
        shard = read(owner.get_parameter(rule.megatron)).contiguous()
        header[: 1 + shard.dim()] = torch.tensor([shard.dim(), *shard.shape])
    source = dist.get_global_rank(pipeline.group, stage)
    device = next(spread.chunks[0].parameters()).device
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


def open_weights(folder: Path) -> Fetch:
    """Tensors of the safetensors files in a folder, each read when it is asked for, as float32.

    Raises UserError if there are none, or not the one that is asked for.
    """
    files = _files_by_name(folder)

    def fetch(name: str) -> Tensor:
        with safe_open(_file_of(files, name, folder), "pt") as opened:
            return opened.get_tensor(name).float()

    return fetch


def shapes_in(folder: Path, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Of these tensors, without reading them. Raises as ``open_weights``."""
    files, shapes = _files_by_name(folder), {}
    for name in names:
        with safe_open(_file_of(files, name, folder), "pt") as opened:
            shapes[name] = tuple(opened.get_slice(name).get_shape())
    return shapes


def _files_by_name(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), path)
    if not files:
        raise UserError(f"model.path: no safetensors files in {folder}, which trainer.backend=megatron reads")
    return files


def _file_of(files: Mapping[str, Path], name: str, folder: Path) -> Path:
    if name not in files:
        raise UserError(f"model.path: the weights in {folder} have no tensor {name}")
    return files[name]
