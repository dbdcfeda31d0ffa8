"""The FSDP2 backend: a model with its heads under ``fully_shard``, on gloo or NCCL, on any number of ranks.

Ranks may hold replicas (HSDP) or share rows. Layers are wrapped for recomputation and compiled before they are sharded.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged, UserError
from rl_async.torch_shared import to_host
from rl_async.trainer.attention import join_groups
from rl_async.trainer.backend import LossFn, OutputName, Outputs, Published, learning_rate_factor
from rl_async.trainer.batch_layout import row_cost_of
from rl_async.trainer.checkpoints import (
    MOMENT,
    STEPS,
    StoredShards,
    beyond_adamw,
    host_copy,
    own_parts,
    read_shards,
    write_shards,
)
from rl_async.trainer.export import (
    SHARDS,
    WEIGHTS,
    base_of,
    require_adapters,
    require_whole,
    write_adapter,
    write_described,
)
from rl_async.trainer.families import text_of
from rl_async.trainer.lora import adapters, attach, base_alone, draw, merged, without_adapters
from rl_async.trainer.model import MODEL_FOLDER, Head, Headed, build_headed, replay_routers
from rl_async.trainer.optimizers import allocate_state, build_optimizer, parameter_groups
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import adjacent_and_strided
from rl_async.weight_sync.buckets import dtype_name
from rl_async.weight_sync.layout import (
    STACKED_FOR_ENGINES,
    Layout,
    TensorSpec,
    fsdp2,
    sharded_dimension,
    single_layout,
    single_shards,
)
from rl_async.weight_sync.reshard import ShardedWeights, one_box_each

aten: Any = torch.ops.aten
# The operations whose results selective checkpointing keeps: products with weights, and attention by fused kernels.
# Products of batches are not among them, since those of plain attention are as large as the square of a row.
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten._grouped_mm.default,
    aten._flash_attention_forward.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.torch_attn._varlen_attn.default,
]
# Those of FlashAttention's packages, which exist once they are imported: version 2, and builds of version 3.
KEPT_OF_PACKAGES = ("flash_attn::_flash_attn_varlen_forward", "flash_attn_3::_flash_attn_forward", "flash_attn_3::fwd")


class Fsdp2Backend:
    """Implements ``backend.Backend`` with FSDP2.

    Master weights are float32; with dtype bfloat16 they are cast for compute, and gradients are reduced in float32.
    ``config`` configures this model's optimizer; a critic's differs from the policy's. Without a config, or unless
    ``trains``, the model is frozen: a reference.
    """

    def __init__(
        self,
        path: str,
        dtype: str,
        device: str,
        config: TrainerConfig | None,
        head: Head = "policy",
        trains: bool = True,
    ) -> None:
        options = config or TrainerConfig()
        config = config if trains else None
        self.device, self.path, self.config = device, path, config
        self.dtype = getattr(torch, dtype)
        self.data_parallel, sharing = join_groups(options.sequence_parallel, options.collective_timeout_s)
        model, pretrained = build_headed(path, head, device, self.dtype, options, sharing)
        self._lora = config.lora if config else None
        if self._lora is not None:
            self._base = base_of(path, pretrained.renamed)
            self._targets = attach(model.lm, self._lora, self.dtype)
        if config is not None and head != "value":
            replay_routers(model, options)
            if config.vision_learning_rate is not None and model.pictures is None:
                raise UserError(f"trainer.vision_learning_rate: model.path={path} has no vision tower; leave it out")
        trains_tower = config is not None and self._lora is None and config.vision_learning_rate != 0
        model.train_tower(trains_tower)
        self.replays_routers = model.replay is not None
        self.hf_config = model.lm.config
        self.pictures = model.pictures
        self.row_cost = row_cost_of(
            text_of(self.hf_config),
            padded=not model.packs,
            shares_prefixes=model.shares_prefixes,
            tower=model.tower_cost(trains=trains_tower),
        )
        self._offloads = options.cpu_offload
        prepare(model, options)
        self._replicas = options.replicas
        # A rank that holds a whole copy of what it trains keeps the weights in the model's type from the first
        # micro-batch of a step to the last, instead of casting and copying them for each.
        self._whole = config is not None and dist.get_world_size() == options.replicas and not self._offloads
        mesh = mesh_of(device, dist.get_world_size(), options.replicas, options.collective_timeout_s)
        self.model = shard(model, mesh, self.dtype, self._offloads)
        if self._whole:
            self.model.set_reshard_after_forward(False)
        allocate(self.model, "cpu" if self._offloads else device)
        pretrained.fill(dict(without_adapters(self.model.lm)) | dict(self.model.lm.named_buffers()))
        if self._lora is not None:
            draw(self.model.lm)
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: torch.optim.lr_scheduler.LambdaLR | None = None
        if config is None:
            self.model.requires_grad_(False)
        else:
            groups = parameter_groups(self.model, self._trained(), config)
            self.optimizer = build_optimizer(groups, config, "cpu" if self._offloads else device)
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor(config))

    def forward(self, batch: Tensors, requested: frozenset[OutputName] = frozenset()) -> Outputs:
        with torch.no_grad():
            return self.model.outputs(batch, requested)

    def forward_base(self, batch: Tensors, requested: frozenset[OutputName] = frozenset()) -> Outputs:
        """Compute outputs as ``forward`` does, without the adapters."""
        with base_alone(self.model.lm):
            return self.forward(batch, requested)

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[OutputName] = frozenset()
    ) -> tuple[float, float]:
        assert self.optimizer is not None and self.schedule is not None and self.config is not None
        losses = self.add_gradients(batches, loss_fn, requested)
        norm = _full(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)).item()
        total = losses.item()
        finite = torch.tensor([float(total == total and abs(total) != float("inf"))])
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite.item() or norm != norm or norm == float("inf"):
            self.optimizer.zero_grad()
            raise TrainingDiverged(f"loss {total} and gradient norm {norm} must be finite")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total, norm

    def add_gradients(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[OutputName] = frozenset()
    ) -> Tensor:
        """Sum the gradients of micro-batches over all ranks; return this rank's sum of losses, a scalar on the device.

        A collective.
        """
        world = dist.get_world_size()
        # Read once, after the last micro-batch, since reading waits for the device.
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            # A single rank with offloaded weights has no room for whole gradients.
            self.model.set_requires_gradient_sync(last or (world == 1 and not self._whole))
            if self._whole:
                self.model.set_reshard_after_backward(last)
            loss = loss_fn(number, self.model.outputs(batch, requested))
            losses += loss.detach()
            # FSDP averages over ranks, but the loss is already divided by the global count, and each of the ranks that
            # share rows has its own part of the gradient (attention.py).
            (loss * world).backward()
        return losses

    def sharded_weights(self, what: Published = "merged") -> ShardedWeights:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # A pass without gradient leaves some of them whole.
                module.reshard()
        if what == "adapters":
            layout, local = self._adapter_layout, {name: _shard(part) for name, part in adapters(self.model.lm)}
            return ShardedWeights(layout, one_box_each(layout, dist.get_rank(), local))
        if what == "merged":
            local = dict(merged(self.model.lm, self._lora, _shard, _full))
        else:
            local = {name: _shard(parameter) for name, parameter in without_adapters(self.model.lm)}
        shards = one_box_each(self._layout, dist.get_rank(), local)
        if self.hf_config.model_type in STACKED_FOR_ENGINES:
            return ShardedWeights(self._layout, shards)
        return ShardedWeights(self._published_layout, single_shards(self._layout, shards))

    @functools.cached_property
    def _layout(self) -> Layout:
        """The layout of the language model's parameters; engines have no value head."""
        tied, dtype = self.hf_config.tie_word_embeddings, dtype_name(self.dtype)
        shapes = {name: parameter.shape for name, parameter in without_adapters(self.model.lm)}
        specs = {n: TensorSpec(tuple(s), dtype) for n, s in shapes.items() if not (tied and n == "lm_head.weight")}
        return self._sharded(specs)

    @functools.cached_property
    def _published_layout(self) -> Layout:
        return single_layout(self._layout)

    @functools.cached_property
    def _adapter_layout(self) -> Layout:
        return self._sharded({n: TensorSpec(tuple(p.shape), "float32") for n, p in adapters(self.model.lm)})

    def _sharded(self, specs: Mapping[str, TensorSpec]) -> Layout:
        return fsdp2(specs, dist.get_world_size() // self._replicas, self._replicas)

    def stage(self, folder: Path, group: dist.ProcessGroup | None) -> Callable[[], None]:
        assert self.schedule is not None
        steps = torch.tensor(self.schedule.last_epoch)
        parts = host_copy(own_parts(self._weights() | self._moments() | {STEPS: steps}))

        def write() -> None:
            write_shards(parts, folder / SHARDS, group)
            if dist.get_rank() == 0:
                self._describe(folder)

        return write

    def _describe(self, folder: Path) -> None:
        """Write the files that other tools read. Called on rank 0."""
        assert self.config is not None
        if self._lora is not None:
            write_adapter(folder, folder / SHARDS, self._base, self._lora, self._targets)
        saved = Path(self.path) / MODEL_FOLDER
        source = str(saved) if saved.is_dir() else self.path
        tokenizer = source if self.model.has_logits or self.pictures else None
        write_described(folder, self.hf_config, tokenizer, self.config.checkpoint_hf)

    def save(self, folder: Path) -> None:
        self.stage(folder, None)()

    def load(self, folder: Path) -> None:
        assert self.optimizer is not None and self.schedule is not None
        if self._lora is None:
            require_whole(folder)
        else:
            require_adapters(folder, self._base, self._lora, self._targets)
        steps = {STEPS: torch.tensor(0)}
        shards = folder / SHARDS
        sharded = shards.is_dir()
        held = StoredShards(shards if sharded else folder).sizes
        if any(MOMENT in name and name != STEPS for name in held):
            allocate_state(self.optimizer)
            own = {name: moment.shape for name, moment in self._moments().items()}
            if beyond_adamw(held) != beyond_adamw(own):
                raise UserError(
                    f"{folder} has moments of another optimizer, or 8-bit ones in blocks that {dist.get_world_size()} "
                    "ranks would divide; set trainer.optimizer, or trainer.ranks and trainer.replicas, as in that run"
                )
        if sharded:
            read_shards(self._weights() | self._moments() | steps, shards)
        else:
            # An older format: whole tensors, experts one by one.
            language = {n.removeprefix(WEIGHTS): t for n, t in self._weights().items() if n.startswith(WEIGHTS)}
            read_shards(language, folder / MODEL_FOLDER)
            head = self.model.value_head
            values = {} if head is None else {name: parameter.detach() for name, parameter in head.named_parameters()}
            read_shards(values | self._moments() | steps, folder)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(float(steps[STEPS]))
        done = self.schedule.last_epoch = int(steps[STEPS])
        # schedule.step() would warn before the optimizer's first step.
        for group, rate, factor in zip(
            self.optimizer.param_groups, self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(done)

    def _trained(self) -> list[tuple[str, Tensor]]:
        """Return the parameters that the optimizer trains, by name."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def _weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, tied ones once; with adapters only the trained parameters."""
        named = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        if self._lora is not None:
            named = {name for name, _ in self._trained()}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in named}

    def _moments(self) -> dict[str, Tensor]:
        """Return the optimizer's moments as ``parameter|name``, which are empty before its first step."""
        assert self.optimizer is not None
        return {
            f"{name}{MOMENT}{key}": tensor
            for name, parameter in self._trained()
            for key, tensor in self.optimizer.state.get(parameter, {}).items()
            # It is the same for all parameters, and saved once as ``STEPS``.
            if key != "step"
        }

    def sleep(self) -> None:
        if not self._stays:
            self._move(to_host)

    def wake(self) -> None:
        if not self._stays:
            self._move(lambda tensor: tensor.to(self.device))

    @property
    def _stays(self) -> bool:
        """Whether weights and optimizer state are in host memory at all times."""
        return self.device == "cpu" or self._offloads

    def _move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Move weights and optimizer state. Saving and publishing work from either device, computing does not."""
        self.model._apply(moved)
        for state in self.optimizer.state.values() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = moved(value)


def _shard(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a sharded parameter, without gradient."""
    detached = parameter.detach()
    assert isinstance(detached, DTensor)
    return detached.to_local()


def _full(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank; a collective for sharded ones."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mesh_of(device: str, ranks: int, replicas: int, timeout_s: float) -> DeviceMesh:
    """Return the device mesh: one row of ranks that share one copy of the model, or HSDP's ``replicas`` rows.

    HSDP's collectives wait ``timeout_s`` at most. A collective.
    """
    kind = device.partition(":")[0]
    if replicas == 1:
        # This is the group of all ranks, which has its own deadline.
        return init_device_mesh(kind, (ranks,))
    sharing, same_shard = adjacent_and_strided(ranks // replicas, timeout_s)
    rows = torch.arange(ranks).view(replicas, -1)
    return DeviceMesh.from_group([same_shard, sharing], kind, mesh=rows, mesh_dim_names=("replicate", "shard"))


def prepare(model: Headed, config: TrainerConfig) -> None:
    """Apply compilation and activation checkpointing to a model's layers, before FSDP puts its hooks around them.

    Layers of a vision tower are not compiled, since the sizes of images differ, and keep only their input.

    Modules keep their names and class, so checkpoints and exports do not change.
    """
    whole = list(model.tower_layers()) if config.activation_checkpointing else []
    if config.activation_checkpointing == "selective":
        # Inside of what is compiled, because the compiler itself decides what of a graph is kept.
        for layer in model.decoder.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=keeping)
    elif config.activation_checkpointing:
        whole += model.decoder.layers
    if config.kernels == "compile":
        for layer in model.decoder.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    for layer in whole:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def keeping() -> tuple[Any, Any]:
    """Return the contexts of a layer's forward pass and of its second one, which takes the results of ``KEPT`` and
    ``KEPT_OF_PACKAGES``.

    The first raises UserError for an operation that changes such a result, given as its first argument. The second
    would take what was changed for the original, and torch notices only some of these cases.
    """
    kept: set[int] = set()

    def choose(context: SelectiveCheckpointContext, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        if operation in KEPT or (isinstance(operation, OpOverload) and operation.name() in KEPT_OF_PACKAGES):
            if not context.is_recompute:
                result = context.op_output[0] if isinstance(context.op_output, tuple) else context.op_output
                kept.add(result.untyped_storage()._cdata)
            return CheckpointPolicy.MUST_SAVE
        if getattr(operation, "_schema", None) is not None and operation._schema.is_mutable and args:
            changed = args[0]
            if isinstance(changed, Tensor) and changed.untyped_storage()._cdata in kept:
                raise UserError(
                    f"trainer.activation_checkpointing=selective: layers of this model change a product or attention "
                    f"in place ({operation}); use true"
                )
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(choose)
    return contexts


def shard(model: Any, mesh: DeviceMesh, dtype: torch.dtype, cpu_offload: bool = False) -> Any:
    """Put a ``model.Headed`` under ``fully_shard``; it remains the same module and becomes an FSDPModule too.

    It computes in ``dtype``, but values in float32: they are regression targets, and bfloat16 has three digits.
    """
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    keep = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: Tensor) -> Shard:
        return Shard(sharded_dimension(parameter.shape, ranks))

    spread = functools.partial(fully_shard, mesh=mesh, offload_policy=keep, shard_placement_fn=placement)
    for layer in model.decoder.layers:
        spread(layer, mp_policy=policy)
    if model.value_head is not None:
        spread(model.value_head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    return spread(model, mp_policy=policy)


def allocate(model: Any, device: str) -> None:
    """Give a sharded ``model.Headed`` memory for this rank's part of the parameters that have none yet."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
