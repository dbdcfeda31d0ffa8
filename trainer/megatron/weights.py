"""This rank's weights and optimizer state as shards of Hugging Face tensors: trained, read, saved and published.

Megatron-Core's distributed AdamW keeps on each data-parallel rank the moments of its own part of a parameter. Saved are
boxes of tensors under the FSDP2 backend's names, so that any number of ranks, laid out in any way, can continue, and so
can the FSDP2 backend, whose checkpoints are read here too. Nothing is gathered: beside what it keeps, or copies to save
it, a rank holds one parameter at most.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import CheckpointDamaged, UserError
from rl_async.trainer.backend import ADAM_BETA1, learning_rate_factor
from rl_async.trainer.checkpoints import (
    MOMENT,
    MOMENTS,
    STEPS,
    UNREADABLE,
    Part,
    StoredShards,
    beyond_adamw,
    on_all_ranks,
)
from rl_async.trainer.export import SHARDS, WEIGHTS
from rl_async.trainer.megatron.mapping import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TIED_OUTPUT,
    VALUES,
    Fill,
    Place,
    Rule,
    Shape,
    Shard,
    config_key,
    expert_rules,
    fill,
    layer_rules,
    parts_of,
)
from rl_async.trainer.megatron.model import Parallel
from rl_async.trainer.model import MODEL_FOLDER, VALUE_HEAD, VALUE_HEAD_FILE, Head, ValueHead
from rl_async.trainer.pretrained import StoredWeights
from rl_async.weight_sync.buckets import dtype_name
from rl_async.weight_sync.layout import Box, Layout, TensorSpec, fused_parts, lengths, megatron
from rl_async.weight_sync.reshard import ShardedWeights, split_fused

# The prefix, in a causal language model, of the tensors that a critic has too.
DECODER = "model."


@dataclass(frozen=True)
class ShardedModel:
    """A model that is spread over ranks: this rank's chunks, a GPTModel per virtual stage, its shape and its axes."""

    chunks: list[Any]
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
    """A parameter of this rank, with its tensors and its shard of them."""

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
            # Engines have no value head.
            continue
        values = parameter.detach()
        rows = sum(lengths(box)[0] for _, box in fused_parts(layout, rank, shard.names))
        # The rows after these pad the vocabulary.
        found |= split_fused(values[:rows], layout, rank, shard.names)
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

    A value head that is not stored is a new one. Raises UserError for a folder without safetensors files; the function
    raises it for a tensor that is missing or has another shape.
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
        # A missing tensor passes here, and reading it raises.
        found = stored.shapes.get(called(name), size)
        if found != size:
            raise UserError(
                f"{key}: the weights in {folder} have {list(found)} of {name}, and config.json {list(size)}"
            )
        target.copy_(stored.read(called(name), place))

    return read


def open_shards(shards: StoredShards, head: Head, ending: str = "") -> Fill:
    """Return a function that reads a box of a tensor of a checkpoint, or with ``ending`` of a moment of it.

    It raises KeyError for a missing tensor, and ValueError for one of another shape or with parts missing.
    """

    def read(target: Tensor, name: str, place: Place, size: tuple[int, ...]) -> None:
        shards.read_into(target, f"{checkpoint_name(name, head)}{ending}", place, size)

    return read


def wrap(chunks: list[Any], config: TransformerConfig) -> list[Any]:
    """Wrap the model's parts with float32 buffers that sum gradients over data-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)
    ]


class Own(NamedTuple):
    """The part of its shard of a parameter that a rank's optimizer keeps: a range of the numbers from ``start`` on.

    ``master`` [numbers] is that range in float32, of a float32 parameter a view; ``moments`` has the tensors of AdamW,
    and is empty before its first step.
    """

    start: int
    master: Tensor
    moments: Mapping[str, Tensor]


class DistributedAdamW:
    """AdamW with clipping and a schedule; weight decay applies to all parameters, as in ``torch.optim.AdamW``.

    ``dtype`` is the model's. Each data-parallel rank keeps float32 masters of its part of bfloat16 parameters.
    """

    def __init__(self, chunks: list[Any], config: TrainerConfig, dtype: torch.dtype) -> None:
        self._chunks, self._config = chunks, config
        self._factor = learning_rate_factor(config)
        self.steps = 0
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=ADAM_BETA1,
                adam_beta2=config.beta2,
                clip_grad=config.grad_clip,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            chunks,
            # By default Megatron exempts norms and biases from weight decay.
            config_overrides={},
        )
        self.clear()

    def norm(self) -> float:
        """Return the global norm of the accumulated gradients. A collective."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self) -> None:
        """Apply the accumulated gradients at the scheduled learning rate, on all ranks. A collective."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * self._factor(self.steps)
        self._optimizer.step()
        self.steps += 1

    def clear(self) -> None:
        """Set all accumulated gradients to zero."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def own(self, parameter: torch.nn.Parameter) -> Own | None:
        """Return this rank's part of a parameter, or None if other data-parallel ranks keep all of it."""
        owner = self._owner(parameter)
        if parameter not in owner.model_param_gbuf_map:
            return None
        start = owner._get_model_param_range_map(parameter)["param"].start
        master = self._main(owner, parameter)
        return Own(start, master.detach(), owner.optimizer.state.get(master, {}))

    def set_moments(self, parameter: torch.nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Continue after ``steps`` steps with these moments [numbers] of this rank's part of a parameter."""
        owner = self._owner(parameter)
        state = {**moments, "step": torch.tensor(float(self.steps))}
        owner.optimizer.state[self._main(owner, parameter)] = state

    def move(self, device: str) -> None:
        """Move the moments of all parameters, and the masters that they have, to ``device``."""
        for owner in self._optimizer.chained_optimizers:
            for masters in owner.shard_fp32_from_float16_groups:
                for master in masters:
                    master.data = master.data.to(device)
            for state in owner.optimizer.state.values():
                for key in MOMENTS:
                    state[key] = state[key].to(device)

    def release_gradients(self) -> None:
        """Free the buffers that sum gradients, until ``allocate_gradients``; they must have been cleared."""
        for sums in self._gradients():
            sums.untyped_storage().resize_(0)

    def allocate_gradients(self) -> None:
        """Undo ``release_gradients``: gradients are zero."""
        for sums in self._gradients():
            sums.untyped_storage().resize_(sums.nbytes)
            sums.zero_()

    def _gradients(self) -> Iterator[Tensor]:
        """Yield the tensors that all gradients are views of."""
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)

    def _owner(self, parameter: torch.nn.Parameter) -> Any:
        """Return the optimizer of a parameter: experts have their own, since fewer ranks hold copies of them."""
        experts = not getattr(parameter, "allreduce", True)
        return self._optimizer.chained_optimizers[-1 if experts else 0]

    def _main(self, owner: Any, parameter: torch.nn.Parameter) -> Tensor:
        group, place = owner.model_param_group_index_map[parameter]
        return owner.optimizer.param_groups[group]["params"][place]


HOST = torch.device("cpu")


def host_copy(model: ShardedModel, optimizer: DistributedAdamW) -> Iterator[Part]:
    """Copy this rank's part of a checkpoint to the host: masters, moments, on rank 0 the steps. Not a collective.

    One rank saves each number: the data-parallel one whose optimizer keeps it, and of tensor-parallel copies the first.
    """
    for parameter, shard in local_parameters(model):
        own = optimizer.own(parameter)
        if own is None or not _saves(shard):
            continue
        kept = {"": own.master} | {f"{MOMENT}{key}": own.moments[key] for key in MOMENTS if key in own.moments}
        for part in parts_of(shard, model.shape, range(own.start, own.start + own.master.numel())):
            name = checkpoint_name(part.name, model.shape.head)
            for ending, flat in kept.items():
                for box, numbers in part.split(part.copy_to(HOST, flat)):
                    yield Part(f"{name}{ending}", box, numbers)
    if dist.get_rank() == 0:
        yield Part(STEPS, (), torch.tensor(optimizer.steps))


def _saves(shard: Shard) -> bool:
    """Return whether this rank saves the shard; tensor-parallel ranks have copies of some, a last stage of the
    embedding."""
    return shard.rule != TIED_OUTPUT and (shard.rule.form != "copy" or shard.rank == 0)


def read_weights(model: ShardedModel, optimizer: DistributedAdamW | None, source: Fill) -> None:
    """Read this rank's part of the weights from ``source``, each tensor once, into parameters and their masters."""
    for parameter, shard in local_parameters(model):
        weights = parameter.detach()
        if optimizer is None or weights.dtype == torch.float32:
            fill(shard, model.shape, 0, weights.view(-1), source)
            continue
        unrounded = torch.empty_like(weights, dtype=torch.float32)
        fill(shard, model.shape, 0, unrounded.view(-1), source)
        weights.copy_(unrounded)
        own = optimizer.own(parameter)
        if own is not None:
            own.master.copy_(unrounded.view(-1)[own.start : own.start + own.master.numel()])


def restore(model: ShardedModel, optimizer: DistributedAdamW, folder: Path) -> None:
    """Continue from the weights, moments and steps that either backend wrote. A collective.

    Raises CheckpointDamaged on all ranks if one of them cannot read its part, and UserError if a value head is missing
    or the moments are of another optimizer than AdamW.
    """
    names = StoredShards(folder / SHARDS).sizes if (folder / SHARDS).is_dir() else {}
    if beyond_adamw(names):
        raise UserError(f"{folder} has moments of trainer.optimizer=muon or adamw_8bit, for trainer.backend=fsdp2")
    if model.shape.has_values and not (folder / VALUE_HEAD_FILE).is_file():
        raise UserError(f"{folder} has no value head, which critic needs; set critic as in that run")
    try:
        on_all_ranks(lambda: _restore(model, optimizer, folder), None, CheckpointDamaged, (*UNREADABLE, UserError))
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{folder}: {error}") from error


def _restore(model: ShardedModel, optimizer: DistributedAdamW, folder: Path) -> None:
    """Read weights, the number of steps, and the moments of a checkpoint that has them."""
    head, sharded = model.shape.head, (folder / SHARDS).is_dir()
    stored = StoredShards(folder / SHARDS if sharded else folder)
    # Older formats have the weights in the Hugging Face folder alone: see trainer/checkpoints.py.
    read_weights(model, optimizer, open_shards(stored, head) if sharded else open_model(folder, model.shape))
    optimizer.steps = int(stored.whole(STEPS))
    if not any(name.endswith(f"{MOMENT}{MOMENTS[0]}") for name in stored.sizes):
        return
    sources = {key: open_shards(stored, head, f"{MOMENT}{key}") for key in MOMENTS}
    for parameter, shard in local_parameters(model):
        own = optimizer.own(parameter)
        if own is None:
            continue
        moments: dict[str, Tensor] = {}
        for key, source in sources.items():
            moments[key] = torch.empty_like(own.master)
            fill(shard, model.shape, own.start, moments[key], source)
        optimizer.set_moments(parameter, moments)
