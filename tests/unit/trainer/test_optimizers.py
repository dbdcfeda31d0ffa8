"""One kernel of AdamW does what its single operations do."""

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.fsdp2 import adamw_form, allocate_state, build_optimizer

STEPS = 5
RATE, DECAY = 0.01, 0.1
# Roundings of one step in either form: the decay, two moments of three each, a root, two corrections, a quotient.
ROUNDINGS = 16


def parameters() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in ((33, 17), (65,), (3, 5, 7))]


def train(optimizer: torch.optim.Optimizer, those: list[Tensor], steps: int = STEPS) -> None:
    """Take steps on gradients that do not depend on the weights, so that nothing amplifies a rounding."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in those:
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter)
        optimizer.step()
        optimizer.zero_grad()


def test_a_cpu_has_the_fused_kernel_and_an_unknown_device_has_not() -> None:
    assert adamw_form("cpu") == adamw_form("cuda:3") == {"fused": True}
    assert adamw_form("meta") == {"foreach": True}


def test_the_fused_kernel_differs_by_roundings() -> None:
    """From single operations by those of either, and from the same in float64."""
    fused, plain, exact = parameters(), parameters(), [p.detach().double().requires_grad_() for p in parameters()]
    train(build_optimizer([{"params": fused}], TrainerConfig(learning_rate=RATE, weight_decay=DECAY), "cpu"), fused)
    for those in (plain, exact):
        options = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": DECAY, "foreach": False}
        train(torch.optim.AdamW(those, **options), those)  # type: ignore[arg-type]
    for got, single, right in zip(fused, plain, exact, strict=True):
        # A step moves a weight by up to about the rate, and rounds the weight itself once or twice.
        bound = STEPS * torch.finfo(torch.float32).eps * (ROUNDINGS * RATE + 2 * right.abs())
        assert ((got - right).abs() <= bound).all() and ((got - single).abs() <= 2 * bound).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_allocated_state_is_that_of_no_step_and_changes_no_weight(device: str) -> None:
    """On ``meta``, whose AdamW is not fused, the weights are on the CPU all the same."""
    those = parameters()
    optimizer = build_optimizer([{"params": those, "lr": 0.5}], TrainerConfig(weight_decay=DECAY), device)
    allocate_state(optimizer)
    assert all(a.equal(b) for a, b in zip(those, parameters(), strict=True))
    assert all(p.grad is None for p in those) and [g["lr"] for g in optimizer.param_groups] == [0.5]
    for state in optimizer.state.values():
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
