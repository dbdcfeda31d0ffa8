"""A critic's part in a step, and model FLOPs."""

import asyncio
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import ADVANTAGES as TRAITS
from rl_async.configs.schema.algorithm import (
    AdvantageOptions,
    AlgorithmConfig,
    CriticConfig,
    KlConfig,
    TeacherConfig,
    TeacherModelConfig,
)
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig, RewardTerm
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig
from rl_async.errors import ConfigError, RewardsMissing, TrainingDiverged, UserError
from rl_async.messages import Media, Trajectory, Turn, episode_rewards, has_signal, role_rewards
from rl_async.reward_loop.api import ScorerFailed
from rl_async.trainer import actor_critic
from rl_async.trainer.actor_critic import (
    CriticUpdate,
    Models,
    build_models,
    compute_rates,
    critic_training,
    critic_update,
    load_teachers,
    model_flops,
    peak_flops,
    policy_training,
)
from rl_async.trainer.algorithms.advantages import ADVANTAGES, EPSILON, AdvantageInputs, gae
from rl_async.trainer.algorithms.losses import divergence_of
from rl_async.trainer.backend import Backend, LossFn, Outputs, learning_rate_factor
from rl_async.trainer.batch_layout import MiniBatch, RowCost, Shown, TowerCost, row_cost_of
from rl_async.trainer.batches import Batch, MicroBatch
from rl_async.trainer.packing import Images, Rows, Tensors, collate, empty_tensors, on_tokens
from rl_async.trainer.ranks import DataParallel
from rl_async.trainer.teacher import Hints, TeacherEndpoint, Teachers, check_tokenizers, read_scores
from rl_async.trainer.train import batch_metrics, conversation_metrics, conversation_sums
from rl_async.trainer.update import Precomputed, advantage_inputs, require_rewards
from tests.conftest import VOCAB, make_rows, save_tokenizer
from tests.contracts.trainer.workers.objective import Table
from tests.support.batches import whole_batch
from tests.unit.reward_loop.outside import Answer, Outside

ROWS, WIDTH = 6, 5
PACKED = Rows(torch.full((ROWS,), WIDTH))
NO_OUTCOMES = torch.zeros(ROWS, dtype=torch.float64)
ALONE = DataParallel(0, 1, is_recorder=True)


def inputs() -> AdvantageInputs:
    """Rows 0 to 5, packed, of which the scorer failed on row 3; NaN stands wherever nothing was sampled."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand((ROWS, WIDTH), generator=draw) > 0.3
    numbers = torch.randn((2, ROWS, WIDTH), generator=draw, dtype=torch.float64)
    rewards, values = torch.where(mask, numbers, math.nan)
    scored = torch.arange(ROWS) != 3
    return AdvantageInputs(
        rewards=torch.zeros(ROWS, dtype=torch.float64),
        token_rewards=rewards.flatten(),
        mask=mask.flatten(),
        groups=torch.arange(ROWS),
        scored=scored,
        row_weights=torch.ones(ROWS, dtype=torch.float64),
        lengths=mask.sum(1).double(),
        turns=torch.zeros_like(mask.flatten(), dtype=torch.int64),
        options=AdvantageOptions(gamma=0.9, lam=0.8),
        parts={},
        values=values.flatten(),
        rows=PACKED,
    )


def targets(x: AdvantageInputs, lam: float) -> tuple[Tensor, Tensor, Tensor]:
    """Values, returns and the tokens that count, float32 [M] and bool [M]."""
    assert x.values is not None and x.rows is not None
    mask = x.mask & on_tokens(x.scored, x.rows)
    _, returns = gae(x.token_rewards, x.values, mask, 0.9, lam, rows=x.rows)
    return x.values.float(), returns.float(), mask


def micro(rows: list[int]) -> MicroBatch:
    tensors = empty_tensors("cpu")
    if rows:
        tensors = msgspec.structs.replace(tensors, mask=torch.zeros((len(rows), WIDTH), dtype=torch.bool))
    return MicroBatch(rows, tensors, PACKED)


class FakeCritic:
    """Gives ``values`` of each row and steps without learning; keeps the loss and its gradient."""

    def __init__(self, values: Tensor, parts: Sequence[MicroBatch]) -> None:
        self.values, self.parts = values.clone().requires_grad_(), parts

    def step(self, batches: Sequence[Tensors], loss_fn: LossFn) -> tuple[float, float]:
        total = sum(loss_fn(n, self.outputs(part)) for n, part in enumerate(self.parts))
        assert isinstance(total, Tensor) and len(batches) == len(self.parts)
        total.backward()
        return total.item(), 2.5

    def outputs(self, part: MicroBatch) -> Outputs:
        return Outputs(values=self.values[part.rows] if part.rows else self.values[:1, :1])


def teach(learns: CriticUpdate, critic: FakeCritic, rows: list[int]) -> None:
    fake: Backend = critic  # type: ignore[assignment]
    learns.wrap_loss(fake, lambda *_: torch.zeros(()), critic.parts, rows)


def test_the_critics_targets_have_a_lambda_of_their_own() -> None:
    x = inputs()
    learns, policys = (
        critic_update(ALONE, x, config, NO_OUTCOMES) for config in (CriticConfig(lam=1.0), CriticConfig())
    )
    assert learns is not None and policys is not None
    for update, lam in ((learns, 1.0), (policys, 0.8)):
        _, returns, mask = targets(x, lam)
        assert update.summary["critic/returns_mean"] == pytest.approx(returns[mask].mean().item(), rel=1e-5)
    assert learns.summary["critic/returns_mean"] != policys.summary["critic/returns_mean"]


@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5]], [[3, 1], [0], [], [5, 2, 4]]])
def test_every_sampled_token_of_a_scored_row_counts_the_same_in_any_split(split: list[list[int]]) -> None:
    learns, x = critic_update(ALONE, inputs(), CriticConfig(clip=0.2), NO_OUTCOMES), inputs().padded()
    assert learns is not None and x.values is not None
    now = PACKED.pad_all(targets(inputs(), 0.8)[0]) + torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    critic = FakeCritic(torch.where(x.mask, now, 7e7), [micro(rows) for rows in split])
    teach(learns, critic, list(range(ROWS)))

    mask = x.mask.clone()
    mask[3] = False
    _, returns = gae(x.token_rewards, x.values, mask, 0.9, 0.8)
    losses = []
    for row, t in mask.nonzero().tolist():
        v, old, target = now[row, t].item(), x.values[row, t].item(), returns[row, t].item()
        kept = old + min(max(v - old, -0.2), 0.2)
        losses.append(0.5 * max((v - target) ** 2, (kept - target) ** 2))
    assert torch.stack(learns.losses).sum().item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert critic.values.grad is not None
    assert critic.values.grad[mask].any()
    assert not critic.values.grad[~mask].any()


def test_a_shared_critic_adds_its_weighted_loss_and_takes_it_out_of_the_report() -> None:
    learns = critic_update(ALONE, inputs(), CriticConfig(shared=True, value_coef=0.25), NO_OUTCOMES)
    assert learns is not None
    parts = [micro([0, 1]), micro([2, 4])]
    critic = FakeCritic(torch.ones(ROWS, WIDTH), parts)

    def policy_loss(number: int, outputs: Outputs) -> torch.Tensor:
        assert outputs.values is not None and outputs.values.requires_grad
        return torch.tensor(10.0 + number)

    joined = learns.wrap_loss(None, policy_loss, parts, [0, 1, 2, 4])
    total = sum(joined(number, critic.outputs(part)).item() for number, part in enumerate(parts))
    assert sum(learns.losses) > 0.1
    assert total == pytest.approx(21.0 + 0.25 * torch.stack(learns.losses).sum().item(), rel=1e-6)
    assert total - learns.shared_loss() == pytest.approx(21.0, rel=1e-6)


def test_a_critic_of_its_own_leaves_the_policy_loss_alone() -> None:
    learns = critic_update(ALONE, inputs(), CriticConfig(), NO_OUTCOMES)
    assert learns is not None
    parts = [micro([0, 1])]

    def policy_loss(number: int, outputs: Outputs) -> Tensor:
        return torch.tensor(3.0)

    fake: Backend = FakeCritic(torch.ones(ROWS, WIDTH), parts)  # type: ignore[assignment]
    assert learns.wrap_loss(fake, policy_loss, parts, [0, 1]) is policy_loss
    assert learns.shared_loss() == 0.0


def test_metrics_are_over_the_values_before_the_step(one_rank: None) -> None:
    learns = critic_update(ALONE, inputs(), CriticConfig(), NO_OUTCOMES)
    assert learns is not None
    parts = [micro([0, 1, 2, 3, 4, 5])]
    for _ in range(2):
        teach(learns, FakeCritic(torch.ones(ROWS, WIDTH), parts), list(range(ROWS)))
    metrics = learns.metrics()
    values, returns, mask = targets(inputs(), 0.8)
    values, returns = values[mask].double(), returns[mask].double()
    assert metrics["critic/values_mean"] == pytest.approx(values.mean().item(), rel=1e-5)
    assert metrics["critic/returns_mean"] == pytest.approx(returns.mean().item(), rel=1e-5)
    variances = [((y - y.mean()) ** 2).mean().item() for y in (returns - values, returns)]
    assert metrics["critic/explained_variance"] == pytest.approx(1 - variances[0] / variances[1], rel=1e-5)
    assert metrics["critic/grad_norm"] == 2.5
    assert metrics["critic/loss"] == pytest.approx(torch.stack(learns.losses).sum().item() / 2)


def test_a_process_reward_model_learns_outcomes_in_any_split() -> None:
    """Against the formula in float64: the mean over scored rows of the cross-entropy of beta times the log-ratio."""
    draw = torch.Generator().manual_seed(3)
    held, reference = torch.randn((2, ROWS, WIDTH), generator=draw, dtype=torch.float64)
    outcomes = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.25, 1.0], dtype=torch.float64)
    x = replace(
        inputs(),
        process=held.flatten(),
        reference=reference.flatten(),
        values=None,
        options=AdvantageOptions(prime_beta=0.7),
    )
    padded = x.padded()
    mask = padded.mask & padded.scored[:, None]
    sums = 0.7 * torch.where(mask, held - reference, 0.0).sum(1)
    scored = padded.scored
    expected = -(outcomes * sums.sigmoid().log() + (1 - outcomes) * (-sums).sigmoid().log())[scored].mean()
    slope = 0.7 * (sums.sigmoid() - outcomes) / scored.sum()

    class Scores(FakeCritic):
        def outputs(self, part: MicroBatch) -> Outputs:
            return Outputs(logprobs=self.values[part.rows] if part.rows else self.values[:1, :1] * 0)

    for split in ([[0, 1, 2, 3, 4, 5]], [[3, 1], [0], [], [5, 2, 4]]):
        learns = critic_update(ALONE, x, CriticConfig(), outcomes)
        assert learns is not None
        critic = Scores(torch.where(mask, held, 7e7).double(), [micro(rows) for rows in split])
        teach(learns, critic, list(range(ROWS)))
        # The loss subtracts the reference in float32.
        assert torch.stack(learns.losses).sum().item() == pytest.approx(expected.item(), rel=1e-6)
        assert critic.values.grad is not None
        torch.testing.assert_close(critic.values.grad, torch.where(mask, slope[:, None], 0.0), rtol=1e-6, atol=1e-9)
        right = ((sums > 0) == (outcomes > 0.5))[scored].double().mean().item()
        assert learns.summary["critic/accuracy"] == pytest.approx(right)
        assert learns.summary["critic/process_reward_mean"] == pytest.approx((sums[scored].sum() / mask.sum()).item())
    with pytest.raises(UserError, match="prime"):
        critic_update(ALONE, x, CriticConfig(), 2 * outcomes)


class Diverging:
    def step(self, *_: object) -> tuple[float, float]:
        raise TrainingDiverged("loss nan")


def test_a_critic_that_diverges_is_named() -> None:
    learns = critic_update(ALONE, inputs(), CriticConfig(), NO_OUTCOMES)
    assert learns is not None
    fake: Backend = Diverging()  # type: ignore[assignment]
    with pytest.raises(TrainingDiverged, match="critic: loss nan"):
        learns.wrap_loss(fake, lambda *_: torch.zeros(()), [micro([0])], [0])


def test_without_a_critic_there_is_no_lesson() -> None:
    assert critic_update(ALONE, inputs(), None, NO_OUTCOMES) is None


def test_the_policy_s_schedule_leaves_out_the_critic_s_warm_up() -> None:
    config = load_config("calculator-gae", ["critic.warmup_steps=10", "trainer.schedule=linear", "trainer.steps=50"])
    factor = learning_rate_factor(policy_training(config))
    taken = (50 - 10) * config.trainer.minibatches
    assert factor(0) == 1.0
    assert factor(taken // 2) == 0.5
    assert factor(taken) == 0.0


@pytest.mark.parametrize("critic", [None, CriticConfig(shared=True), CriticConfig(), CriticConfig(path="critic")])
@pytest.mark.parametrize("reference", [False, True])
def test_each_model_is_made_for_what_it_does(
    monkeypatch: pytest.MonkeyPatch, critic: CriticConfig | None, reference: bool
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    def make(path: str, **given: Any) -> SimpleNamespace:
        made.append((path, given))
        return SimpleNamespace(path=path, replays_routers=False)

    monkeypatch.setattr(actor_critic, "Fsdp2Backend", make)
    config = RunConfig(
        model=ModelConfig(path="policy", dtype="float32"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(learning_rate=1.0),
        algorithm=AlgorithmConfig(kl=KlConfig(coef=0.1 if reference else 0.0)),
        critic=critic,
    )
    models: Any = build_models(config, "cpu")
    same = {"dtype": "float32", "device": "cpu"}
    head = "both" if critic is not None and critic.shared else "policy"
    expected: list[tuple[str, dict[str, Any]]] = [("policy", same | {"config": policy_training(config), "head": head})]
    if reference:
        expected.append(("policy", same | {"config": config.trainer, "trains": False}))
    if critic is not None and not critic.shared:
        own = critic_training(config.trainer, critic)
        expected.append((critic.path or "policy", same | {"config": own, "head": "value"}))
    assert made == expected
    found = [model.path for model in (models.policy, models.reference, models.critic) if model is not None]
    assert found == [path for path, _ in expected] and (models.reference is not None) == reference


def test_a_critic_of_its_own_has_its_own_numbers_and_the_trainer_s_for_the_rest() -> None:
    trainer = TrainerConfig(learning_rate=1.0, schedule="linear", warmup_steps=9, grad_clip=3.0, beta2=0.7, steps=20)
    critic = CriticConfig(learning_rate=0.5, schedule="cosine", lr_warmup_steps=4, grad_clip=0.1)
    got = critic_training(trainer, critic)
    assert (got.learning_rate, got.schedule, got.warmup_steps, got.grad_clip) == (0.5, "cosine", 4, 0.1)
    assert (got.beta2, got.steps) == (0.7, 20)


LENGTHS = (100, 60, 40)
NO_IMAGES = Shown()
QWEN = SimpleNamespace(  # Qwen2.5-0.5B
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    vocab_size=151936,
)


def batch() -> Batch:
    headers = [SimpleNamespace(tokens=n, baseline=False, prompt_tokens=0, prompt=n) for n in LENGTHS]
    plan = [MiniBatch(ranks=[[[0]], [[1, 2]]], rows=[0, 1, 2])]
    return Batch(step=0, headers=headers, plan=plan, rows={})  # type: ignore[arg-type]


def models(**others: Any) -> Models:
    policy = SimpleNamespace(row_cost=row_cost_of(QWEN))
    others |= {"teachers": Teachers({"": policy})} if others.pop("teacher", None) else {}  # type: ignore[dict-item]
    return Models(policy, **{name: policy if given is True else given for name, given in others.items()})  # type: ignore[arg-type]


def flops(
    them: Models, *, epochs: int = 1, trains_policy: bool = True, recomputes: bool = False, shown: Shown = NO_IMAGES
) -> float:
    return model_flops(them, batch(), shown, epochs=epochs, trains_policy=trains_policy, recomputes=recomputes)


def test_it_is_six_times_the_weights_per_token_and_attention() -> None:
    """Against the model's published size: 357.9 M parameters beside the embeddings, which are the last layer too."""
    added = 24 * (2 * 896 + (14 + 2 * 2) * 64) + 896  # norms and biases, which multiply nothing
    parameters = 357_898_112 - added + 896 * 151936
    attention = 12 * 24 * 14 * 64 * sum(n * n for n in LENGTHS) // 2  # 12 L H Q T, of which the causal mask leaves half
    assert flops(models()) == 6 * parameters * sum(LENGTHS) + attention


def test_every_pass_counts() -> None:
    one = flops(models()) / 3  # a forward pass
    assert flops(models(), epochs=2) == pytest.approx(6 * one)
    assert flops(models(), recomputes=True) == pytest.approx(4 * one)
    assert flops(models(), trains_policy=False) == pytest.approx(one)
    assert flops(models(reference=True)) == pytest.approx(4 * one)
    assert flops(models(reference=True, teacher=True)) == pytest.approx(5 * one)
    assert flops(models(critic=True)) == pytest.approx(7 * one)


def test_images_count_in_every_pass_of_models_with_a_tower_but_not_backward_through_a_frozen_one() -> None:
    shown, passes = Shown(patches=16, pairs=256, features=4), {"epochs": 2, "recomputes": True}
    for trains, images in ((True, 3 * 2 + 1), (False, 2 + 1)):
        tower = TowerCost(patch=10, pair=3, feature=7, side=8, trains=trains)
        seeing = SimpleNamespace(row_cost=row_cost_of(QWEN, tower=tower))
        added = flops(Models(seeing), shown=shown, **passes) - flops(models(), shown=shown, **passes)  # type: ignore[arg-type]
        assert added == images * (10 * 16 + 3 * 256 + 7 * 4)


def test_mfu_is_a_share_of_a_known_peak_and_absent_without_one() -> None:
    metrics = {"compute/model_flops": 4 * 989.4e12, "time/update_s": 2.0}
    rates = compute_rates(metrics, 4, "NVIDIA H200", "bfloat16")
    assert rates == {"compute/tflops_per_s": pytest.approx(494.7), "compute/mfu": pytest.approx(0.5)}
    assert "compute/mfu" not in compute_rates(metrics, 4, "cpu", "bfloat16")
    assert "compute/mfu" not in compute_rates(metrics, 4, "NVIDIA H200", "float32")


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_device_is_known_by_its_name(device: str, peak: float | None) -> None:
    assert peak_flops(device, "bfloat16") == peak


# Episodes of several roles in the trainer: what is compared with what, and how much a row counts.


Player = tuple[int, int, str]  # group, sample, role

# group, sample, role, its outcome, and the turn reward in each of its rows
PLAYED: tuple[tuple[int, int, str, float, tuple[float, ...]], ...] = (
    (0, 0, "buyer", 1.0, (0.0,)),
    (0, 0, "seller", -1.0, (0.0,)),
    (0, 1, "buyer", 0.25, (0.5,)),
    (0, 1, "seller", 3.0, (0.0, 0.75)),  # two rows
    (0, 2, "buyer", 0.5, (0.0,)),  # the seller never had a turn
    (1, 0, "buyer", 2.0, (0.0,)),
    (1, 0, "seller", 7.0, (0.0,)),
    (1, 1, "buyer", 2.0, (0.0, 0.0)),  # two rows
    (1, 1, "seller", 5.0, (0.25,)),
)


def played(roles: bool = True) -> list[Trajectory]:
    """The rows of PLAYED. Without roles each role's part of an episode is an episode of a group of its own."""
    source = make_rows(0, groups=2, samples=6)
    rows, segments = list[Trajectory](), defaultdict[tuple[int, int], int](int)
    for group, sample, role, outcome, turn_rewards in PLAYED:
        for number, reward in enumerate(turn_rewards):
            row = source[len(rows)]
            place = {"group_id": group, "sample": sample, "episode_id": f"{group}.{sample}", "role": role}
            if not roles:
                alone = 10 * group + (role == "seller")
                place = {"group_id": alone, "sample": sample, "episode_id": f"{alone}.{sample}", "role": ""}
            segment = segments[group, sample] if roles else number
            segments[group, sample] += 1
            turns = [Turn(role="assistant", text="", start=4, end=len(row.token_ids), reward=reward)]
            parts = {"exact": outcome}
            rows.append(
                msgspec.structs.replace(
                    row, **place, segment=segment, reward=outcome, turns=turns, reward_parts=parts, baseline=False
                )
            )
    return rows


def config(advantage: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(advantage=advantage),
        reward=RewardConfig(functions=(RewardTerm(name="exact"),)),
    )


def roles_inputs(rows: list[Trajectory], advantage: str = "grpo") -> AdvantageInputs:
    whole = whole_batch(rows, with_states="states" in TRAITS[advantage].needs)
    before = Precomputed(
        whole.behaviour,
        2 * whole.behaviour,
        process=3 * whole.behaviour,
        values=whole.behaviour + 0.5,
        sum_squares=whole.behaviour.exp(),
    )
    return advantage_inputs(whole, before, None, config(advantage)).padded()


def totals() -> dict[Player, float]:
    return {(g, s, role): outcome + sum(turns) for g, s, role, outcome, turns in PLAYED}


def of_rows(per_player: dict[Player, float]) -> list[float]:
    return [per_player[g, s, role] for g, s, role, _, turns in PLAYED for _ in turns]


def compared(key: Player) -> list[float]:
    """What the same role earned in the episodes of its group."""
    return [reward for (g, _, role), reward in totals().items() if (g, role) == (key[0], key[2])]


def grpo(key: Player) -> float:
    return (totals()[key] - statistics.fmean(compared(key))) / (statistics.stdev(compared(key)) + EPSILON)


def rloo(key: Player) -> float:
    others = compared(key)
    others.remove(totals()[key])
    return totals()[key] - statistics.fmean(others)


def dr_grpo(key: Player) -> float:
    return totals()[key] - statistics.fmean(compared(key))


@pytest.mark.parametrize("formula", [grpo, rloo, dr_grpo])
def test_a_role_is_compared_with_itself_in_the_other_episodes_of_its_group(
    formula: Callable[[Player], float],
) -> None:
    x = roles_inputs(played())
    got = ADVANTAGES[formula.__name__](x)
    expected = of_rows({key: formula(key) for key in totals()})
    assert x.rewards.tolist() == pytest.approx(of_rows(totals()), abs=1e-12)
    for row, advantage in enumerate(expected):
        assert got[row][x.mask[row]].tolist() == pytest.approx([advantage] * int(x.mask[row].sum()), abs=1e-9)
    assert len(set(expected)) > 4, "else nothing was compared"


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if "greedy" not in traits.needs])
def test_every_estimator_sees_a_role_as_an_episode_in_a_group_of_its_own(name: str) -> None:
    together, apart = (ADVANTAGES[name](roles_inputs(played(roles=roles), name)) for roles in (True, False))
    assert together.abs().sum() > 0
    assert together.tolist() == apart.tolist()


def test_a_role_is_compared_with_itself_in_the_greedy_episode() -> None:
    rows = played()
    for row in rows:
        row.baseline = row.sample == 0
    x = roles_inputs(rows, "remax")
    got = ADVANTAGES["remax"](x)
    expected = of_rows({key: reward - totals()[key[0], 0, key[2]] for key, reward in totals().items()})
    for row, advantage in zip(range(len(rows)), expected, strict=True):
        assert got[row][x.mask[row]].tolist() == pytest.approx([advantage] * int(x.mask[row].sum()))
    assert x.mask.any(1).tolist() == [row.sample != 0 for row in rows]


def test_in_the_loss_an_episode_counts_once_and_in_its_group_each_of_its_roles() -> None:
    whole = whole_batch(played())
    assert whole.row_weights.tolist() == pytest.approx(
        [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1, *[1 / 2] * 2, *[1 / 3] * 3]
    )
    assert whole.player_weights.tolist() == [1, 1, 1, 1 / 2, 1 / 2, 1, 1, 1, 1 / 2, 1 / 2, 1]


def test_rewards_of_roles_are_told_apart() -> None:
    headers = [row.header() for row in played()]
    assert role_rewards(headers) == totals()
    assert episode_rewards(headers) == {(0, 0): 0.0, (0, 1): 2.25, (0, 2): 0.5, (1, 0): 4.5, (1, 1): 3.625}
    metrics = batch_metrics(headers, 0, None)
    assert metrics["reward/mean"] == pytest.approx((0.0 + 2.25 + 0.5 + 4.5 + 3.625) / 5)
    assert metrics["reward/mean/buyer"] == pytest.approx((1.0 + 0.75 + 0.5 + 2.0 + 2.0) / 5)
    assert metrics["reward/mean/seller"] == pytest.approx((-1.0 + 3.75 + 7.0 + 5.25) / 4)
    assert metrics["batch/episodes"] == 5


def test_a_group_whose_roles_always_earn_the_same_has_no_signal() -> None:
    rows = [row for row in played() if row.group_id == 1]
    assert has_signal([row.header() for row in rows]), "the seller's rewards differ"
    for row in rows:
        row.reward, row.turns = {"buyer": 1.0, "seller": -1.0}[row.role], []
    assert not has_signal([row.header() for row in rows]), "roles are not compared with one another"
    assert batch_metrics([row.header() for row in rows], 0, None)["reward/groups_without_signal"] == 1.0


def with_unscored_seller() -> list[Trajectory]:
    rows = played()
    for row in rows:
        if (row.group_id, row.sample, row.role) == (0, 1, "seller"):
            row.scored, row.error, row.reward = False, "reward judge: gone", 0.0
    return rows


def test_an_episode_of_which_one_role_was_not_scored_counts_as_not_scored() -> None:
    rows = with_unscored_seller()
    headers = [row.header() for row in rows]
    metrics = batch_metrics(headers, 0, None)
    assert (0, 1) not in episode_rewards(headers)
    assert metrics["reward/mean"] == pytest.approx((0.0 + 0.5 + 4.5 + 3.625) / 4)
    assert metrics["reward/unscored_fraction"] == pytest.approx(1 / 5)
    assert metrics["reward/mean/buyer"] == pytest.approx((1.0 + 0.75 + 0.5 + 2.0 + 2.0) / 5), "it was scored"
    # The rows of an episode may be on any ranks; one failure is one episode, on however many of them.
    ranks = [conversation_sums(headers, rows[rank::2]) for rank in range(2)]
    sums = [sum(both) for both in zip(*ranks, strict=True)]
    assert conversation_metrics(sums)["rollout/error_fraction"] == pytest.approx(1 / 5)


def test_a_role_that_was_scored_is_compared_with_itself_though_another_was_not() -> None:
    before, after = roles_inputs(played()), roles_inputs(with_unscored_seller())
    buyers = [row.role == "buyer" for row in played()]
    assert ADVANTAGES["grpo"](after)[buyers].tolist() == ADVANTAGES["grpo"](before)[buyers].tolist()
    assert not ADVANTAGES["grpo"](after)[[not x for x in after.scored.tolist()]].any()


def test_a_batch_without_an_episode_scored_in_full_is_refused() -> None:
    rows = [row for row in with_unscored_seller() if (row.group_id, row.sample) == (0, 1)]
    with pytest.raises(RewardsMissing, match="judge: gone"):
        require_rewards(Batch(0, [row.header() for row in rows], [], {row.key: row for row in rows}))


# A teacher's scores, as a server's answers, and the comparison of tokenizers.


IDS = [5, 6, 7]


def answer(ids: list[int], **more: Any) -> dict[str, Any]:
    """vLLM's answer to a prompt of tokens, each of which has the log-probability -id."""
    given = [None, *({str(token): {"logprob": -float(token), "rank": 1, "decoded_token": "x"}} for token in ids[1:])]
    return {"choices": [{"text": "x", "prompt_logprobs": given}], **more}


def endpoint(url: str, **settings: Any) -> EndpointConfig:
    return EndpointConfig(url=f"{url}/v1", model="large", backoff_s=0.01, **settings)


def teacher_batch(*rows: list[int], trains: list[bool]) -> Tensors:
    width = max(map(len, rows))
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width - 1, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, 0] = trains[number]
    return Tensors(tokens, torch.tensor([len(row) for row in rows]), mask, torch.ones(len(rows), 1, 1))


def test_rows_with_images_are_refused() -> None:
    tensors = teacher_batch(IDS, trains=[True])
    tensors.images = Images({}, torch.zeros_like(tensors.tokens), positions=None)
    with pytest.raises(UserError, match=r"algorithm\.teacher\.path"):
        TeacherEndpoint(endpoint("http://127.0.0.1:1/v1")).score([tensors])


def test_scores_are_those_of_the_tokens_after_the_first() -> None:
    given = answer(IDS)
    given["choices"][0]["prompt_logprobs"][1]["9"] = {"logprob": -0.1}
    entries = read_scores(json.dumps(given).encode(), IDS, "url")
    assert [{token: value.logprob for token, value in entry.items()} for entry in entries] == [
        {6: -6.0, 9: -0.1},
        {7: -7.0},
    ]


@pytest.mark.parametrize(
    "raw",
    [
        "{}",
        "[",
        '{"choices": []}',
        '{"choices": [{"text": "x"}]}',
        '{"choices": [{"text": "x", "prompt_logprobs": null}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": NaN}}, {"7": {"logprob": -1}}]}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": -1}}, {"8": {"logprob": -1}}]}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": -1}}]}]}',
        '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": -1}}, {"7": {"logprob": -1}}, null]}]}',
        '{"choices": [{"prompt_logprobs": [null, null, null]}]}',
        "[" * 100_000,
    ],
)
def test_an_answer_without_a_score_for_each_token_is_refused(raw: str) -> None:
    with pytest.raises(ScorerFailed, match="url"):
        read_scores(raw.encode(), IDS, "url")


async def test_only_rows_that_train_are_asked_for_and_a_lost_answer_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    busy = Answer({"error": "busy"}, status=503)
    async with Outside(busy, lambda body: Answer(answer(body["prompt"]))) as server:
        teacher = TeacherEndpoint(endpoint(server.url, api_key_env="TEACHER_KEY", extra_body={"priority": 3}))
        batches = [teacher_batch([5, 6, 7], [8, 9], trains=[True, False]), teacher_batch([4, 3], trains=[True])]
        scored = await asyncio.to_thread(teacher.score, batches)
    assert [each.tolist() for each in scored] == [[[-6.0, -7.0], [0.0, 0.0]], [[-3.0]]]
    assert sorted(asked.body["prompt"] for asked in server.asked[1:]) == [[4, 3], [5, 6, 7]]
    assert {asked.authorization for asked in server.asked} == {"Bearer secret"}
    assert {asked.body["priority"] for asked in server.asked} == {3}


@pytest.mark.parametrize("wrong", [Answer({"choices": []}), Answer({"error": "too long"}, status=400)])
async def test_a_server_that_does_not_score_is_an_error_that_names_the_key(wrong: Answer) -> None:
    async with Outside(wrong) as server:
        with pytest.raises(UserError, match=r"algorithm\.teacher\.endpoint"):
            await asyncio.to_thread(TeacherEndpoint(endpoint(server.url)).score, [teacher_batch([5, 6], trains=[True])])


async def test_a_silent_server_is_given_up_at_the_deadline() -> None:
    async with Outside(Answer(None)) as server:
        teacher = TeacherEndpoint(endpoint(server.url, timeout_s=0.2))
        with pytest.raises(UserError, match=r"algorithm\.teacher\.endpoint\.timeout_s"):
            await asyncio.to_thread(teacher.score, [teacher_batch([5, 6], trains=[True])])


def changed_tokenizer(folder: Path, change: dict[str, int]) -> Path:
    """A tokenizer as the tests' own, but for some tokens' numbers."""
    save_tokenizer(folder)
    file = folder / "tokenizer.json"
    read = json.loads(file.read_text())
    read["model"]["vocab"] |= change
    file.write_text(json.dumps(read))
    return folder


def test_a_teacher_must_number_the_policys_tokens_alike_and_may_have_more(tmp_path: Path) -> None:
    for name in ("policy", "same", "more", "other"):
        (tmp_path / name).mkdir()
    policy = save_tokenizer(tmp_path / "policy")
    vocabulary: dict[str, int] = json.loads((policy / "tokenizer.json").read_text())["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    key = "algorithm.teacher.by_source.math.path"
    check_tokenizers({key: str(save_tokenizer(tmp_path / "same"))}, {}, str(policy))
    more = changed_tokenizer(tmp_path / "more", {"one more": len(vocabulary)})
    check_tokenizers({key: str(more)}, {}, str(policy))
    other = changed_tokenizer(tmp_path / "other", {one: vocabulary[two], two: vocabulary[one]})
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.by_source\.math\.path"):
        check_tokenizers({key: str(other)}, {}, str(policy))


async def test_a_server_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    policy = save_tokenizer(tmp_path)
    async with Outside(Answer({"prompt": "something else"})) as server:
        with pytest.raises(ConfigError, match=r"algorithm\.teacher\.endpoint"):
            served = {"algorithm.teacher.endpoint": endpoint(server.url)}
            await asyncio.to_thread(check_tokenizers, {}, served, str(policy))


def test_of_each_place_the_likeliest_tokens_are_kept() -> None:
    """The server also gives the sampled token where it is none of them."""
    entry = {"5": {"logprob": -3.0}, "8": {"logprob": -0.5}, "2": {"logprob": -1.5}}

    async def ask() -> list[tuple[Tensor, Tensor]]:
        async with Outside(Answer({"choices": [{"prompt_logprobs": [None, entry]}]})) as server:
            batches = [teacher_batch([4, 5], [4, 5], trains=[True, False])]
            found = await asyncio.to_thread(TeacherEndpoint(endpoint(server.url)).likeliest, batches, 2)
            assert [asked.body["prompt_logprobs"] for asked in server.asked] == [2]
            return found

    ((values, tokens),) = asyncio.run(ask())
    assert values[0].tolist() == [[-0.5, -1.5]] and tokens[0].tolist() == [[8, 2]]
    assert tokens[1].tolist() == [[0, 1]] and values[1].exp().sum() < 1


def test_a_server_that_names_too_few_tokens_is_an_error() -> None:
    async def ask() -> None:
        async with Outside(lambda body: Answer(answer(body["prompt"]))) as server:
            await asyncio.to_thread(
                TeacherEndpoint(endpoint(server.url)).likeliest, [teacher_batch([5, 6], trains=[True])], 2
            )

    with pytest.raises(UserError, match=r"algorithm\.teacher\.endpoint"):
        asyncio.run(ask())


TEMPLATE = "{% for m in messages %}w2 w3 {{ m['content'] }} w4 {% endfor %}"


def hinting(folder: Path, hint: str, template: str = TEMPLATE, bos: str | None = None) -> Hints:
    """Hints by the tests' tokenizer, which splits at spaces."""
    words = Tokenizer(tokenizer_models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", bos_token=bos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Hints(hint, str(folder))


class Adapted:
    """A backend whose base is another function than the whole policy."""

    replays_routers, row_cost = False, RowCost()

    def __init__(self, path: str, **given: Any) -> None:
        self.path, self.given = path, given

    def forward(self) -> str:
        return f"all of {self.path}"

    def forward_base(self) -> str:
        return f"the base of {self.path}"


def test_adapters_without_themselves_are_the_reference_and_all_of_them_teach_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(actor_critic, "Fsdp2Backend", Adapted)
    hinting(tmp_path, "w5")
    policy = str(tmp_path)
    config = RunConfig(
        model=ModelConfig(path=policy, dtype="float32"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(learning_rate=1.0, lora=LoraConfig(rank=2)),
        algorithm=AlgorithmConfig(
            kl=KlConfig(coef=0.1),
            teacher=TeacherConfig(by_source={"math": TeacherModelConfig(path=policy)}, hint="w5"),
        ),
    )
    models: Any = build_models(config, "cpu")
    assert models.reference.forward() == f"the base of {policy}"
    assert models.reference.row_cost is models.policy.row_cost
    teachers = models.teachers.models
    assert teachers[""].forward() == f"all of {policy}" and isinstance(teachers["math"], Adapted)
    assert teachers["math"].given["trains"] is False


def test_a_teacher_that_numbers_tokens_otherwise_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    for name in ("policy", "other"):
        (tmp_path / name).mkdir()
    policy = str(save_tokenizer(tmp_path / "policy"))
    teacher = TeacherConfig(path=str(changed_tokenizer(tmp_path / "other", {"w3": 4, "w4": 3})))
    config = RunConfig(model=ModelConfig(path=policy), data=DataConfig(path="none"))

    def make(path: str, **given: Any) -> Backend:
        raise AssertionError(f"{path} was loaded")

    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.path"):
        load_teachers(teacher, config, Adapted(policy), make)  # type: ignore[arg-type]


def test_a_hint_stands_in_front_of_the_row_as_a_system_message(tmp_path: Path) -> None:
    row = msgspec.structs.replace(
        make_rows(0)[0], ground_truth="w9 {feedback}", reward_reasons={"a": "w7", "b": "w8 w1"}
    )
    hinted = hinting(tmp_path, "w5 {ground_truth} {feedback}").before(row)
    # A placeholder within a value stays text, and so does the text of a special token.
    assert hinted.token_ids[:9].tolist() == [2, 3, 5, 9, 0, 7, 8, 4, *row.token_ids[:1].tolist()]
    assert hinted.token_ids[8:].tolist() == row.token_ids.tolist()
    assert hinted.loss_mask[8:].tolist() == row.loss_mask.tolist() and not hinted.loss_mask[:8].any()


def test_the_token_that_begins_a_text_stands_once(tmp_path: Path) -> None:
    row = make_rows(0)[0]
    row.token_ids[0] = 2
    hinted = hinting(tmp_path, "{ground_truth}", bos="w2").before(msgspec.structs.replace(row, ground_truth="w9"))
    assert hinted.token_ids.tolist() == [2, 3, 9, 4, *row.token_ids[1:].tolist()]


def test_a_template_that_prints_no_lone_system_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.teacher\.hint"):
        hinting(tmp_path, "{ground_truth}", "{{ raise_exception('the first message must be from the user') }}")


def test_a_teachers_scores_of_hinted_rows_stand_beside_the_rows_own_tokens(tmp_path: Path) -> None:
    """A model of bigrams has the same log-probabilities with and without a hint, if they stand where they belong."""
    rows = make_rows(0)[:3]
    for row, source in zip(rows, ("", "math", "code"), strict=True):
        row.ground_truth, row.data_source = "w9 " * (1 + len(source)), source
    tensors, table = collate(rows, device="cpu"), Table(0)
    teachers = Teachers({"math": table, "": table}, hinting(tmp_path, "{ground_truth}"))  # type: ignore[dict-item]
    micro = MicroBatch([0, 1, 2], tensors, Rows(torch.tensor([len(row.token_ids) - 1 for row in rows])))
    micro = replace(micro, readings=teachers.read(rows, tensors))
    assert micro.readings["math"].tensors.tokens[0, :7].tolist() == [2, 3, 9, 9, 9, 9, 9]
    scored, plain = teachers.logprobs(micro, {}), table.forward(tensors).logprobs
    assert plain is not None and torch.equal(scored[tensors.mask], plain[tensors.mask])
    whole = table.forward(tensors, frozenset({"distribution"})).distribution
    assert whole is not None
    distance = teachers.divergence(micro, {}, whole, divergence_of(TeacherConfig(divergence="reverse")))
    assert not distance[tensors.mask].any()


def test_a_row_whose_source_has_no_teacher_is_refused() -> None:
    rows = make_rows(0)[:1]
    rows[0].data_source = "code"
    with pytest.raises(UserError, match=r"algorithm\.teacher\.by_source.*'code'"):
        Teachers({"math": Table(0)}).read(rows, collate(rows, device="cpu"))  # type: ignore[dict-item]


def test_rows_with_images_get_no_hint(tmp_path: Path) -> None:
    rows = make_rows(0)[:1]
    rows[0].media = [Media(sha256="0" * 64, mime="image/png", position=1)]
    with pytest.raises(UserError, match=r"algorithm\.teacher\.hint"):
        Teachers({"": Table(0)}, hinting(tmp_path, "{feedback}")).read(  # type: ignore[dict-item]
            rows, collate(rows, device="cpu")
        )
