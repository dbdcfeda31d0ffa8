"""Muon under FSDP2: orthogonalised updates for the matrices of a decoder's layers, AdamW for everything else.

Orthogonalising needs whole matrices. The ranks of a copy share them out: each collects one, in bfloat16, works on it
and sends the others their part of the result, so that all have what one process would have computed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import _muon

# What a step keeps of the mean of earlier gradients; torch's default.
MOMENTUM = 0.95
# The name of this mean in an optimizer's state, as torch has it.
MUON_MOMENT = "momentum_buffer"


class Muon(torch.optim.AdamW):
    """``torch.optim.Muon`` for groups of parameters with ``muon=True``, for all others ``torch.optim.AdamW``.

    Such a group has matrices [rows, columns], or stacks of experts [experts, rows, columns], each of whose matrices is
    one for Muon. Their steps are scaled to the size of AdamW's, by 0.2 sqrt(max(rows, columns)), so that learning rate
    and weight decay mean the same for both (Moonlight, arXiv:2502.16982, section 2.2).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. A collective of the ranks that share a copy of sharded parameters."""
        for group in self.param_groups:
            if group.get("muon"):
                parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                updates = (self._update(parameter) for parameter in parameters)
                for parameter, direction in zip(parameters, orthogonal(updates), strict=True):
                    rate = _muon._adjust_lr(group["lr"], "match_rms_adamw", parameter.shape[-2:])
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


def orthogonal(updates: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield this rank's part of each matrix, orthogonalised; ``updates`` are bfloat16, whole or sharded along one
    dimension. A collective for sharded ones."""
    waiting: list[DTensor] = []
    for update in updates:
        if _is_whole(update):
            # What is sharded by experts needs no other rank.
            yield from _exchanged(waiting)
            waiting = []
            yield _orthogonal(local(update))
        else:
            assert isinstance(update, DTensor)
            waiting.append(update)
            if len(waiting) == _sharing(update).size():
                yield from _exchanged(waiting)
                waiting = []
    yield from _exchanged(waiting)


def _exchanged(updates: Sequence[DTensor]) -> Iterator[Tensor]:
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
        whole = _orthogonal(torch.cat(parts, along))
        lengths = [shape[along] for shape in shapes]
        collected = torch.cat([part.flatten() for part in whole.split(lengths, along)])
    returned = mine[0].new_empty(sum(sent))
    dist.all_to_all_single(returned, collected, sent, received, group=group)
    for part, numbers in zip(mine, returned.split(sent), strict=False):
        yield numbers.view(part.shape)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Orthogonalise a matrix, or each of a stack, by torch's Newton-Schulz iteration with its default coefficients."""
    if matrix.dim() == 3:
        return torch.stack([_orthogonal(single) for single in matrix]) if len(matrix) else matrix
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
