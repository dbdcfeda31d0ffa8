"""Advantages, losses, weights and KL against float64 formulas written out plainly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.configs.algorithm import AdvantageOptions, AlgorithmConfig
from rl_async.trainer.advantages import EPSILON, AdvantageInputs, grpo
from rl_async.trainer.aggregation import AGGREGATIONS, count
from rl_async.trainer.kl import k3
from rl_async.trainer.losses import LossInputs, ppo, reinforce


def advantage_inputs(rewards: list[float], groups: list[int]) -> AdvantageInputs:
    """One sampled token per row."""
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    values = torch.tensor(rewards, dtype=torch.float64)
    return AdvantageInputs(
        rewards=values,
        token_rewards=values[:, None],
        mask=mask,
        groups=torch.tensor(groups),
        scored=mask[:, 0],
        row_weights=torch.ones(len(rewards), dtype=torch.float64),
        turns=torch.zeros_like(mask, dtype=torch.int64),
        options=AdvantageOptions(),
        parts={},
    )


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=5), st.randoms())
def test_grpo_matches_plain_statistics_in_any_row_order(groups: list[list[float]], random) -> None:
    rows = [(g, r) for g, rewards in enumerate(groups) for r in rewards]
    random.shuffle(rows)
    result = grpo(advantage_inputs([r for _, r in rows], [g for g, _ in rows]))
    for (group, reward), got in zip(rows, result[:, 0].tolist(), strict=True):
        values = np.array(groups[group], dtype=np.float64)
        std = values.std(ddof=1) if len(values) > 1 else 0.0
        assert got == pytest.approx((reward - values.mean()) / (std + EPSILON), rel=1e-4, abs=1e-4)


def test_grpo_gives_nothing_to_groups_without_signal() -> None:
    assert grpo(advantage_inputs([1.0, 1.0, 1.0, 5.0], [7, 7, 7, 9]))[:, 0].tolist() == [0, 0, 0, 0]


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
