"""Advantage estimators where formulas meet rounding, lone tokens, several rows per episode, and options."""

import dataclasses

import msgspec
import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AdvantageOptions
from rl_async.configs.schema.formulas import ADVANTAGES as TRAITS
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from rl_async.trainer.update import on_last_token


def batch(rewards: list[float], groups: list[int], mask: Tensor | None = None, **given: object) -> AdvantageInputs:
    """Every row scored and its own episode; each has one sampled token unless ``mask`` says otherwise."""
    outcomes = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.ones(len(rewards), 1, dtype=torch.bool) if mask is None else mask
    values: dict[str, object] = {
        "rewards": outcomes,
        "token_rewards": on_last_token(outcomes, mask),
        "mask": mask,
        "groups": torch.tensor(groups),
        "scored": torch.ones(len(rewards), dtype=torch.bool),
        "row_weights": torch.ones(len(rewards), dtype=torch.float64),
        "lengths": mask.sum(1).double(),
        "turns": torch.where(mask, 0, -1),
        "options": AdvantageOptions(),
        "parts": {},
    }
    return AdvantageInputs(**(values | given))  # type: ignore[arg-type]


def certain(mask: Tensor, noise: float = 0.0) -> dict[str, Tensor]:
    """A policy of one certain token, whose sum of squares is off by ``noise``: up, a bit more down, and not at all."""
    signs = torch.tensor([1.0, -1.05, 0.0], dtype=torch.float64).repeat(len(mask))[: len(mask)]
    logprobs = torch.zeros(mask.shape, dtype=torch.float64)
    return {"logprobs": logprobs, "sum_squares": torch.ones_like(logprobs) + noise * signs[:, None]}


def test_gpg_counts_groups_of_equal_rewards_as_without_signal_whatever_rounding_says() -> None:
    assert sum([0.1] * 3) / 3 != 0.1, "the mean of equal rewards is not always that reward"
    got = ADVANTAGES["gpg"](batch([0.1, 0.1, 0.1, 0.0, 1.0], [0, 0, 0, 1, 1]))
    assert got[:, 0].tolist() == pytest.approx([0, 0, 0, -5 / 2 * 0.5, 5 / 2 * 0.5])


GROUP_NAMES = ["grpo", "dr_grpo", "grpo_passk", "gdpo", "rloo", "gpg", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", GROUP_NAMES)
def test_a_batch_without_signal_gives_exactly_0(name: str) -> None:
    """Rounding of a mean is not scaled up by what divides or whitens it, nor by an optimizer after it."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    rewards, groups = [0.1, 0.1, 0.1, 0.7, 0.7], [0, 0, 0, 1, 1]
    parts = {"a": torch.tensor(rewards, dtype=torch.float64), "b": torch.tensor([0.3] * 5, dtype=torch.float64)}
    for given in ({}, parts):
        assert not ADVANTAGES[name](batch(rewards, groups, mask, parts=given)).any()


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if "sum_squares" in traits.needs])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 3e-7])
def test_token_baselines_stay_within_the_groups_returns(name: str, noise: float) -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    got = ADVANTAGES[name](batch([1.0, 0.0, 0.0], [0, 0, 0], mask, **certain(mask, noise)))
    baselines = batch([1.0, 0.0, 0.0], [0, 0, 0], mask).rewards[:, None] - got
    assert ((baselines >= 0) & (baselines <= 1)).all()


def test_a_lone_token_between_others_is_compared_with_itself_and_one_behind_all_others_with_nothing() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]], dtype=torch.bool)
    logprobs = torch.full(mask.shape, -1.0, dtype=torch.float64)
    x = batch([2.0, 2.0], [0, 0], mask, logprobs=logprobs, sum_squares=torch.full_like(logprobs, 0.3))
    by_column = [[0, 0, 0, 0, 2.0], [0, 0, 0, 0, 0]]
    assert torch.allclose(ADVANTAGES["optimal_token_baseline"](x), torch.tensor(by_column, dtype=torch.float64))
    # counted by sampled tokens, the first row has four and the second three: the last of the first is alone
    assert torch.allclose(ADVANTAGES["tir_optimal_token_baseline"](x), torch.tensor(by_column, dtype=torch.float64))


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if "sum_squares" in traits.needs])
@pytest.mark.parametrize("rows", [2, 6, 9, 13])  # depending on the order of adding, 1/9 or 1/13 add up to more than 1
def test_one_episode_of_many_rows_is_a_group_of_one(name: str, rows: int) -> None:
    mask = torch.ones(rows, 1, dtype=torch.bool)
    weights = torch.full((rows,), 1 / rows, dtype=torch.float64)
    x = batch([1.0] * rows, [0] * rows, mask, row_weights=weights, **certain(mask))
    assert (ADVANTAGES[name](x) == 0).all()
    assert x.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg", "grpo_passk", "gdpo"])
@pytest.mark.parametrize("rows", [2, 6, 9])
def test_an_episode_counts_once_however_many_rows_it_became(name: str, rows: int) -> None:
    single = ADVANTAGES[name](batch([1.0, 0.0, 0.5, 2.0, 0.0], [0, 0, 0, 1, 1]))
    weights = torch.tensor([1 / rows] * rows + [1.0] * 4, dtype=torch.float64)
    split = ADVANTAGES[name](batch([1.0] * rows + [0.0, 0.5, 2.0, 0.0], [0] * (rows + 2) + [1, 1], row_weights=weights))
    if name == "gdpo":  # whitened over tokens, of which there are more now: compared up to that
        single, split = (values - values[-1] for values in (single, split))
        single, split = single / single[1], split / split[rows]
    assert torch.allclose(split[:rows], single[:1].expand(rows, 1))
    assert torch.allclose(split[rows:], single[1:])


def test_opo_weighs_an_episode_by_the_tokens_of_all_its_rows() -> None:
    whole = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    split = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    one = ADVANTAGES["opo"](batch([1.0, 0.0], [0, 0], whole))
    weights = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64)
    two = ADVANTAGES["opo"](batch([1.0, 1.0, 0.0], [0, 0, 0], split, row_weights=weights))
    assert one[0, 0].item() == two[0, 0].item() == two[1, 0].item() == pytest.approx(1 - 4 / 5)
    assert one[1, 0].item() == two[2, 0].item() == pytest.approx(-4 / 5)


def test_a_row_that_does_not_train_keeps_its_place_in_opos_baseline() -> None:
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.bool)
    x = batch([1.0, 0.0, 0.0], [0, 0, 0], mask)
    cut_off = torch.tensor([True, False, False])[:, None]  # as overlong_filter does
    filtered = dataclasses.replace(x, mask=mask & cut_off)
    assert ADVANTAGES["opo"](filtered)[0].tolist() == ADVANTAGES["opo"](x)[0].tolist() == [1 - 2 / 5] * 2
    assert not ADVANTAGES["opo"](filtered)[1:].any()


def test_gpgs_alpha_makes_up_for_groups_without_signal_whatever_their_reward() -> None:
    x = batch([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2])  # one group of three differs; three rewards are not 0
    assert ADVANTAGES["gpg"](x)[:, 0].tolist() == [3 * 0.5, 3 * -0.5, 0.0, 0.0, 0.0, 0.0]


def test_passk_without_the_deviation_is_the_gap_to_the_second_best() -> None:
    x = batch([3.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1], options=AdvantageOptions(passk_std=False))
    assert ADVANTAGES["grpo_passk"](x)[:, 0].tolist() == [2.0, 0, 0, 0, 0]


def test_gae_without_whitening_is_the_plain_sum_and_leaves_unscored_rows_out() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    values = torch.tensor([[0.5, 9.0, 0.25], [1.0, 1.0, 9.0]], dtype=torch.float64)
    options = AdvantageOptions(gamma=1.0, lam=1.0, whiten=False)
    x = batch([1.0, 1.0], [0, 0], mask, values=values, options=options, scored=torch.tensor([True, False]))
    assert ADVANTAGES["gae"](x).tolist() == [[0.5, 0, 0.75], [0, 0, 0]]
    whitened = ADVANTAGES["gae"](dataclasses.replace(x, options=msgspec.structs.replace(options, whiten=True)))
    assert whitened[0, [0, 2]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
