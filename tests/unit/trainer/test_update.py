"""A step on one batch: against a plain one, on rows of every kind, on tokens under a grammar, and its models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rl_async.agent_loop.episode import RowTokens
from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import (
    PRESETS,
    AlgorithmConfig,
    CorrectionOptions,
    ImitationConfig,
    KlConfig,
    LossOptions,
    ObservationsConfig,
    OverlongConfig,
    ShapingConfig,
    TeacherConfig,
    resolve,
)
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import DataError, ProtocolError, RewardsMissing, UserError
from rl_async.messages import Sampling, Trajectory, Turn, Version, VersionRun
from rl_async.recording import read_trajectories, write_trajectories
from rl_async.rollout_server.api import GenerateResult
from rl_async.rollout_server.embedded.sampler import Sampler
from rl_async.trainer.actor_critic import Models, build_models, build_policy
from rl_async.trainer.algorithms import advantages
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from rl_async.trainer.algorithms.algorithm import build, padded_estimator
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.losses import LOSSES
from rl_async.trainer.backend import LossFn, Outputs
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.batches import Batch, MicroBatch, WholeBatch, plan_batch
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors, collate
from rl_async.trainer.ranks import pure_data_parallel
from rl_async.trainer.records import explain
from rl_async.trainer.teacher import TeacherEndpoint, Teachers
from rl_async.trainer.update import (
    LossSums,
    Precomputed,
    Updated,
    advantage_inputs,
    greedy_baselines,
    micro_batch,
    penalised,
    precompute,
    update,
)
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
    pictures = None

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
    rows: list[Trajectory],
    algorithm: AlgorithmConfig,
    minibatches: int = 1,
    epochs: int = 1,
    policy: Table | None = None,
    reference: Table | None = None,
) -> tuple[Table, Updated]:
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=algorithm,
        trainer=TrainerConfig(minibatches=minibatches, epochs=epochs, max_tokens_per_microbatch=64),
    )
    headers = [row.header() for row in rows]
    batch = Batch(0, headers, plan_batch(headers, 0, config, 1, RowCost()), {row.key: row for row in rows})
    policy = policy or Table()
    return policy, update(Models(policy, reference), batch, build(config), config)  # type: ignore[arg-type]


def test_old_logprobs_are_computed_once_for_all_epochs_and_minibatches() -> None:
    policy, updated = train(make_rows(0), AlgorithmConfig(aggregation="token-sum"), minibatches=2, epochs=3)
    looks = policy.events.count("look")
    assert policy.events == ["look"] * looks + ["step"] * 6 and looks > 2
    # Had pi_old moved along, no ratio would ever have left its band.
    assert updated.metrics["loss/clip_fraction"] > 0
    assert all(math.isfinite(number) for number in updated.metrics.values())


def test_every_micro_batch_of_every_pass_is_counted() -> None:
    rows = make_rows(0)
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(minibatches=2, epochs=3, max_tokens_per_microbatch=64),
    )
    headers = [row.header() for row in rows]
    batch = Batch(0, headers, plan_batch(headers, 0, config, 1, RowCost()), {row.key: row for row in rows})
    passes = dict[str, list[tuple[int, int]]]()
    policy = Table()

    def note(work: str, done: int, total: int) -> None:
        passes.setdefault(work, []).append((done, total))

    models = Models(policy, reference=Table(), teachers=Teachers({"": Table()}))  # type: ignore[arg-type,dict-item]
    update(models, batch, build(config), config, 0.1, note)
    looks = policy.events.count("look")
    assert looks > 2
    assert passes == {
        **{
            f"log-probabilities {of}": [(done, looks) for done in range(looks)]
            for of in ("before the update", "of the reference", "of the teacher")
        },
        "training": [(done, 3 * looks) for done in range(3 * looks)],
    }


class Scores(Table):
    """Its passes give each token's number as value, agree with a record of routers in half of the layers, and note what
    they were asked for."""

    replays_routers = True

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[frozenset[str]] = []

    def forward(self, batch: Tensors, requested: frozenset[str] = frozenset()) -> Outputs:
        self.requested.append(requested)
        tokens = batch.tokens[:, 1:]
        numbers = tokens.float()
        return Outputs(
            logprobs=-numbers,
            values=numbers if "values" in requested else None,
            entropy=numbers + 100 if "entropy" in requested else None,
            sum_squares=numbers + 200 if "sum_squares" in requested else None,
            agreement=torch.full(tokens.shape, 0.5),
        )


def micro_batches(whole: WholeBatch, rows: list[Trajectory], models: Models) -> list[MicroBatch]:
    """Cut a batch in two of unlike size, and a third without rows."""
    return [micro_batch(some, dict(enumerate(rows)), {}, whole, models) for some in ([0], [1, 2, 3], [])]


def token_numbers(rows: list[Trajectory]) -> Tensor:
    return torch.cat([torch.from_numpy(row.token_ids[1:]) for row in rows]).float()


def test_each_pass_before_the_update_gives_what_the_algorithm_needs_of_every_token() -> None:
    rows = make_rows(0, groups=1)
    whole, policy, config = (
        whole_batch(rows),
        Scores(),
        RunConfig(model=ModelConfig(path="p"), data=DataConfig(path="n")),
    )
    models = Models(policy, reference=Scores(), critic=None)  # type: ignore[arg-type]
    needs = frozenset({"values", "entropy", "sum_squares"})
    algorithm = replace(build(config), precompute=needs, decoupled=True, divergence=None, whole_reference=False)
    sums = LossSums(policy.data_parallel)
    found = precompute(models, whole, micro_batches(whole, rows, models), algorithm, sums, True, lambda *_: None)
    numbers = token_numbers(rows)
    assert policy.requested == [needs] * 3
    for name, expected in {
        "proximal": -numbers,
        "reference": -numbers,
        "values": numbers,
        "entropy": numbers + 100,
        "sum_squares": numbers + 200,
    }.items():
        assert torch.equal(getattr(found, name), expected), name
    assert found.teacher is None and found.process is None and found.told == {}


def test_the_answers_of_a_teachers_server_are_kept_for_the_loss_by_the_rows_of_their_micro_batch() -> None:
    rows = make_rows(0, groups=1)
    config = RunConfig(model=ModelConfig(path="none"), data=DataConfig(path="none"))
    whole = whole_batch(rows)

    class Server(TeacherEndpoint):
        def __init__(self) -> None:
            self.read: list[Tensors] = []

        def score(self, batches: Sequence[Tensors]) -> list[Tensor]:
            self.read += batches
            return [-2.0 * batch.tokens[:, 1:].float() for batch in batches]

    server = Server()
    models = Models(Scores(), teachers=Teachers({"": server}))  # type: ignore[arg-type]
    micros = micro_batches(whole, rows, models)
    algorithm = replace(build(config), precompute=frozenset(), decoupled=True, divergence=None)
    found = precompute(models, whole, micros, algorithm, LossSums(Table().data_parallel), False, lambda *_: None)
    assert [tensors is micro.tensors for tensors, micro in zip(server.read, micros, strict=True)] == [True, True, False]
    assert found.teacher is not None and torch.equal(found.teacher, -2.0 * token_numbers(rows))
    assert list(found.told) == [(0,), (1, 2, 3), ()]
    assert all(torch.equal(found.told[tuple(micro.rows)][""], -2.0 * micro.tensors.tokens[:, 1:]) for micro in micros)  # type: ignore[arg-type]


def test_only_tokens_of_high_entropy_move_the_policy() -> None:
    """The stand-in of the model gives each token its own number as its entropy."""

    class Uncertain(Table):
        def _outputs(self, batch: Tensors) -> Outputs:
            return Outputs(logprobs=super()._outputs(batch).logprobs, entropy=batch.tokens[:, 1:].double())

    rows = make_rows(0)
    options = AlgorithmConfig(
        loss="reinforce", correction="decoupled_token_is", aggregation="token-sum", top_entropy=0.4
    )
    everything, _ = train(rows, msgspec.structs.replace(options, top_entropy=1.0))
    policy, updated = train(rows, options, policy=Uncertain())
    sampled = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
    high = np.flatnonzero(np.arange(VOCAB) >= np.quantile(sampled, 0.6))
    low = np.setdiff1d(np.arange(VOCAB), high)
    assert (everything.table[low] != -4.0).any(), "they would have moved it"
    assert (policy.table[low] == -4.0).all() and torch.equal(policy.table[high], everything.table[high])
    assert updated.metrics["loss/masked_fraction"] == np.isin(sampled, low).mean()


def test_the_kl_in_the_loss_is_told_as_its_mean_over_tokens() -> None:
    """A token's log-probability is -4 by the policy and -3 by the reference."""
    reference = Table()
    with torch.no_grad():
        reference.table += 1.0
    _, updated = train(make_rows(0), AlgorithmConfig(kl=KlConfig(coef=0.1, estimator="k3")), reference=reference)
    assert updated.metrics["loss/kl_reference"] == pytest.approx(math.e - 2.0, rel=1e-6)


def test_the_agreement_of_routers_is_that_of_trained_tokens_with_a_record_in_the_first_pass() -> None:
    rows, sums = make_rows(0, groups=1), LossSums(Table().data_parallel)
    for row in rows[1:]:
        row.routed_experts = np.zeros((len(row.token_ids), 2, 1), np.uint8)
    whole, models = whole_batch(rows), Models(Scores())  # type: ignore[arg-type]
    first, second, empty = micro_batches(whole, rows, models)
    assert first.recorded is None and second.recorded is not None and empty.tensors.tokens.numel() > 0
    recorded = int(second.recorded.sum())
    assert 0 < recorded == sum(int(row.loss_mask.sum()) for row in rows[1:])
    for micro, agreement in ((first, 0.0), (second, 0.5), (second, 1.0), (empty, 0.0)):
        sums.add_routes(micro, Outputs(agreement=torch.full(micro.tensors.mask.shape, agreement)))
    sums.add_routes(replace(second, rows=[3, 2, 1]), Outputs())
    assert sums.routed == {(1, 2, 3)}
    assert sums.metrics()["router/agreement"] == 0.5


def test_metrics_of_the_loss_are_means_over_tokens_and_zero_without_any() -> None:
    sums = LossSums(Table().data_parallel)
    assert set(sums.metrics().values()) == {0.0}
    one = torch.tensor([[True, False]])
    for number, name in enumerate(("kl", "entropy", "clipped", "masked"), 1):
        sums.add(name, torch.tensor([[0.25 * number, 9.0]]), one)
    sums.add("tokens", torch.ones(1, 2), one)
    pairs = {"taught": "distance", "imitated": "surprise", "observed": "unforeseen"}
    for number, (count, name) in enumerate(pairs.items(), 1):
        sums.add(count, torch.full((1, 2), 2.0), one)
        sums.add(name, torch.tensor([[float(number), 9.0]]), one)
    assert sums.metrics() == {
        "loss/kl_reference": 0.25,
        "loss/entropy": 0.5,
        "loss/clip_fraction": 0.75,
        "loss/masked_fraction": 1.0,
        "loss/kl_teacher": 0.5,
        "loss/imitation": 1.0,
        "loss/observations": 1.5,
    }


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


def test_the_reward_of_a_greedy_episode_is_taken_as_it_is() -> None:
    headers = [msgspec.structs.replace(row.header(), baseline=row.sample == 0) for row in make_rows(0, groups=1)]
    baselines, found = greedy_baselines(headers, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    assert baselines is not None and baselines.tolist() == [0.1] * 4 and found.all()


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
        overlong=OverlongConfig(max_tokens=14, cache_tokens=8),
        overlong_filter=True,
        resample="max_random",
        reward_clip=0.9,
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


STEP = 2  # all rows are this stale
MIXED_RATE = 0.01
MASKED = None  # in ROWS: sampled under a mask
WEIGHT = 0.05  # of those tokens: what the policy had left to the grammar
ROWS = (  # log pi_old/mu of the free tokens
    (0.002, *[MASKED] * 4, 0.002),  # outside 0.999_1.001, but for tokens that count as log r = 0
    (0.0004, MASKED, 0.0, MASKED),
    (0.2, MASKED, -0.1, *[MASKED] * 5),  # a mean k3 of 0.013, diluted 0.003
    (2.3, MASKED, -1.0, -0.1),  # beyond caps and bands
    (-0.02, 0.025, MASKED),
    (MASKED, MASKED, MASKED),
)
WIDTH = max(len(row) for row in ROWS)
FREE = torch.tensor([[t < len(row) and row[t] is not MASKED for t in range(WIDTH)] for row in ROWS])
CONSTRAINED = torch.tensor([[t < len(row) and row[t] is MASKED for t in range(WIDTH)] for row in ROWS])
OPTIONS = (
    ("decoupled_token_is", CorrectionOptions(normalise=True)),
    ("decoupled_seq_is", CorrectionOptions(normalise=True)),
    ("decoupled_token_is", CorrectionOptions(veto=0.5, age_weights=(1.0, 0.8, 0.5))),
    ("disabled", CorrectionOptions(reject={"seq_mean_k2": 0.01})),
    ("disabled", CorrectionOptions(reject={"seq_sum_k3": 0.02, "token_k1": "0.7_1.5"})),
    ("bypass_ppo_clip", CorrectionOptions(reject={"seq_mean_k1": "0.99_1.01"}, veto=0.5)),
    ("bypass_ppo_clip", CorrectionOptions(reject={"seq_max_k1": "0.95_1.1"})),
)
CORRECTIONS = [(preset, CorrectionOptions()) for preset in PRESETS] + list(OPTIONS)
NAMES = [f"{preset}-{number}" for number, (preset, _) in enumerate(CORRECTIONS)]


class MixedTable:
    """log pi of each token id."""

    device = "cpu"
    row_cost = RowCost()
    replays_routers = False
    pictures = None

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        values = -0.1 - 2 * torch.rand(len(ROWS) * (WIDTH + 1), dtype=torch.float64, generator=draw)
        self.table = values.requires_grad_()
        self.data_parallel = pure_data_parallel()

    def forward(self, batch: Tensors, requested: frozenset[str] = frozenset()) -> Outputs:
        return Outputs(logprobs=self.table.detach()[batch.tokens[:, 1:]])

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[str] = frozenset()
    ) -> tuple[float, float]:
        outputs = [Outputs(logprobs=self.table[batch.tokens[:, 1:]]) for batch in batches]
        loss = torch.stack([loss_fn(number, out) for number, out in enumerate(outputs)]).sum()
        (gradient,) = torch.autograd.grad(loss, self.table)
        with torch.no_grad():
            self.table -= MIXED_RATE * gradient
        return loss.item(), gradient.norm().item()

    def by_token(self, before: Tensor) -> Tensor:
        """What each token of ROWS has moved by, [rows, WIDTH]."""
        return (self.table.detach() - before).reshape(len(ROWS), WIDTH + 1)[:, 1:]


def row(number: int, policy: Tensor, *, alone: bool) -> Trajectory:
    """A row of ROWS; ``alone``: as if what is MASKED had not been sampled."""
    ratios = ROWS[number]
    ids = number * (WIDTH + 1) + np.arange(len(ratios) + 1)
    masked = np.array([ratio is MASKED for ratio in ratios])
    sampled = np.array([False, *(~masked if alone else np.ones_like(masked))])
    behaviour = policy[ids].numpy() - np.array([0.0, *(np.log(WEIGHT) if r is MASKED else r for r in ratios)])
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=number,
        attempt=0,
        episode_id=str(number),
        token_ids=ids.astype(np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, behaviour, 0.0).astype(np.float32),
        versions=[VersionRun(Version(), 0, int(sampled.sum()))] if sampled.any() else [],
        constrained=[] if alone else [(t, t + 1) for t in np.flatnonzero(masked).tolist()],
        sampling=Sampling(),
        reward=float(number % 2),
    )


@dataclass(frozen=True)
class Stepped:
    """What a step did."""

    moved: Tensor  # [rows, WIDTH]
    updated: Updated
    distance: Tensor  # log pi - log pi_ref before the step, [rows, WIDTH]
    rewards: Tensor  # of the tokens, as the advantages saw them, [rows, WIDTH]

    @property
    def corrected(self) -> Corrected:
        """What the correction made of the tokens, [rows, WIDTH]."""
        rows, packed = self.updated.tokens.rows, self.updated.tokens.corrected
        return Corrected(*map(rows.pad_all, (packed.weights, packed.keep, packed.rule)))


def mixed_step(algorithm: AlgorithmConfig, *, alone: bool, kl_coef: float = 0.0) -> Stepped:
    """Two epochs on ROWS, so that the second sees a policy that has moved."""
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=algorithm,
        trainer=TrainerConfig(minibatches=1, epochs=2, max_tokens_per_microbatch=16),
    )
    policy, reference, seen = MixedTable(), MixedTable(), list[Tensor]()
    before = policy.table.detach().clone()
    with torch.no_grad():
        reference.table -= 0.3 * torch.cos(torch.arange(len(before), dtype=torch.float64))
    rows = [row(number, before, alone=alone) for number in range(len(ROWS))]

    def estimate(x: AdvantageInputs) -> Tensor:
        tokens = torch.sin(3.0 * torch.arange(x.mask.numel(), dtype=torch.float64)).reshape(x.mask.shape)
        seen.append(x.token_rewards)
        return torch.where(x.mask, tokens * (kl_coef == 0), 0.0)

    headers = [r.header() for r in rows]
    batch = Batch(STEP, headers, plan_batch(headers, STEP, config, 1, RowCost()), {r.key: r for r in rows})
    built = replace(build(config), advantage=padded_estimator(estimate))
    models = Models(policy, reference if kl_coef else None)  # type: ignore[arg-type]
    updated = update(models, batch, built, config, kl_coef)
    distance = (before - reference.table.detach()).reshape(len(ROWS), WIDTH + 1)[:, 1:]
    return Stepped(policy.by_token(before), updated, distance, seen[0])


@pytest.mark.parametrize(("preset", "options"), CORRECTIONS, ids=NAMES)
def test_free_tokens_get_the_weights_and_learn_what_they_do_alone(preset: str, options: CorrectionOptions) -> None:
    algorithm = AlgorithmConfig(correction=preset, correction_options=options, aggregation="token-sum")
    mixed, alone = mixed_step(algorithm, alone=False), mixed_step(algorithm, alone=True)
    got, expected = mixed.corrected, alone.corrected
    for name in ("weights", "keep", "rule"):
        assert torch.equal(getattr(got, name)[FREE], getattr(expected, name)[FREE]), name
    assert torch.equal(mixed.moved[FREE], alone.moved[FREE])
    assert mixed.moved[FREE].any()
    correction = resolve(preset, options)
    assert (expected.weights[FREE] != 1).any() == (correction.weight != "none" or bool(correction.reject))
    drift = {name: value for name, value in mixed.updated.metrics.items() if name.startswith("correction/")}
    assert drift and drift == {name: alone.updated.metrics[name] for name in drift}


@pytest.mark.parametrize(("preset", "options"), CORRECTIONS, ids=NAMES)
def test_what_is_decided_of_a_row_holds_for_its_constrained_tokens(preset: str, options: CorrectionOptions) -> None:
    algorithm = AlgorithmConfig(correction=preset, correction_options=options, aggregation="token-sum")
    got, correction = mixed_step(algorithm, alone=False).corrected, resolve(preset, options)
    by_row = correction.veto is not None or any(name.startswith("seq") for name in correction.reject)
    for weights, keep, free, masked in zip(got.weights, got.keep, FREE, CONSTRAINED, strict=True):
        rejected = by_row and free.any() and not keep[free].any()
        assert (keep[masked] != rejected).all()
        if correction.weight == "sequence" and free.any():
            expected = weights[free][0].item() * WEIGHT
            assert weights[masked].tolist() == pytest.approx([expected] * int(masked.sum()), rel=1e-5)
    if by_row:
        assert not got.keep[CONSTRAINED].all() and got.keep[CONSTRAINED].any()


@pytest.mark.parametrize("correction", ["disabled", "bypass_ppo_clip"])
@pytest.mark.parametrize("loss", LOSSES)
def test_with_any_loss_free_tokens_learn_what_they_do_alone(loss: str, correction: str) -> None:
    options = LossOptions(kl_cov_share=0.2, clip_cov_share=0.2, clip_cov_low=0.0, m2po=0.3)
    algorithm = AlgorithmConfig(loss=loss, correction=correction, loss_options=options, aggregation="token-sum")
    mixed, alone = mixed_step(algorithm, alone=False), mixed_step(algorithm, alone=True)
    assert torch.equal(mixed.moved[FREE], alone.moved[FREE])
    # Advantages are at most 1; sppo adds the row's log ratio, at most 2.3 - 1.0 - 0.1.
    steepest = 1 + 1.2 * (loss == "sppo")
    moved = mixed.moved[CONSTRAINED].abs()
    assert (moved != 0).all() and (moved < 2 * MIXED_RATE * WEIGHT * steepest * 1.1).all()


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
@pytest.mark.parametrize("correction", ["disabled", "bypass_ppo_clip"])
def test_the_kl_of_a_constrained_token_is_weighed_in_the_loss(correction: str, estimator: str) -> None:
    kl = KlConfig(coef=1.0, estimator=estimator)  # type: ignore[arg-type]
    got = mixed_step(AlgorithmConfig(kl=kl, correction=correction, aggregation="token-sum"), alone=False, kl_coef=1.0)
    weights = torch.where(FREE, 1.0, WEIGHT)
    expected = got.distance * (
        (1 - MIXED_RATE * weights) ** 2 - 1
    )  # the gradient of d^2 / 2 is d, in each of two epochs
    torch.testing.assert_close(got.moved[FREE], expected[FREE], atol=1e-9, rtol=1e-4)
    torch.testing.assert_close(got.moved[CONSTRAINED], expected[CONSTRAINED], atol=1e-9, rtol=1e-4)


def test_the_kl_of_a_constrained_token_is_weighed_in_the_reward() -> None:
    kl = KlConfig(coef=1.0, estimator="k1", place="reward")
    algorithm = AlgorithmConfig(kl=kl, aggregation="token-sum")
    without = mixed_step(AlgorithmConfig(aggregation="token-sum"), alone=False)
    got = mixed_step(algorithm, alone=False, kl_coef=1.0)
    sampled = FREE | CONSTRAINED
    expected = torch.where(sampled, got.distance * torch.where(FREE, 1.0, WEIGHT), 0.0)
    torch.testing.assert_close(without.rewards - got.rewards, expected, atol=1e-6, rtol=1e-4)
    assert got.updated.metrics["loss/kl_reference"] == pytest.approx((expected.sum() / sampled.sum()).item(), rel=1e-4)


def test_an_unbiased_kl_pulls_by_its_derivative_times_the_ratio() -> None:
    """With k1 the gradient of r d is r (1 + d): 1 + d in the first epoch, where r is 1, and r grows in the second."""
    kl = KlConfig(coef=1.0, estimator="k1", unbiased=True)
    got = mixed_step(AlgorithmConfig(kl=kl, correction="disabled", aggregation="token-sum"), alone=True, kl_coef=1.0)
    first = -MIXED_RATE * (1 + got.distance)
    expected = first - MIXED_RATE * first.exp() * (1 + got.distance + first)
    torch.testing.assert_close(got.moved[FREE], expected[FREE], atol=1e-9, rtol=1e-4)


def test_rows_beyond_the_limit_of_the_off_policy_mask_make_no_token_less_likely() -> None:
    rows = make_rows(0)
    for row in rows:
        # Far above the table's -4.
        row.logprobs = np.where(row.loss_mask, -1.0, 0.0).astype(np.float32)
    free, _ = train(rows, AlgorithmConfig(correction="disabled"))
    held, updated = train(rows, AlgorithmConfig(correction="disabled", off_policy_mask=0.01))
    assert (free.table < -4.0).any() and (held.table >= -4.0).all() and (held.table > -4.0).any()
    assert 0 < updated.metrics["loss/masked_fraction"] < 1


def test_answers_above_the_bound_are_imitated_beside_the_policys_loss() -> None:
    rows = make_rows(0)
    for number, row in enumerate(rows):
        row.reward = float(number % 2)
    plain, _ = train(rows, AlgorithmConfig())
    held, updated = train(rows, AlgorithmConfig(imitation=ImitationConfig(coef=0.25, above=0.5)))
    good = np.concatenate([row.token_ids[row.loss_mask] for row in rows if row.reward > 0.5])
    expected = RATE * 0.25 * torch.bincount(torch.from_numpy(good).long(), minlength=VOCAB) / len(good)
    torch.testing.assert_close(held.table - plain.table, expected.double(), atol=1e-9, rtol=1e-6)
    assert updated.metrics["loss/imitation"] == pytest.approx(4.0)


def test_observations_are_learned_in_any_split_and_never_sampled_tokens_or_prompts() -> None:
    rows = make_rows(0)
    for row in rows:
        # A prompt, an answer, a tool's result, and another answer.
        end = len(row.token_ids)
        row.loss_mask[6:8] = False
        row.logprobs[6:8] = 0
        row.versions = [VersionRun(Version(0, 0), 0, int(row.loss_mask.sum()))]
        places = (("user", 0, 4), ("assistant", 4, 6), ("tool", 5, 8), ("assistant", 8, end))
        row.turns = [Turn(role=role, text="", start=start, end=stop) for role, start, stop in places]
    plain, without = train(rows, AlgorithmConfig())
    held, updated = train(rows, AlgorithmConfig(observations=ObservationsConfig(coef=0.25)))
    read = np.concatenate([row.token_ids[6:8] for row in rows])
    expected = RATE * 0.25 * torch.bincount(torch.from_numpy(read).long(), minlength=VOCAB) / len(read)
    torch.testing.assert_close(held.table - plain.table, expected.double(), atol=1e-9, rtol=1e-6)
    assert updated.metrics["loss/observations"] == pytest.approx(4.0)
    assert "loss/observations" not in without.metrics


MARKOV_VOCAB = 4
MARKOV_RATE = 1.0
START = 0  # the prompt, a single token
ALLOWED = {0: [1, 2], 1: [0, 3], 2: [1, 2, 3], 3: [0]}  # after each token; 3 leaves no choice


class Markov:
    """A policy over the next token given the last one, softmax of a float64 table that gradient descent changes."""

    device = "cpu"
    row_cost = RowCost()
    replays_routers = False
    pictures = None

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.table = (
            torch.randn(MARKOV_VOCAB, MARKOV_VOCAB, dtype=torch.float64, generator=draw).mul_(2).requires_grad_()
        )
        self.looks = 0
        self.data_parallel = pure_data_parallel()

    def _outputs(self, batch: Tensors) -> Outputs:
        logits = self.table[batch.tokens[:, :-1]].log_softmax(-1)
        return Outputs(logprobs=logits.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1))

    def forward(self, batch: Tensors, requested: frozenset[str] = frozenset()) -> Outputs:
        self.looks += 1
        with torch.no_grad():
            return self._outputs(batch)

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[str] = frozenset()
    ) -> tuple[float, float]:
        loss = torch.stack([loss_fn(number, self._outputs(batch)) for number, batch in enumerate(batches)]).sum()
        (gradient,) = torch.autograd.grad(loss, self.table)
        with torch.no_grad():
            self.table -= MARKOV_RATE * gradient
        return loss.item(), gradient.norm().item()


def masked(policy: Tensor, state: int) -> Tensor:
    """mu [V] after a token: the policy over what the grammar allows."""
    allowed = torch.zeros(MARKOV_VOCAB, dtype=torch.bool)
    allowed[ALLOWED[state]] = True
    return torch.where(allowed, policy[state].exp(), 0.0) / policy[state].exp()[allowed].sum()


def sequences() -> list[tuple[int, int]]:
    return [(a, b) for a in ALLOWED[START] for b in ALLOWED[a]]


def advantage(a: int, b: int) -> float:
    return math.sin(3.0 * a + b) - 0.2


def reference(policy: Tensor) -> Tensor:
    """The gradient of the policy's own objective, restricted to what the grammar allows, [V, V].

    sum over states s of d(s) sum over allowed a of Q(s, a) grad pi(a|s), where d and Q are those of sampling under the
    mask. The sum over a is under pi: the weight pi/mu has taken the mask out of the choice.
    """
    table = policy.clone().requires_grad_()
    pi = table.softmax(-1)
    with torch.no_grad():
        mu = torch.stack([masked(table.log_softmax(-1), s) for s in range(MARKOV_VOCAB)])
    total = torch.zeros((), dtype=torch.float64)
    for a in ALLOWED[START]:
        value = sum(mu[a, b] * advantage(a, b) for b in ALLOWED[a])
        total = total + value * pi[START, a]
        for b in ALLOWED[a]:
            total = total + mu[START, a] * advantage(a, b) * pi[a, b]
    (gradient,) = torch.autograd.grad(total, table)
    return gradient


def rows(policy: Tensor, *, constrained: bool) -> tuple[list[Trajectory], list[float]]:
    """All rows that mu can sample, and how likely each is."""
    found, likely = [], []
    logs = policy.log_softmax(-1)
    for number, (a, b) in enumerate(sequences()):
        probabilities = [masked(logs, START)[a].item(), masked(logs, a)[b].item()]
        likely.append(math.prod(probabilities))
        found.append(
            Trajectory(
                task_id="t",
                group_id=0,
                sample=number,
                attempt=0,
                episode_id=str(number),
                token_ids=np.array([START, a, b], np.int32),
                loss_mask=np.array([False, True, True]),
                logprobs=np.array([0.0, *map(math.log, probabilities)], np.float32),
                versions=[VersionRun(Version(), 0, 2)],
                constrained=[(0, 2)] if constrained else [],
                sampling=Sampling(),
                reward=float(number % 2),
            )
        )
    return found, likely


def constrained_step(algorithm: AlgorithmConfig, *, constrained: bool = True) -> tuple[Markov, Tensor, Updated]:
    """The policy after one step on all rows, the expected gradient that it followed, and what was said of it."""
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=algorithm,
        trainer=TrainerConfig(minibatches=1, max_tokens_per_microbatch=8),
    )
    policy = Markov()
    before = policy.table.detach().clone()
    batch_rows, likely = rows(before, constrained=constrained)
    expected = torch.tensor([p * advantage(*pair) for p, pair in zip(likely, sequences(), strict=True)])

    def estimate(x: AdvantageInputs) -> Tensor:
        return torch.where(x.mask, expected.double()[:, None], 0.0)

    headers = [row.header() for row in batch_rows]
    batch = Batch(0, headers, plan_batch(headers, 0, config, 1, RowCost()), {row.key: row for row in batch_rows})
    built = replace(build(config), advantage=padded_estimator(estimate))
    updated = update(Models(policy), batch, built, config)  # type: ignore[arg-type]
    return policy, (policy.table.detach() - before) / MARKOV_RATE, updated


@pytest.mark.parametrize("correction", PRESETS)
def test_with_any_correction_the_expected_gradient_is_the_policys_over_what_is_allowed(correction: str) -> None:
    policy, gradient, _ = constrained_step(AlgorithmConfig(correction=correction, aggregation="token-sum"))
    assert policy.looks > 0, "also where log pi_old is bypassed"
    torch.testing.assert_close(gradient, reference(Markov().table.detach()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_any_loss_it_is(loss: str) -> None:
    _, gradient, _ = constrained_step(AlgorithmConfig(loss=loss, correction="disabled", aggregation="token-sum"))
    torch.testing.assert_close(gradient, reference(Markov().table.detach()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("correction", ["disabled", "decoupled_geo_rs", "bypass_ppo_clip"])
def test_unmarked_rows_would_teach_something_else(correction: str) -> None:
    _, gradient, _ = constrained_step(
        AlgorithmConfig(correction=correction, aggregation="token-sum"), constrained=False
    )
    assert (gradient - reference(Markov().table.detach())).abs().max() > 0.05


def test_weights_are_what_the_policy_left_to_the_grammar_and_metrics_of_drift_leave_the_tokens_out() -> None:
    policy, _, updated = constrained_step(AlgorithmConfig())
    logs = Markov().table.detach().log_softmax(-1)
    left = {s: logs[s].exp()[ALLOWED[s]].sum().item() for s in range(MARKOV_VOCAB)}
    expected = torch.tensor([[left[START], left[a]] for a, _ in sequences()]).flatten()
    torch.testing.assert_close(updated.tokens.corrected.weights.float(), expected, atol=1e-6, rtol=1e-5)
    assert updated.tokens.corrected.keep.all() and (expected < 1).all()
    assert updated.metrics["constrained/share"] == 1.0
    assert updated.metrics["constrained/weight_mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert not [name for name in updated.metrics if name.startswith("correction/")], "no token is free"
    _, _, free = constrained_step(AlgorithmConfig(), constrained=False)
    assert free.metrics["correction/k3"] > 0.05 and "constrained/share" not in free.metrics
    assert policy.looks > 0


def test_fine_tuning_loads_no_model_of_the_algorithm(model_folder: Path) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(model_folder), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(
            kl=KlConfig(coef=0.1, reference_path="no reference"), teacher=TeacherConfig(path="no teacher")
        ),
    )
    assert build_policy(config, "cpu").device == "cpu"
    with pytest.raises(UserError):
        build_models(config, "cpu")


@pytest.mark.parametrize(("estimator", "shares"), [("k3", True), ("full", False)])
def test_rows_share_nothing_where_whole_distributions_are_kept_of_each(
    model_folder: Path, estimator: str, shares: bool
) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(model_folder), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(kl=KlConfig(coef=0.1, estimator=estimator)),
    )
    assert build_models(config, "cpu").row_cost.shares_prefixes is shares


# Training on tokens of a truncating sampler: policies are compared over the tokens that it kept.


TRUNCATION_VOCAB, PROMPT, ANSWER = 40, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], 6
CUT = Sampling(0.7, 0.9, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=TRUNCATION_VOCAB, max_position_embeddings=64, initializer_range=0.5, **sizes)
    )
    model.save_pretrained(where := tmp_path_factory.mktemp("model"))
    return where


@pytest.fixture(scope="module")
def truncation_rows(folder: Path) -> list[Trajectory]:
    """Eight answers of the embedded engine's sampler to one prompt, two of them equal."""
    model, draw = LlamaForCausalLM.from_pretrained(folder).eval(), torch.Generator().manual_seed(1)
    found = []
    for sample in range(8):
        tokens, sampler = RowTokens(PROMPT), Sampler([CUT], [draw], torch.device("cpu"))
        for _ in range(ANSWER):
            with torch.no_grad():
                distribution = sampler.distribution(model(torch.tensor([tokens.token_ids])).logits[:, -1])
            (token,), (logprob,) = sampler.draw(distribution)
            kept = distribution[0].isfinite().nonzero()[:, 0].tolist()
            result = GenerateResult(
                token_ids=[int(token)],
                logprobs=[float(logprob)],
                versions=[VersionRun(Version(), 0, 1)],
                finish_reason="length",
                alternatives=[[(one, float(distribution[0, one])) for one in kept]],
            )
            tokens.add_sampled(result)
        found.append(trajectory(tokens, sample))
    found.append(trajectory(tokens, 8))
    # An engine of another version has kept one token more of the second sampled one.
    assert found[8].kept_tokens is not None and found[7].kept_tokens is not None
    kept = np.pad(found[8].kept_tokens, ((0, 0), (0, 1)), constant_values=-1)
    others = [token for token in range(TRUNCATION_VOCAB) if token not in kept[1]]
    kept[1] = np.sort(np.append(kept[1][kept[1] >= 0], others[: int((kept[1] < 0).sum())]))
    found[8].kept_tokens = kept
    return found


def trajectory(tokens: RowTokens, sample: int) -> Trajectory:
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=sample,
        attempt=0,
        episode_id=f"0.{sample}",
        **tokens.arrays(),
        sampling=CUT,
        reward=float(sample % 2),
    )


def oracle(model: LlamaForCausalLM, row: Trajectory) -> Tensor:
    """log pi [S] of the sampled tokens over the kept ones, with the gradient that autograd gives."""
    logits = model(torch.from_numpy(row.token_ids).long()[None]).logits[0, len(PROMPT) - 1 : -1] / CUT.temperature
    assert row.kept_tokens is not None
    logprobs = []
    for z, token, kept in zip(logits, row.token_ids[len(PROMPT) :], row.kept_tokens, strict=True):
        places = torch.from_numpy(kept[kept >= 0]).long()
        logprobs.append((z[token] - z[places].logsumexp(0))[None])
    return torch.cat(logprobs)


@pytest.mark.parametrize("shares", [False, True])
def test_values_and_gradients_are_those_of_the_renormalised_distribution(
    folder: Path, truncation_rows: Sequence[Trajectory], shares: bool
) -> None:
    exact = LlamaForCausalLM.from_pretrained(folder).double()
    backend, batch = (
        Fsdp2Backend(str(folder), "float32", "cpu", None),
        collate(truncation_rows, device="cpu", share_prefixes=shares),
    )
    backend.model.requires_grad_(True)
    outputs = backend.model.outputs(batch, frozenset())
    assert outputs.logprobs is not None and (batch.tree is not None) == shares
    expected = torch.stack([oracle(exact, row) for row in truncation_rows])
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    got = outputs.logprobs[:, len(PROMPT) - 1 :]
    # float32 rounds logits of up to 20 or so, through sums of 32 terms.
    assert (got - expected).abs().max() < 2e-5
    (weights * got).sum().backward()
    (weights * expected).sum().backward()
    named = dict(exact.named_parameters())
    for name, parameter in backend.model.lm.named_parameters():
        gradient, wanted = parameter.grad.full_tensor(), named[name].grad
        assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
    # Two rows of the same tokens, the second chosen from one token more in one place.
    assert (got[7] != got[8]).tolist() == [place == 1 for place in range(ANSWER)]


def test_the_engines_numbers_are_the_trainers(folder: Path, truncation_rows: Sequence[Trajectory]) -> None:
    backend = Fsdp2Backend(str(folder), "float32", "cpu", None)
    batch = collate(truncation_rows[:8], device="cpu", share_prefixes=True)
    first, second = (backend.forward(batch).logprobs for _ in range(2))
    assert first is not None and second is not None
    assert torch.equal((first - second).exp(), torch.ones_like(first))
    behaviour = torch.from_numpy(np.stack([row.logprobs[len(PROMPT) :] for row in truncation_rows[:8]]))
    assert (first[:, len(PROMPT) - 1 :] - behaviour).abs().max() < 2e-5
    whole = collate([untruncated(row) for row in truncation_rows[:8]], device="cpu")
    biased = backend.forward(whole).logprobs
    assert biased is not None and (biased[:, len(PROMPT) - 1 :] - behaviour).abs().max() > 0.05


def untruncated(row: Trajectory) -> Trajectory:
    return Trajectory(
        **{name: getattr(row, name) for name in row.__struct_fields__ if name not in ("sampling", "kept_tokens")},
        sampling=Sampling(CUT.temperature),
    )


def test_a_step_at_equal_weights_has_ratios_of_1(
    folder: Path, truncation_rows: Sequence[Trajectory], tmp_path: Path
) -> None:
    """The rows come from the file of a recorded run, which keeps what they were chosen from."""
    write_trajectories(tmp_path / "x.jsonl.gz", truncation_rows[:8])
    recorded = read_trajectories(tmp_path / "x.jsonl.gz")
    overrides = [f"model.path={folder}", "model.dtype=float32", "rollout.truncation={top_k: 5, top_p: 0.9}"]
    config = load_config("calculator", [*overrides, "algorithm.kl={coef: 0.1}", "trainer.minibatches=1"])
    models, headers = build_models(config, "cpu"), [row.header() for row in recorded]
    plan = plan_batch(headers, 0, config, 1, models.row_cost)
    metrics = update(models, Batch(0, headers, plan, {row.key: row for row in recorded}), build(config), config, 0.1)
    assert metrics.metrics["correction/k3"] < 1e-9 and metrics.metrics["loss/clip_fraction"] == 0
    assert metrics.metrics["loss/kl_reference"] == 0
    assert metrics.metrics["loss/grad_norm"] > 0


def test_rows_that_do_not_name_the_kept_tokens_are_refused(truncation_rows: Sequence[Trajectory]) -> None:
    nameless = untruncated(truncation_rows[0])
    nameless.sampling = CUT
    with pytest.raises(DataError, match=r"rollout\.truncation"):
        collate([nameless], device="cpu")
    strange = untruncated(truncation_rows[0])
    strange.kept_tokens = np.full((ANSWER, 2), -1, np.int32)
    with pytest.raises(ProtocolError, match="kept_tokens"):
        strange.header()
