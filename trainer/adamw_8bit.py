"""AdamW whose moments take a byte a weight, by torchao: 8-bit codes in blocks of 256, each with a float32 scale.

torchao's own optimizer keeps tensor subclasses inside of DTensors, and quantises by what a rank happens to hold. This
one keeps codes and scales as tensors that are sharded as their parameter, so that checkpoints and a sleeping trainer
treat them as any other state, and it quantises by the whole parameter, so that all ranks do the same.
"""

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_async.errors import UserError
from rl_async.trainer.muon import local

log = logging.getLogger("rl_async.trainer")

# Numbers that share a scale (arXiv:2110.02861, section 2.1, and torchao's default for AdamW).
BLOCK = 256
# A parameter with fewer numbers keeps float32 moments, as in torchao and bitsandbytes.
LEAST_NUMBERS = 4096
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
                "equal parts of whole blocks of %d; the memory plan counts all of them in 8 bits",
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
    """Whether ranks hold equal parts of the parameter that are whole blocks, so that its moments can be codes."""
    ranks, along = _divided(parameter)
    return parameter.shape[along] % ranks == 0 and math.prod(parameter.shape[along:]) // ranks % BLOCK == 0


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
