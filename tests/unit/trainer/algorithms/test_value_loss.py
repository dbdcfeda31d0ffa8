"""The critic's loss and its explained variance against plain numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.trainer.algorithms.advantages import explained_variance, value_loss

numbers = st.floats(-5, 5)


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@given(numbers, numbers, numbers, st.none() | st.floats(0.01, 2))
def test_the_loss_is_the_larger_of_two_squared_errors(v: float, old: float, target: float, clip: float | None) -> None:
    expected = 0.5 * (v - target) ** 2
    if clip is not None:
        kept = old + min(max(v - old, -clip), clip)
        expected = max(expected, 0.5 * (kept - target) ** 2)
    assert value_loss(one(v), one(old), one(target), clip).item() == pytest.approx(expected, abs=1e-12)


@given(numbers, numbers, st.floats(0.01, 2))
def test_before_the_first_step_clipping_changes_nothing(v: float, target: float, clip: float) -> None:
    clipped, plain = (value_loss(one(v), one(v), one(target), c) for c in (clip, None))
    assert clipped.item() == pytest.approx(plain.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [
        (0.1, 0.1 - 1.0),  # within the range: the plain error's gradient
        (0.5, 0.0),  # moved far enough towards the return
        (-0.5, -0.5 - 1.0),  # moved away: pulled back
        (3.0, 3.0 - 1.0),  # overshot the return by more than the kept value lacks
    ],
)
def test_gradient_by_where_the_value_moved(value: float, gradient: float) -> None:
    v = one(value).requires_grad_()
    value_loss(v, one(0.0), one(1.0), 0.2).sum().backward()
    assert v.grad is not None
    assert v.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradcheck(clip: float | None) -> None:
    torch.manual_seed(0)
    values, old, returns = torch.randn(3, 2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip), (values.requires_grad_(),))


def test_explained_variance() -> None:
    torch.manual_seed(0)
    returns, noise = torch.randn(2, 5, 7, dtype=torch.float64)
    mask = torch.rand(5, 7) > 0.3
    values = returns + 0.5 * noise
    target, error = returns[mask].tolist(), (0.5 * noise)[mask].tolist()

    def variance(items: list[float]) -> float:
        mean = sum(items) / len(items)
        return sum((item - mean) ** 2 for item in items) / len(items)

    expected = 1 - variance(error) / variance(target)
    assert explained_variance(values, returns, mask) == pytest.approx(expected)
    garbage = torch.where(mask, values, math.nan)
    assert explained_variance(garbage, returns, mask) == pytest.approx(expected)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(values * 1e-3, returns * 1e-3, mask) == pytest.approx(expected)
    assert explained_variance(torch.ones_like(returns), returns, mask) == pytest.approx(0.0)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    mask = torch.ones((1, 2), dtype=torch.bool)
    assert explained_variance(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), mask) == 0.0
    assert explained_variance(torch.ones(1, 2), torch.ones(1, 2), ~mask) == 0.0
