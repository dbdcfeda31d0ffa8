"""Greedy episodes on their way through the trainer: compared with, counted apart, never trained."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from rl_async.configs.schema.algorithm import AdvantageOptions, AlgorithmConfig, ShapingConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig, RewardTerm
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import ToolCall, Trajectory, Turn
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from rl_async.trainer.train import batch_metrics, conversation_sums
from rl_async.trainer.update import Precomputed, advantage_inputs
from tests.conftest import make_rows
from tests.support.batches import whole_batch

GREEDY = 2  # its index in a group of two sampled ones


def rows() -> list[Trajectory]:
    """Two groups of two sampled episodes and a greedy one."""
    made = make_rows(0, groups=2, samples=3)
    for row, reward in zip(made, [1.0, 0.0, 0.75, 1.0, 1.0, 0.25], strict=True):
        row.reward, row.baseline = reward, row.sample == GREEDY
    return made


def config(advantage: str = "remax") -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage=advantage),
    )


def inputs(made: Sequence[Trajectory], config: RunConfig) -> AdvantageInputs:
    """What an estimator sees of these rows."""
    whole = whole_batch(made)
    return advantage_inputs(whole, Precomputed(proximal=whole.behaviour), None, config).padded()


def test_no_token_of_a_greedy_episode_trains() -> None:
    made = rows()
    mask = inputs(made, config()).mask
    assert mask.any(1).tolist() == [row.sample != GREEDY for row in made]
    assert whole_batch(made).row_weights.tolist() == [float(row.sample != GREEDY) for row in made]


def test_advantages_are_rewards_over_the_greedy_one_of_the_group() -> None:
    x = inputs(rows(), config())
    got = ADVANTAGES["remax"](x)
    for i, expected in enumerate([1.0 - 0.75, 0.0 - 0.75, 0.0, 1.0 - 0.25, 1.0 - 0.25, 0.0]):
        assert got[i][x.mask[i]].tolist() == pytest.approx([expected] * int(x.mask[i].sum()))
    assert (got[~x.mask] == 0).all()


def test_both_sides_have_their_turn_rewards() -> None:
    made = rows()
    for row, reward in ((made[0], 0.5), (made[GREEDY], 0.125)):
        row.turns = [Turn(role="assistant", text="", start=4, end=len(row.token_ids), reward=reward)]
    x = inputs(made, config())
    assert ADVANTAGES["remax"](x)[0][x.mask[0]][0].item() == pytest.approx((1.0 + 0.5) - (0.75 + 0.125))


def test_a_group_without_a_scored_greedy_episode_teaches_nothing() -> None:
    made = rows()
    made[GREEDY].scored = False
    got = ADVANTAGES["remax"](inputs(made, config()))
    assert (got[:3] == 0).all()
    assert (got[3:5] != 0).any()


def test_greedy_episodes_enter_no_statistic_of_their_group() -> None:
    made = rows()
    x = inputs(made, config())
    assert x.scored.tolist() == [True, True, False] * 2
    sampled = [row for row in made if not row.baseline]
    alone = ADVANTAGES["dr_grpo"](inputs(sampled, config("dr_grpo")))
    beside = ADVANTAGES["dr_grpo"](x)[x.scored]
    assert torch.equal(beside[:, : alone.shape[1]], alone)


def test_metrics_are_those_of_the_sampled_rows_and_name_the_greedy_mean() -> None:
    made = rows()
    sampled = [row for row in made if not row.baseline]
    got = batch_metrics([row.header() for row in made], 0, None)
    assert got.pop("reward/greedy_mean") == 0.5
    alone = batch_metrics([row.header() for row in sampled], 0, None)
    assert got.pop("reward/groups_without_signal") == 0.0, "each group differs from its greedy episode"
    assert alone.pop("reward/groups_without_signal") == 0.5
    assert got == alone
    assert got["reward/mean"] == 0.75
    made[GREEDY].scored = False
    assert batch_metrics([row.header() for row in made], 0, None)["reward/greedy_mean"] == 0.25
    made[GREEDY].error = "failed"
    made[GREEDY].turns = [Turn(role="assistant", text="", tool_calls=[ToolCall(name="t", arguments="{}")])]
    assert conversation_sums([row.header() for row in made], made) == conversation_sums(
        [row.header() for row in sampled], sampled
    )


def test_the_scale_of_rewards_is_that_of_the_sampled_rows_and_the_greedy_one_is_divided_by_it_too() -> None:
    made = rows()
    sampled = [row.reward for row in made if not row.baseline]
    shaped = AlgorithmConfig(advantage="remax", shaping=ShapingConfig(reward_scale="batch_std"))
    x = inputs(made, msgspec.structs.replace(config(), algorithm=shaped))
    assert x.baselines is not None
    assert x.baselines[0].item() == pytest.approx(0.75 / np.std(sampled))
    assert x.rewards[0].item() == pytest.approx(1.0 / np.std(sampled))


def test_gdpo_takes_a_parts_weight_from_the_reward_unless_it_is_named() -> None:
    terms = (RewardTerm(name="right", weight=1.0), RewardTerm(name="too_long", weight=-0.5))
    options = AdvantageOptions(gdpo_weights={"right": 2.0})
    run = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        reward=RewardConfig(functions=terms),
        algorithm=AlgorithmConfig(advantage="gdpo", advantage_options=options),
    )
    made = [row for row in rows() if not row.baseline]
    for row, penalty in zip(made, [0.0, 0.0, 1.0, 0.0], strict=True):
        row.reward_parts = {"right": 1.0, "too_long": penalty, "too_long/extra": 7.0}
    x = inputs(made, run)
    assert x.options.gdpo_weights == {"right": 2.0, "too_long": -0.5}
    assert set(x.parts) == {"right", "too_long"}
    got = ADVANTAGES["gdpo"](x)
    assert got[2][x.mask[2]][0] < got[3][x.mask[3]][0], "the penalised one of the group learns less"
