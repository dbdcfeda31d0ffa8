"""Advantages, losses, weights and KL against float64 formulas written out plainly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.trainer.advantages import EPSILON, advantages
from rl_async.trainer.correction import MismatchMeter, truncated_importance_weights
from rl_async.trainer.losses import LossInputs, k3_kl, ppo, reinforce, token_mean


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=5), st.randoms())
def test_grpo_matches_plain_statistics_in_any_row_order(groups: list[list[float]], random) -> None:
    rows = [(g, r) for g, rewards in enumerate(groups) for r in rewards]
    random.shuffle(rows)
    result = advantages("grpo", [r for _, r in rows], [g for g, _ in rows])
    for (group, reward), got in zip(rows, result.tolist(), strict=True):
        values = np.array(groups[group], dtype=np.float64)
        std = values.std(ddof=1) if len(values) > 1 else 0.0
        assert got == pytest.approx((reward - values.mean()) / (std + EPSILON), rel=1e-4, abs=1e-4)


def test_grpo_gives_nothing_to_groups_without_signal() -> None:
    assert advantages("grpo", [1.0, 1.0, 1.0, 5.0], [7, 7, 7, 9]).tolist() == [0, 0, 0, 0]


def inputs(log_ratio: list[float], advantage: float, weight: float = 1.0) -> LossInputs:
    proximal = torch.full((1, len(log_ratio)), -1.0, dtype=torch.float64)
    return LossInputs(
        proximal + torch.tensor([log_ratio], dtype=torch.float64),
        proximal,
        torch.tensor([[advantage]], dtype=torch.float64),
        torch.full_like(proximal, weight),
        0.2,
        0.28,
    )


@given(st.floats(-2, 2), st.floats(-3, 3), st.floats(0, 2))
def test_ppo_is_the_clipped_surrogate_with_unequal_bounds(log_ratio: float, advantage: float, weight: float) -> None:
    ratio = math.exp(log_ratio)
    expected = -weight * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert ppo(inputs([log_ratio], advantage, weight)).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_reinforce_ignores_the_ratio() -> None:
    assert reinforce(inputs([0.5], 2.0, 1.5)).item() == pytest.approx(-1.5 * 2.0 * (-1.0 + 0.5))


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.floats(0.1, 10))
def test_truncated_weights(log_ratios: list[float], cap: float) -> None:
    behaviour = torch.zeros(1, len(log_ratios), dtype=torch.float64)
    got = truncated_importance_weights(torch.tensor([log_ratios], dtype=torch.float64), behaviour, cap)
    for value, log_ratio in zip(got[0].tolist(), log_ratios, strict=True):
        assert value == pytest.approx(min(math.exp(min(max(log_ratio, -20), 20)), cap))


@given(st.floats(-5, 0), st.floats(-5, 0))
def test_k3_is_never_negative_and_zero_only_at_equality(a: float, b: float) -> None:
    got = k3_kl(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)).item()
    assert got == pytest.approx(math.exp(b - a) - (b - a) - 1, abs=1e-12)
    assert got >= 0


def test_token_mean_does_not_depend_on_the_split() -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(7, 5, dtype=torch.float64), torch.rand(7, 5) > 0.4
    total = int(mask.sum())
    whole = token_mean(values, mask, total)
    for parts in (1, 2, 4, 7):
        split = sum(token_mean(v, m, total) for v, m in zip(values.chunk(parts), mask.chunk(parts), strict=True))
        assert split.item() == pytest.approx(whole.item(), abs=1e-12)


def test_mismatch_meter_matches_its_formulas_however_tokens_arrive() -> None:
    torch.manual_seed(1)
    proximal, behaviour = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    mask = torch.rand(6, 4) > 0.3
    meter = MismatchMeter()
    for part in range(3):
        rows = slice(2 * part, 2 * part + 2)
        meter.add(proximal[rows], behaviour[rows], mask[rows])
    d = (proximal - behaviour)[mask].numpy()
    w = np.exp(d)
    got = meter.metrics()
    assert got["correction/kl"] == pytest.approx((-d).mean())
    assert got["correction/k3"] == pytest.approx((w - 1 - d).mean())
    assert got["correction/ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert got["correction/logprob_diff_max"] == pytest.approx(np.abs(d).max())
