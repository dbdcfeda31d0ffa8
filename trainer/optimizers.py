"""The optimizers of FSDP2: AdamW, AdamW with moments of one byte a weight, and Muon.

Muon orthogonalises updates for the matrices of a decoder's layers and leaves everything else to AdamW. Orthogonalising
needs whole matrices. The ranks of a copy share them out: each collects one, in bfloat16, works on it and sends the
others their part of the result, so that all have what one process would have computed.

8-bit AdamW keeps torchao's codes in blocks of 256, each with a float32 scale. torchao's own optimizer keeps tensor
subclasses inside of DTensors, and quantises by what a rank happens to hold. This one keeps codes and scales as tensors
that are sharded as their parameter, so that checkpoints and a sleeping trainer treat them as any other state, and it
quantises by the whole parameter, so that all ranks do the same.
"""

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import _muon
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.backend import ADAM_BETA1
from rl_async.trainer.model import Headed
from rl_async.weight_sync.layout import BLOCK, LEAST_NUMBERS, STACKED_FOR_ENGINES, expert_parts, in_blocks

log = logging.getLogger("rl_async.trainer")

# What a step keeps of the mean of earlier gradients; torch's default.
MOMENTUM = 0.95
# The name of this mean in an optimizer's state, as torch has it.
MUON_MOMENT = "momentum_buffer"
# How a matrix holds an expert's gate and up projection: the former's rows first, or columns that alternate.
Joined = Literal["halves", "alternate"]


class Muon(torch.optim.AdamW):
    """``torch.optim.Muon`` for groups of parameters with ``muon=True``, for all others ``torch.optim.AdamW``.

    Such a group has matrices [rows, columns], or stacks of experts [experts, rows, columns], each of whose matrices is
    one for Muon, or two with ``joined``, an expert's gate and up projection. Their steps are scaled to the size of
    AdamW's, by 0.2 sqrt(max(rows, columns)), so that learning rate and weight decay mean the same for both (Moonlight,
    arXiv:2502.16982, section 2.2).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. A collective of the ranks that share a copy of sharded parameters."""
        for group in self.param_groups:
            if group.get("muon"):
                parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                updates = (self._update(parameter) for parameter in parameters)
                joined = group.get("joined")
                for parameter, direction in zip(parameters, orthogonal(updates, joined), strict=True):
                    rows, columns = parameter.shape[-2:]
                    shape = torch.Size((rows // (1 + (joined == "halves")), columns // (1 + (joined == "alternate"))))
                    rate = _muon._adjust_lr(group["lr"], "match_rms_adamw", shape)
                    own = local(parameter)
                    own.mul_(1 - group["lr"] * group["weight_decay"])
                    own.add_(direction, alpha=-rate)
                    # AdamW passes over parameters without a gradient.
                    parameter.grad = None
        super().step(closure)

    def _update(self, parameter: Tensor) -> Tensor:
        """Return what is to be orthogonalised: Nesterov's momentum, in the type in which that is done."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if MUON_MOMENT not in state:
            state[MUON_MOMENT] = torch.zeros_like(gradient)
        momentum = state[MUON_MOMENT]
        local(momentum).lerp_(local(gradient), 1 - MOMENTUM)
        update = local(gradient).lerp(local(momentum), MOMENTUM).bfloat16()
        if not isinstance(parameter, DTensor):
            return update
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(update, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def orthogonal(updates: Iterable[Tensor], joined: Joined | None = None) -> Iterator[Tensor]:
    """Yield this rank's part of each matrix, orthogonalised, of ``joined`` ones each by itself.

    ``updates`` are bfloat16, whole or sharded along one dimension. A collective for sharded ones.
    """
    waiting: list[DTensor] = []
    for update in updates:
        if _is_whole(update):
            # What is sharded by experts needs no other rank.
            yield from _exchanged(waiting, joined)
            waiting = []
            yield _orthogonal(local(update), joined)
        else:
            assert isinstance(update, DTensor)
            waiting.append(update)
            if len(waiting) == _sharing(update).size():
                yield from _exchanged(waiting, joined)
                waiting = []
    yield from _exchanged(waiting, joined)


def _exchanged(updates: Sequence[DTensor], joined: Joined | None) -> Iterator[Tensor]:
    """Orthogonalise at most as many matrices as ranks share a copy, one on each."""
    if not updates:
        return
    group = _sharing(updates[0])
    ranks, rank = group.size(), group.rank()
    mine = [update.to_local() for update in updates]
    sent = [part.numel() for part in mine] + [0] * (ranks - len(updates))
    shapes = _part_shapes(updates[rank], ranks) if rank < len(updates) else [(0,)] * ranks
    received = [math.prod(shape) for shape in shapes]
    collected = mine[0].new_empty(sum(received))
    dist.all_to_all_single(collected, torch.cat([part.flatten() for part in mine]), received, sent, group=group)
    if rank < len(updates):
        along = _along(updates[rank])
        parts = [part.view(shape) for part, shape in zip(collected.split(received), shapes, strict=True)]
        whole = _orthogonal(torch.cat(parts, along), joined)
        lengths = [shape[along] for shape in shapes]
        collected = torch.cat([part.flatten() for part in whole.split(lengths, along)])
    returned = mine[0].new_empty(sum(sent))
    dist.all_to_all_single(returned, collected, sent, received, group=group)
    for part, numbers in zip(mine, returned.split(sent), strict=False):
        yield numbers.view(part.shape)


def _orthogonal(matrix: Tensor, joined: Joined | None = None) -> Tensor:
    """Orthogonalise a matrix, or each of a stack, by torch's Newton-Schulz iteration with its default coefficients."""
    if matrix.dim() == 3:
        return torch.stack([_orthogonal(single, joined) for single in matrix]) if len(matrix) else matrix
    if joined == "halves":
        return torch.cat([_orthogonal(half) for half in matrix.chunk(2)])
    if joined == "alternate":
        return torch.stack([_orthogonal(matrix[:, first::2]) for first in range(2)], -1).flatten(-2)
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, _muon.DEFAULT_NS_STEPS, _muon.EPS)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharing(tensor: DTensor) -> dist.ProcessGroup:
    """Return the group of the ranks that share a copy: the last dimension of the mesh, as ``fsdp2.mesh_of`` has it."""
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)


def _along(tensor: DTensor) -> int:
    placement = tensor.placements[-1]
    assert isinstance(placement, Shard)
    return placement.dim


def _is_whole(tensor: Tensor) -> bool:
    """Tell whether a rank has every matrix, of which it has anything, whole."""
    return not isinstance(tensor, DTensor) or _sharing(tensor).size() == 1 or (tensor.dim() == 3 and not _along(tensor))


def _part_shapes(tensor: DTensor, ranks: int) -> list[tuple[int, ...]]:
    """Return the shape of each rank's part, which is that of ``torch.chunk``; the last ranks may have none."""
    along = _along(tensor)
    size = tensor.shape[along]
    step = -(-size // ranks)
    lengths = [max(0, min(step, size - rank * step)) for rank in range(ranks)]
    return [(*tensor.shape[:along], length, *tensor.shape[along + 1 :]) for length in lengths]


# Suffixes of the state's names for a moment's codes, of the parameter's shape, and for their scales.
CODES, SCALES = "_codes", "_scales"


class AdamW8bit(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with both moments of matrices in 8 bits, by the arithmetic of ``torchao.optim.AdamW8bit``.

    Vectors, and matrices that ranks divide into other than equal parts of whole blocks, keep float32 moments.
    Raises UserError where torchao is missing.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8
    ) -> None:
        torchao()
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        large = [one for group in self.param_groups for one in group["params"] if _large(one)]
        left = sum(one.numel() for one in large if not _in_blocks(one))
        if left:
            log.warning(
                "trainer.optimizer=adamw_8bit: %.0f %% of the matrices keep float32 moments, since ranks do not hold "
                "equal parts of whole blocks of %d",
                *(100 * left / sum(one.numel() for one in large), BLOCK),
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. Not a collective: moments and weights are a rank's own."""
        update, OptimState8bit = torchao()
        for group in self.param_groups:
            # A float would be a constant of a compiled graph, and each rate a graph of its own.
            rate = torch.tensor(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state |= _zeros(parameter, "exp_avg") | _zeros(parameter, "exp_avg_sq")
                state["step"] += 1
                weights, moments = local(parameter), []
                for name in ("exp_avg", "exp_avg_sq"):
                    if name in state:
                        moments.append(local(state[name]))
                    else:
                        codes, scales = local(state[name + CODES]), local(state[name + SCALES])
                        signed = name == "exp_avg"
                        values = _values(signed, weights.device)
                        moments.append(OptimState8bit(codes, scales.flatten(), values, signed, torch.float32))
                betas = group["betas"]
                numbers = rate, *betas, group["weight_decay"], group["eps"]
                # As torchao does, but on a CPU, where compilation takes a minute and a C++ compiler.
                compiled = update if weights.device.type == "cpu" else _compiled()
                with torch._dynamo.utils.disable_cache_limit():
                    compiled(weights, local(parameter.grad), state["step"], *moments, None, *numbers, True, False)


@functools.cache
def torchao() -> tuple[Any, Any]:
    """Return torchao's step of one parameter and its class of 8-bit moments. Raises UserError where it is missing."""
    try:
        from torchao.optim.adam import single_param_adam
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise UserError(
            f"trainer.optimizer=adamw_8bit needs torchao 0.18, which cannot be imported ({error}); install it with "
            "`pip install 'rl-async[torchao]'`, or use adamw"
        ) from error
    return single_param_adam, OptimState8bit


@functools.cache
def _compiled() -> Any:
    return torch.compile(torchao()[0], fullgraph=True, dynamic=False)


@functools.cache
def _values(signed: bool, device: torch.device) -> Tensor:
    """Return the numbers that codes stand for, between -1 or 0 and 1, float32 [256]."""
    values: Tensor = torchao()[1].zeros((BLOCK,), signed, BLOCK, device).qmap
    return values


def _divided(parameter: Tensor) -> tuple[int, int]:
    """Return the number of ranks that divide the parameter, and the dimension along which they do."""
    if not isinstance(parameter, DTensor):
        return 1, 0
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard)
    return parameter.device_mesh.size(parameter.device_mesh.ndim - 1), placement.dim


def _large(parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and parameter.numel() >= LEAST_NUMBERS


def _in_blocks(parameter: Tensor) -> bool:
    return in_blocks(parameter.shape, *_divided(parameter))


def _zeros(parameter: Tensor, name: str) -> dict[str, Tensor]:
    """Return a moment before the first step: codes of the parameter's shape and their scales, or float32 numbers.

    A scale is of 256 numbers that follow one another in a rank's part, so scales [experts, blocks of one] of a stack
    that is divided by rows of each expert are sharded along the blocks, and others [blocks] as the first dimension.
    """
    if not (_large(parameter) and _in_blocks(parameter)):
        return {name: torch.zeros_like(parameter)}
    (ranks, along), shape = _divided(parameter), parameter.shape
    scales = torch.zeros(*shape[:along], math.prod(shape[along:]) // ranks // BLOCK, device=parameter.device)
    if isinstance(parameter, DTensor):
        placements = [*[Replicate()] * (parameter.device_mesh.ndim - 1), Shard(along)]
        scales = DTensor.from_local(scales, parameter.device_mesh, placements, run_check=False)
    return {name + CODES: torch.zeros_like(parameter, dtype=torch.uint8), name + SCALES: scales}


def adamw_form(device: str) -> dict[str, bool]:
    """Return the fastest form of torch's AdamW on a type of device: one kernel for all, or one per operation.

    Both read and write every element once per kernel, so that one kernel takes a fraction of the time.
    """
    if device.partition(":")[0] in _get_fused_kernels_supported_devices():
        return {"fused": True}
    return {"foreach": True}


def parameter_groups(
    model: Headed, trained: Sequence[tuple[str, Tensor]], config: TrainerConfig
) -> list[dict[str, Any]]:
    """Divide the parameters that are ``trained``, by name, into the optimizer's groups.

    Those of a vision tower have a learning rate of their own. With Muon, so do the matrices of the decoder's layers,
    among them experts, that it trains; embeddings, heads, norms, biases and convolutions are AdamW's. Experts' gate and
    up projections, which one tensor holds, are matrices of their own for Muon.
    """
    tower = {parameter for part in model.tower for parameter in part.parameters()}
    layers = set(model.decoder.layers.parameters()) if config.optimizer == "muon" else set()
    seen: list[Tensor] = []
    matrices: list[Tensor] = []
    pairs: list[Tensor] = []
    others: list[Tensor] = []
    alternate = model.lm.config.model_type in STACKED_FOR_ENGINES
    for name, parameter in trained:
        if parameter in tower:
            seen.append(parameter)
        elif parameter not in layers or name.endswith("bias"):
            others.append(parameter)
        elif parameter.dim() == 2 or expert_parts(name, parameter.shape):
            (pairs if name.endswith(".experts.gate_up_proj") else matrices).append(parameter)
        else:
            others.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": matrices, "muon": True},
        {"params": pairs, "muon": True, "joined": "alternate" if alternate else "halves"},
        {"params": seen, "lr": config.vision_learning_rate or config.learning_rate},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(groups: list[dict[str, Any]], config: TrainerConfig, device: str) -> torch.optim.Optimizer:
    """Return the optimizer of ``groups`` of parameters, which are kept on ``device``, float32 each.

    Raises UserError for one whose package is missing.
    """
    rate, betas, decay = config.learning_rate, (ADAM_BETA1, config.beta2), config.weight_decay
    if config.optimizer == "adamw_8bit":
        return AdamW8bit(groups, lr=rate, betas=betas, weight_decay=decay)
    kind = Muon if config.optimizer == "muon" else torch.optim.AdamW
    return kind(groups, lr=rate, betas=betas, weight_decay=decay, **adamw_form(device))


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first step makes, so that a checkpoint can be read into it.

    No weight changes: the step has gradients of 0 and a learning rate of 0.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
