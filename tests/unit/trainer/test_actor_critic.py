"""A critic's part in a step, and model FLOPs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.load import load_config
from rl_async.configs.schema.algorithm import AdvantageOptions, AlgorithmConfig, CriticConfig, KlConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged, UserError
from rl_async.trainer import actor_critic
from rl_async.trainer.actor_critic import (
    CriticUpdate,
    Models,
    build_models,
    compute_rates,
    critic_training,
    critic_update,
    model_flops,
    peak_flops,
    policy_training,
)
from rl_async.trainer.algorithms.advantages import AdvantageInputs, gae
from rl_async.trainer.algorithms.rows import Rows, on_tokens
from rl_async.trainer.backend import Backend, LossFn, Outputs, learning_rate_factor
from rl_async.trainer.batch_layout import MiniBatch, Shown, TowerCost, row_cost_of
from rl_async.trainer.batches import Batch, MicroBatch
from rl_async.trainer.packing import Tensors, empty_tensors
from rl_async.trainer.ranks import DataParallel
from rl_async.trainer.teacher import Teachers

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


def test_metrics_are_over_the_values_before_the_step() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        learns = critic_update(ALONE, inputs(), CriticConfig(), NO_OUTCOMES)
        assert learns is not None
        parts = [micro([0, 1, 2, 3, 4, 5])]
        for _ in range(2):
            teach(learns, FakeCritic(torch.ones(ROWS, WIDTH), parts), list(range(ROWS)))
        metrics = learns.metrics()
    finally:
        dist.destroy_process_group()
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
