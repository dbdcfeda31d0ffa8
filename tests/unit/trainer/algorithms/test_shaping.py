"""Reward shaping against formulas written out plainly."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.configs.schema.algorithm import ShapingConfig
from rl_async.messages import TrajectoryHeader, Version, VersionRun
from rl_async.trainer.algorithms import advantages


def header(
    reward: float = 0.0,
    sampled: int = 5,
    scored: bool = True,
    finish: str = "stop",
    *,
    episode: str = "",
    role: str = "",
) -> TrajectoryHeader:
    """The only row of an episode of its own, unless ``episode`` names one."""
    return TrajectoryHeader(
        group_id=0,
        sample=0,
        attempt=0,
        partition="train",
        episode_id=episode or f"own {next(NUMBERS)}",
        role=role,
        tokens_hash="",
        segment=0,
        tokens=sampled + 3,
        sampled=sampled,
        reward=reward,
        finish_reason=finish,
        versions=[VersionRun(Version(), 0, sampled)],
        scored=scored,
    )


NUMBERS = itertools.count()


def soft_punishment(length: int, longest: int, cache: int) -> float:
    """DAPO, eq. 13, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@given(st.integers(1, 200), st.integers(1, 100), st.integers(0, 100), st.floats(0.1, 5))
def test_overlong_penalty_is_eq_13(length: int, cache: int, more: int, factor: float) -> None:
    options = ShapingConfig(overlong_max_tokens=cache + more, overlong_cache_tokens=cache, overlong_factor=factor)
    expected = factor * soft_punishment(length, cache + more, cache)
    assert advantages.overlong_penalties([header(sampled=length)], options).item() == pytest.approx(expected, abs=1e-12)


def test_the_penalty_is_that_of_the_episode_or_of_a_role_in_it() -> None:
    options = ShapingConfig(overlong_max_tokens=20, overlong_cache_tokens=10)
    split = [header(1.0, sampled, episode="split") for sampled in (4, 5, 6)]
    roles = [header(1.0, 12, episode="game", role=role) for role in ("one", "two", "two")]
    headers = [*split, header(1.0, 15), *roles]
    assert advantages.overlong_penalties(headers, options).tolist() == pytest.approx(
        [-0.5, -0.5, -0.5, -0.5, -0.2, -1.0, -1.0]
    )
    assert advantages.shaped_rewards(headers, options).tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.8, 0.0, 0.0])


def test_a_limit_on_tokens_or_turns_cuts() -> None:
    headers = [header(finish=reason) for reason in ("stop", "length", "max_turns", "tool_calls", "abort", "error")]
    assert advantages.cut_rows(headers).tolist() == [False, True, True, False, False, False]


ROWS = st.lists(
    st.tuples(st.floats(-1e3, 1e3), st.integers(1, 30), st.booleans()), min_size=1, max_size=12
)  # reward, length, scored


@given(ROWS, st.booleans(), st.sampled_from([None, 0.5, 2.0]), st.sampled_from([None, 20]))
def test_rewards_are_penalised_then_scaled_then_clipped(rows, scale, clip, longest) -> None:
    options = ShapingConfig(
        reward_scale="batch_std" if scale else "none",
        reward_clip=clip,
        overlong_max_tokens=longest,
        overlong_cache_tokens=10,
    )
    expected = [r + (soft_punishment(n, longest, 10) if longest else 0.0) if ok else 0.0 for r, n, ok in rows]
    known = [value for value, (_, _, ok) in zip(expected, rows, strict=True) if ok]
    if scale and known:
        mean = sum(known) / len(known)
        std = math.sqrt(sum((value - mean) ** 2 for value in known) / len(known))
        expected = [value / std for value in expected] if std > 1e-8 else expected
    if clip is not None:
        expected = [min(max(value, -clip), clip) for value in expected]
    got = advantages.shaped_rewards([header(r, n, ok) for r, n, ok in rows], options)
    assert got.dtype == torch.float64 and got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(ROWS, st.randoms())
def test_shaped_rewards_follow_their_rows(rows, random) -> None:
    options = ShapingConfig(reward_scale="batch_std", overlong_max_tokens=20, overlong_cache_tokens=10)
    order = list(range(len(rows)))
    random.shuffle(order)
    headers = [header(r, n, ok) for r, n, ok in rows]
    shuffled = advantages.shaped_rewards([headers[i] for i in order], options)
    assert shuffled.tolist() == pytest.approx(
        advantages.shaped_rewards(headers, options)[order].tolist(), rel=1e-9, abs=1e-9
    )


@given(ROWS, st.floats(-1e6, 1e6) | st.just(math.nan))
def test_the_reward_of_an_unscored_row_is_never_looked_at(rows, garbage) -> None:
    options = ShapingConfig(reward_scale="batch_std", resample="pow")
    honest = [header(r, n, ok) for r, n, ok in rows]
    broken = [header(r if ok else garbage, n, ok) for r, n, ok in rows]
    assert torch.equal(advantages.shaped_rewards(honest, options), advantages.shaped_rewards(broken, options))
    assert torch.equal(advantages.row_repeats(honest, options, 1, 2), advantages.row_repeats(broken, options, 1, 2))


def test_the_defaults_change_nothing() -> None:
    headers = [header(1e9, 10_000, finish="length"), header(-0.5)]
    options = ShapingConfig()
    assert advantages.shaped_rewards(headers, options).tolist() == [1e9, -0.5]
    assert advantages.trainable_rows(headers, options).tolist() == [True, True]
    assert advantages.row_repeats(headers, options, 0, 0).tolist() == [1.0, 1.0]
    assert advantages.shaping_metrics(headers, options) == {}
    assert advantages.shaping_metrics(headers, ShapingConfig(dynamic_sampling=True)) == {}


def test_only_what_was_cut_off_for_its_length_is_filtered() -> None:
    headers = [header(finish=reason) for reason in ("stop", "length", "max_turns", "error")]
    options = ShapingConfig(overlong_filter=True)
    assert advantages.trainable_rows(headers, options).tolist() == [True, False, True, True]
    assert advantages.shaping_metrics(headers, options)["shaping/filtered_fraction"] == 0.25


def verl_weights(values: list[float], method: str, power: float) -> list[float]:
    """What the reference draws by, before it is normalised."""
    if method == "pow":
        return [abs(v) ** power for v in values]
    if method == "max_min":
        return [1.0 if v in (max(values), min(values)) else 0.0 for v in values]
    return [0.4 if v == max(values) else 0.1 for v in values]


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=8),
    st.sampled_from(["pow", "max_min", "max_random"]),
    st.sampled_from([1.0, 2.0, 3.5]),
)
def test_resampling_weights(values, method, power) -> None:
    got = advantages.resample_weights(np.array(values), ShapingConfig(resample=method, resample_power=power))
    assert got.tolist() == pytest.approx(verl_weights(values, method, power), abs=1e-7)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_repeats_are_drawn_by_weight_and_follow_from_seed_and_step(method: str) -> None:
    rewards = [2.0, 1.0, 1.0, -2.0, 0.0]
    headers = [*[header(r) for r in rewards], header(9.0, scored=False)]
    options = ShapingConfig(resample=method)
    draws = torch.stack([advantages.row_repeats(headers, options, 3, step) for step in range(4000)])
    assert torch.equal(draws[17], advantages.row_repeats(headers, options, 3, 17))
    assert not torch.equal(draws[:50], torch.stack([advantages.row_repeats(headers, options, 4, s) for s in range(50)]))
    assert (draws[:, :5].sum(1) == 5).all() and (draws[:, 5] == 1).all()
    weights = np.array(verl_weights(rewards, method, 2.0))
    assert draws[:, :5].mean(0).tolist() == pytest.approx((5 * weights / weights.sum()).tolist(), abs=0.1)


def test_an_infinite_reward_is_left_for_the_loss_to_name() -> None:
    headers = [header(math.inf), header(1.0)]
    options = ShapingConfig(resample="pow", reward_scale="batch_std")
    assert advantages.shaped_rewards(headers, options)[0] == math.inf
    assert advantages.row_repeats(headers, options, 0, 0).tolist() == [1.0, 1.0]


def test_metrics_are_those_of_the_rows_that_were_scored() -> None:
    made = [header(1.0, sampled=12), header(0.5, sampled=4, finish="length"), header(9.0, scored=False)]
    options = ShapingConfig(overlong_max_tokens=10, overlong_cache_tokens=4, overlong_filter=True)
    assert advantages.shaping_metrics(made, options) == {
        "shaping/reward_mean": pytest.approx((0.0 + 0.5) / 2),
        "shaping/overlong_penalty_mean": pytest.approx(-1 / 3),
        "shaping/filtered_fraction": pytest.approx(1 / 3),
    }
    assert advantages.shaping_metrics(made, ShapingConfig(dynamic_sampling=True, max_refills=3)) == {}


def test_no_scored_row_is_no_error() -> None:
    options = ShapingConfig(resample="max_min", reward_scale="batch_std", reward_clip=1.0)
    headers = [header(scored=False)]
    assert advantages.shaped_rewards(headers, options).tolist() == [0.0]
    assert advantages.row_repeats(headers, options, 0, 0).tolist() == [1.0]
