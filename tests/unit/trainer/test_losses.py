"""Advantages, losses, weights and KL against float64 formulas written out plainly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.configs.algorithm import AlgorithmConfig
from rl_async.trainer.aggregation import AGGREGATIONS, count
from rl_async.trainer.kl import k3
from rl_async.trainer.losses import LossInputs, ppo, reinforce


def inputs(log_ratio: list[float], advantage: float, weight: float = 1.0) -> LossInputs:
    proximal = torch.full((1, len(log_ratio)), -1.0, dtype=torch.float64)
    return LossInputs(
        logprobs=proximal + torch.tensor([log_ratio], dtype=torch.float64),
        proximal=proximal,
        behaviour=proximal,
        advantages=torch.full_like(proximal, advantage),
        weights=torch.full_like(proximal, weight),
        mask=torch.ones_like(proximal, dtype=torch.bool),
        options=AlgorithmConfig(),
    )


@given(st.floats(-2, 2), st.floats(-3, 3), st.floats(0, 2))
def test_ppo_is_the_clipped_surrogate_with_unequal_bounds(log_ratio: float, advantage: float, weight: float) -> None:
    ratio = math.exp(log_ratio)
    expected = -weight * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert ppo(inputs([log_ratio], advantage, weight)).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_reinforce_ignores_the_ratio() -> None:
    assert reinforce(inputs([0.5], 2.0, 1.5)).item() == pytest.approx(-1.5 * 2.0 * (-1.0 + 0.5))


@given(st.floats(-5, 0), st.floats(-5, 0))
def test_k3_is_never_negative_and_zero_only_at_equality(a: float, b: float) -> None:
    got = k3(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)).item()
    assert got == pytest.approx(math.exp(b - a) - (b - a) - 1, abs=1e-12)
    assert got >= 0


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregation_does_not_depend_on_the_split(mode: str) -> None:
    torch.manual_seed(0)
    values, mask, weights = torch.randn(7, 5).double(), torch.rand(7, 5) > 0.4, torch.rand(7).double()
    counts = count(mask, weights, width=5)
    whole = AGGREGATIONS[mode](values, mask, weights, counts)
    for parts in (1, 2, 4, 7):
        chunks = zip(values.chunk(parts), mask.chunk(parts), weights.chunk(parts), strict=True)
        split = sum(AGGREGATIONS[mode](v, m, w, counts) for v, m, w in chunks)
        assert split.item() == pytest.approx(whole.item(), abs=1e-12)
