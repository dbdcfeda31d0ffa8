"""How a step is put together: who is asked what and when, and which rows teach how much."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AlgorithmConfig, KlConfig, ShapingConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import RewardsMissing
from rl_async.messages import Trajectory, Turn
from rl_async.trainer.algorithms import advantages
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from rl_async.trainer.algorithms.algorithm import build, padded_estimator
from rl_async.trainer.backend import LossFn, Outputs
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.models import Models
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import pure_data_parallel
from rl_async.trainer.records import explain
from rl_async.trainer.update import Precomputed, Updated, advantage_inputs, penalised, update
from tests.conftest import VOCAB, make_rows
from tests.support.batches import whole_batch
from tests.support.rounding import assert_near, rounding

pytestmark = pytest.mark.usefixtures("one_rank")

RATE = 0.5


class Table:
    """A policy without context: log pi of a token stands in a table, which plain gradient descent changes."""

    device = "cpu"
    row_cost = RowCost()
    replays_routers = False

    def __init__(self) -> None:
        self.table = torch.full((VOCAB,), -4.0, dtype=torch.float64, requires_grad=True)
        self.events: list[str] = []
        self.data_parallel = pure_data_parallel()

    def _outputs(self, batch: Tensors) -> Outputs:
        return Outputs(logprobs=self.table[batch.tokens[:, 1:]])

    def forward(self, batch: Tensors, requested: frozenset[str] = frozenset()) -> Outputs:
        self.events.append("look")
        with torch.no_grad():
            return self._outputs(batch)

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[str] = frozenset()
    ) -> tuple[float, float]:
        self.events.append("step")
        loss = torch.stack([loss_fn(number, self._outputs(batch)) for number, batch in enumerate(batches)]).sum()
        (gradient,) = torch.autograd.grad(loss, self.table)
        with torch.no_grad():
            self.table -= RATE * gradient
        return loss.item(), gradient.norm().item()


def train(
    rows: list[Trajectory], algorithm: AlgorithmConfig, minibatches: int = 1, epochs: int = 1
) -> tuple[Table, Updated]:
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=algorithm,
        trainer=TrainerConfig(minibatches=minibatches, epochs=epochs, max_tokens_per_microbatch=64),
    )
    headers = [row.header() for row in rows]
    batch = Batch(0, headers, plan_batch(headers, 0, config, 1, RowCost()), {row.key: row for row in rows})
    policy = Table()
    return policy, update(Models(policy), batch, build(config), config)  # type: ignore[arg-type]


def test_old_logprobs_are_computed_once_for_all_epochs_and_minibatches() -> None:
    policy, updated = train(make_rows(0), AlgorithmConfig(aggregation="token-sum"), minibatches=2, epochs=3)
    looks = policy.events.count("look")
    assert policy.events == ["look"] * looks + ["step"] * 6 and looks > 2
    # Had pi_old moved along, no ratio would ever have left its band.
    assert updated.metrics["loss/clip_fraction"] > 0


@pytest.mark.parametrize(("correction", "given"), [("decoupled_geo_rs_token_tis", True), ("bypass_ppo_clip", False)])
def test_estimators_see_what_the_correction_made_of_each_token(correction: str, given: bool) -> None:
    rows, seen = make_rows(0), []
    config = RunConfig(
        model=ModelConfig(path="none"), data=DataConfig(path="none"), algorithm=AlgorithmConfig(correction=correction)
    )

    def estimate(x: AdvantageInputs) -> Tensor:
        seen.append(x)
        return torch.zeros_like(x.token_rewards)

    headers = [row.header() for row in rows]
    batch = Batch(0, headers, plan_batch(headers, 0, config, 1, RowCost()), {row.key: row for row in rows})
    algorithm = replace(build(config), advantage=padded_estimator(estimate))
    updated = update(Models(Table()), batch, algorithm, config)  # type: ignore[arg-type]
    (x,) = seen
    assert x.mask.sum() == sum(int(row.loss_mask.sum()) for row in rows), (
        "rejected tokens keep their place in baselines"
    )
    assert (x.importance is not None) is given
    if given:
        assert torch.equal(x.importance, updated.tokens.rows.pad_all(updated.tokens.corrected.weights.double()))
        assert not updated.tokens.corrected.keep[updated.tokens.rows.pack(x.mask)].all()


def test_bypass_never_looks() -> None:
    policy, _ = train(make_rows(0), AlgorithmConfig(correction="bypass_ppo_clip"), minibatches=2, epochs=2)
    assert policy.events == ["step"] * 4


def plain_step(rows: list[Trajectory], rewards: list[float], counts: list[float], trains: list[bool]) -> Tensor:
    """The table after one REINFORCE step of the sum over tokens of k A log pi, with GRPO's A."""
    after = torch.full((VOCAB,), -4.0, dtype=torch.float64)
    for i, row in enumerate(rows):
        group = [rewards[j] for j, other in enumerate(rows) if other.group_id == row.group_id and other.scored]
        mean = sum(group) / max(len(group), 1)
        std = (sum((r - mean) ** 2 for r in group) / max(len(group) - 1, 1)) ** 0.5
        advantage = (rewards[i] - mean) / (std + 1e-4) if row.scored else 0.0
        for token in row.token_ids[row.loss_mask] if trains[i] else []:
            after[int(token)] += RATE * counts[i] * advantage
    return after


def test_shaped_rewards_repeats_and_filtered_rows_reach_the_gradient() -> None:
    rows = make_rows(0)
    rows[1].scored, rows[6].finish_reason, rows[9].finish_reason = False, "length", "length"
    options = ShapingConfig(
        overlong_max_tokens=14, overlong_cache_tokens=8, overlong_filter=True, resample="max_random", reward_clip=0.9
    )
    algorithm = AlgorithmConfig(loss="reinforce", correction="disabled", aggregation="token-sum", shaping=options)
    policy, updated = train(rows, algorithm)
    headers = [row.header() for row in rows]
    counts = advantages.row_repeats(headers, options, 0, 0).tolist()
    assert len(set(counts)) > 2
    expected = plain_step(
        rows, advantages.shaped_rewards(headers, options).tolist(), counts, [r.finish_reason != "length" for r in rows]
    )
    # The table is float64, but the loss's parts are float32: a token's update is a sum over its places.
    moved = (expected + 4.0).abs().max().item()
    assert_near(policy.table, expected, rounding(moved, terms=sum(len(row.token_ids) for row in rows)))
    assert updated.metrics["tokens/trained"] == sum(r.loss_mask.sum() for r in rows if r.finish_reason != "length")
    assert [row.reward for row in rows] == [row.reward for row in make_rows(0)], "what is recorded stays as scored"


@pytest.mark.parametrize("correction", ["decoupled_token_is", "bypass_ppo_clip"])
def test_a_filtered_row_never_trains(correction: str) -> None:
    rows = make_rows(0)
    for row in rows:
        row.finish_reason = "length"
    algorithm = AlgorithmConfig(correction=correction, shaping=ShapingConfig(overlong_filter=True))
    policy, updated = train(rows, algorithm)
    assert (policy.table == -4.0).all() and updated.metrics["tokens/trained"] == 0


@pytest.mark.parametrize("correction", ["decoupled_token_is", "bypass_ppo_clip"])
def test_what_each_token_trained_with_is_recorded(correction: str) -> None:
    """The policy is a table of -4 for every token when the step begins, and the advantages are GRPO's."""
    rows = make_rows(0)
    _, updated = train(rows, AlgorithmConfig(correction=correction))
    explained = [explain(row, index, updated.tokens) for index, row in enumerate(rows)]
    assert all(found.logprobs == [-4.0] * int(row.loss_mask.sum()) for row, found in zip(rows, explained, strict=True))
    for index, row in enumerate(rows):
        group = [other.reward for other in rows if other.group_id == row.group_id]
        centred = row.reward - sum(group) / len(group)
        (advantage,) = explained[index].advantages
        assert advantage == 0 if centred == 0 else advantage * centred > 0


def told(rows: list[Trajectory], algorithm: AlgorithmConfig, index: int) -> list[tuple[str, int, int]]:
    """What is recorded about row ``index``."""
    _, updated = train(rows, algorithm)
    explained = explain(rows[index], index, updated.tokens)
    assert not any(explained.weights[run.start : run.end] != [0.0] * (run.end - run.start) for run in explained.rules)
    return [(run.rule, run.start, run.end) for run in explained.rules]


def test_what_took_a_whole_row_out_is_named() -> None:
    rows = make_rows(0)
    tokens = int(rows[5].loss_mask.sum())
    assert told(rows, AlgorithmConfig(), 5) == []
    rows[5].finish_reason = "length"
    algorithm = AlgorithmConfig(shaping=ShapingConfig(overlong_filter=True))
    assert told(rows, algorithm, 5) == [("overlong_filter", 0, tokens)]
    rows[5].baseline = True
    assert told(rows, algorithm, 5) == [("greedy", 0, tokens)]


def test_tokens_that_a_users_correction_masks_say_so(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """import torch
from rl_async.trainer.algorithms.correction import Corrected
def judge(target, behaviour, mask, age):
    keep = mask & (torch.arange(mask.shape[1]) % 2 == 0)
    return Corrected(torch.full_like(target, 1.5), keep, torch.zeros_like(mask, dtype=torch.uint8))
"""
    )
    runs = told(make_rows(0), AlgorithmConfig(correction=f"{tmp_path / 'mine.py'}:judge"), 0)
    assert runs and {rule for rule, _, _ in runs} == {"correction"} and all(end - start == 1 for _, start, end in runs)


@pytest.mark.parametrize("scored", [[], [True]])
def test_a_batch_without_any_reward_ends_the_run_with_the_scorers_words(scored: list[bool]) -> None:
    rows = make_rows(0)
    for row in rows:
        row.scored, row.error = False, "reward my.py:score: raised KeyError: 'answer'"
    for row in rows[: len(scored)]:
        row.scored = row.baseline = True  # a greedy episode trains nobody by itself
    with pytest.raises(RewardsMissing, match=r"step 0: .*16.*reward\.functions.*KeyError: 'answer'"):
        train(rows, AlgorithmConfig())


def test_outcomes_and_turn_rewards_are_divided_alike() -> None:
    rows = make_rows(0)
    for row in rows:
        row.turns = [Turn(role="assistant", text="", start=4, end=len(row.token_ids), reward=row.sample / 2)]
    shaped = AlgorithmConfig(loss="reinforce", advantage="dr_grpo", correction="disabled", aggregation="token-sum")
    plain, _ = train(rows, shaped)
    scale = msgspec.structs.replace(shaped, shaping=ShapingConfig(reward_scale="batch_std"))
    divided, _ = train(rows, scale)
    deviation = float(np.std([row.reward for row in rows]))
    assert deviation != pytest.approx(1.0)
    moved = (plain.table + 4.0).abs().max().item()
    bound = rounding(moved, terms=sum(len(row.token_ids) for row in rows))
    assert_near((divided.table + 4.0) * deviation, plain.table + 4.0, bound)


def split_episodes(turn_rewards: Sequence[float], kl: float = 0.0) -> tuple[AdvantageInputs, Tensor]:
    """Inputs of a group of episodes of two rows, whose first turn alone has a reward, and the number of each row's
    episode. ``kl`` is log pi_old - log reference of each token of the second episode's first row."""
    rows = []
    for row, reward in zip(make_rows(0, groups=1, samples=len(turn_rewards)), turn_rewards, strict=True):
        row.reward = 0.0
        row.turns = [Turn(role="assistant", text="", start=4, end=len(row.token_ids), reward=reward)]
        rows += [row, msgspec.structs.replace(row, segment=1, turns=[])]
    whole = whole_batch(rows)
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(kl=KlConfig(coef=1.0, place="reward", estimator="k1")),
    )
    reference = whole.behaviour.clone()
    reference[whole.rows.positions([2])] -= kl
    before = Precomputed(proximal=whole.behaviour, reference=reference)
    x = advantage_inputs(whole, before, None, config)
    x, _ = penalised(x, whole.players, before, build(config), config.algorithm.kl, 1.0)
    return x.padded(), whole.players


OUTCOME_ESTIMATORS = ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", OUTCOME_ESTIMATORS)
def test_equal_episodes_of_several_rows_are_equal_whichever_row_has_the_turn_reward(name: str) -> None:
    x, _ = split_episodes([1.0, 1.0])
    assert x.rewards.tolist() == [1.0] * 4
    assert not ADVANTAGES[name](x).any()
    assert x.token_rewards.sum(1).tolist() == [1.0, 0.0, 1.0, 0.0], "token estimators see each where it was given"


@pytest.mark.parametrize("name", OUTCOME_ESTIMATORS)
def test_all_rows_of_an_episode_learn_from_its_total(name: str) -> None:
    x, episodes = split_episodes([1.0, 0.0, 0.5])
    per_row = [row[mask].unique() for row, mask in zip(ADVANTAGES[name](x), x.mask, strict=True)]
    assert all(len(values) == 1 for values in per_row)
    assert episodes.tolist() == [0, 0, 1, 1, 2, 2]
    best, _, worst, _, _, _ = values = [v.item() for v in per_row]
    assert values[::2] == values[1::2] and best > 0 > worst


def test_a_kl_in_the_reward_belongs_to_the_whole_episode() -> None:
    x, _ = split_episodes([1.0, 1.0], kl=0.5)
    penalty = 0.5 * int(x.mask[2].sum())
    assert x.rewards.tolist() == pytest.approx([1.0, 1.0, 1.0 - penalty, 1.0 - penalty], rel=1e-6)


def test_one_reward_is_enough_to_go_on() -> None:
    rows = make_rows(0)
    for row in rows[1:]:
        row.scored = False
    policy, _ = train(rows, AlgorithmConfig())
    assert (policy.table == -4.0).all()
