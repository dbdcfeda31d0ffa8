"""GAE and whitening against loops over plain numbers."""

import dataclasses
import math
import random

import msgspec
import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AdvantageOptions
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs, gae, gae_advantage, whiten

SEEDS = range(8)


def batch(seed: int, rows: int = 6, width: int = 9) -> AdvantageInputs:
    """Rows whose sampled tokens stand in several stretches, with NaN wherever nothing was sampled."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand((rows, width), generator=draw) > 0.4
    mask[0] = False  # a row of which nothing trains
    mask[1, -1] = True  # one without padding
    numbers = torch.randn((2, rows, width), generator=draw, dtype=torch.float64)
    rewards, values = torch.where(mask, numbers, math.nan)
    scored = torch.ones(rows, dtype=torch.bool)
    scored[2] = False
    return AdvantageInputs(
        rewards=torch.zeros(rows, dtype=torch.float64),
        token_rewards=rewards,
        mask=mask,
        groups=torch.arange(rows) // 2,
        scored=scored,
        row_weights=torch.ones(rows, dtype=torch.float64),
        lengths=mask.sum(1).double(),
        turns=torch.where(mask, 0, -1),
        options=AdvantageOptions(gamma=0.9, lam=0.8),
        parts={},
        values=values,
    )


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_k = sum over l of (gamma lam)^l delta_{k+l}, the sum written out as it stands in eq. 16 of the paper."""
    steps = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[k] + gamma * after[k] - values[k] for k in range(steps)]
    return [sum((gamma * lam) ** (k - start) * delta[k] for k in range(start, steps)) for start in range(steps)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.97, 0.0), (1.0, 1.0)])
def test_gae_is_the_sum_of_the_paper_over_sampled_tokens_only(seed: int, gamma: float, lam: float) -> None:
    x = batch(seed)
    assert x.values is not None
    advantages, returns = gae(x.token_rewards, x.values, x.mask, gamma, lam)
    assert advantages.dtype == returns.dtype == torch.float64
    for row in range(len(x.mask)):
        picked = x.mask[row]
        rewards, values = x.token_rewards[row, picked].tolist(), x.values[row, picked].tolist()
        expected = by_hand(rewards, values, gamma, lam)
        assert advantages[row, picked].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns[row, picked].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=True)], abs=1e-12
        )
        assert not advantages[row, ~picked].any() and not returns[row, ~picked].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_that_a_limit_cut_goes_on_with_the_critics_last_value(seed: int) -> None:
    x = batch(seed)
    assert x.values is not None
    cut = torch.arange(len(x.mask)) % 2 == 1
    ended, _ = gae(x.token_rewards, x.values, x.mask, 0.9, 0.8)
    advantages, returns = gae(x.token_rewards, x.values, x.mask, 0.9, 0.8, cut)
    for row in range(len(x.mask)):
        picked = x.mask[row]
        rewards, values = x.token_rewards[row, picked].tolist(), x.values[row, picked].tolist()
        if not cut[row] or not values:
            assert torch.equal(advantages[row], ended[row])
            continue
        rewards[-1] += 0.9 * values[-1]
        assert advantages[row, picked].tolist() == pytest.approx(by_hand(rewards, values, 0.9, 0.8), abs=1e-12)
        assert returns[row, picked].tolist() == pytest.approx(
            (advantages[row, picked] + x.values[row, picked]).tolist()
        )


def test_rows_bootstrap_by_the_option_alone() -> None:
    x = dataclasses.replace(batch(3), cut=torch.tensor([True] * 6))
    plain = gae_advantage(dataclasses.replace(x, cut=None))
    assert torch.equal(gae_advantage(x), plain)
    on = msgspec.structs.replace(x.options, bootstrap_cut=True)
    assert not torch.equal(gae_advantage(dataclasses.replace(x, options=on)), plain)


def test_whitening_is_the_formula_of_verl_and_trl() -> None:
    """(A - mean) * rsqrt(var + 1e-8), var unbiased: a deviation of 1e-4 is not taken for a signal of 1."""
    for scale in (1.0, 1e-4, 1e-6):
        values = scale * torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
        expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
        assert whiten(values, torch.ones_like(values, dtype=torch.bool)).tolist()[0] == pytest.approx(
            expected.tolist()[0], rel=1e-12
        )


def test_with_lambda_one_returns_are_discounted_sums_whatever_the_critic_says() -> None:
    x = batch(1)
    rewards = torch.where(x.mask, x.token_rewards, 0.0)
    for values in (torch.zeros_like(rewards), torch.randn_like(rewards)):
        _, returns = gae(rewards, values, x.mask, 0.9, 1.0)
        for row in range(len(x.mask)):
            sampled = rewards[row, x.mask[row]].tolist()
            expected = [sum(0.9 ** (j - k) * r for j, r in enumerate(sampled) if j >= k) for k in range(len(sampled))]
            assert returns[row, x.mask[row]].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_critic_that_knows_the_outcome_leaves_no_advantage() -> None:
    mask = torch.tensor([[False, True, True, False, True, False]])
    rewards = torch.where(torch.arange(6) == 4, 1.0, 0.0)[None].double()
    advantages, returns = gae(rewards, torch.ones_like(rewards), mask, 1.0, 0.95)
    assert not advantages.any()
    assert returns.tolist() == [[0, 1, 1, 0, 1, 0]]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_registered_estimator_whitens_over_sampled_tokens_of_scored_rows(seed: int) -> None:
    x = batch(seed)
    assert x.values is not None
    rows = [r for r in range(len(x.mask)) if x.scored[r]]
    raw = {
        row: by_hand(x.token_rewards[row, x.mask[row]].tolist(), x.values[row, x.mask[row]].tolist(), 0.9, 0.8)
        for row in rows
    }
    every = [a for row in rows for a in raw[row]]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / (len(every) - 1))
    got = ADVANTAGES["gae"](x)
    for row in rows:
        expected = [(a - mean) / std for a in raw[row]]
        assert got[row, x.mask[row]].tolist() == pytest.approx(expected, abs=1e-6)
    assert not got[2].any() and not got[~x.mask].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_and_the_order_of_rows_change_nothing(seed: int) -> None:
    x = batch(seed)
    expected = gae_advantage(x)
    order = list(range(len(x.mask)))
    random.Random(seed).shuffle(order)
    torch.testing.assert_close(gae_advantage(reorder(x, order)), expected[order])
    assert x.values is not None
    wide = dataclasses.replace(
        x,
        token_rewards=pad(x.token_rewards, math.nan),
        values=pad(x.values, math.nan),
        mask=pad(x.mask, False),
        turns=pad(x.turns, -1),
    )
    torch.testing.assert_close(gae_advantage(wide), pad(expected, 0.0))


def reorder(x: AdvantageInputs, order: list[int]) -> AdvantageInputs:
    names = ("rewards", "token_rewards", "mask", "groups", "scored", "row_weights", "turns", "values")
    return dataclasses.replace(x, **{name: getattr(x, name)[order] for name in names})


def pad(values: Tensor, fill: float) -> Tensor:
    """Three more columns in front and two behind."""
    rows = len(values)
    return torch.cat([values.new_full((rows, 3), fill), values, values.new_full((rows, 2), fill)], dim=1)


def test_whitening_nothing_and_one_number() -> None:
    values = torch.tensor([[3.0, math.nan]], dtype=torch.float64)
    assert whiten(values, torch.tensor([[False, False]])).tolist() == [[0, 0]]
    assert whiten(values, torch.tensor([[True, False]])).tolist() == [[0, 0]]
