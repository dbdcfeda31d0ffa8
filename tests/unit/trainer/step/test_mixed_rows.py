"""Rows in which only some tokens were sampled under a grammar's mask: the free ones learn what they learn alone.

The policy has one parameter per token of the batch, its log-probability, so a step shows the gradient of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AlgorithmConfig, KlConfig, LossOptions
from rl_async.configs.schema.correction import PRESETS, CorrectionOptions, resolve
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from rl_async.trainer.algorithms.advantages import AdvantageInputs
from rl_async.trainer.algorithms.algorithm import build, padded_estimator
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.losses import LOSSES
from rl_async.trainer.backend import LossFn, Outputs
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.models import Models
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import pure_data_parallel
from rl_async.trainer.update import Updated, update

pytestmark = pytest.mark.usefixtures("one_rank")

STEP = 2  # all rows are this stale
RATE = 0.01
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


class Table:
    """log pi of each token id."""

    device = "cpu"
    row_cost = RowCost()
    replays_routers = False

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
            self.table -= RATE * gradient
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


def step(algorithm: AlgorithmConfig, *, alone: bool, kl_coef: float = 0.0) -> Stepped:
    """Two epochs on ROWS, so that the second sees a policy that has moved."""
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        algorithm=algorithm,
        trainer=TrainerConfig(minibatches=1, epochs=2, max_tokens_per_microbatch=16),
    )
    policy, reference, seen = Table(), Table(), list[Tensor]()
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
    mixed, alone = step(algorithm, alone=False), step(algorithm, alone=True)
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
    got, correction = step(algorithm, alone=False).corrected, resolve(preset, options)
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
    mixed, alone = step(algorithm, alone=False), step(algorithm, alone=True)
    assert torch.equal(mixed.moved[FREE], alone.moved[FREE])
    assert (mixed.moved[CONSTRAINED] != 0).all() and (mixed.moved[CONSTRAINED].abs() < 2 * RATE * WEIGHT * 1.1).all()


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
@pytest.mark.parametrize("correction", ["disabled", "bypass_ppo_clip"])
def test_the_kl_of_a_constrained_token_is_weighed_in_the_loss(correction: str, estimator: str) -> None:
    kl = KlConfig(coef=1.0, estimator=estimator)  # type: ignore[arg-type]
    got = step(AlgorithmConfig(kl=kl, correction=correction, aggregation="token-sum"), alone=False, kl_coef=1.0)
    weights = torch.where(FREE, 1.0, WEIGHT)
    expected = got.distance * ((1 - RATE * weights) ** 2 - 1)  # the gradient of d^2 / 2 is d, in each of two epochs
    torch.testing.assert_close(got.moved[FREE], expected[FREE], atol=1e-9, rtol=1e-4)
    torch.testing.assert_close(got.moved[CONSTRAINED], expected[CONSTRAINED], atol=1e-9, rtol=1e-4)


def test_the_kl_of_a_constrained_token_is_weighed_in_the_reward() -> None:
    kl = KlConfig(coef=1.0, estimator="k1", place="reward")
    algorithm = AlgorithmConfig(kl=kl, aggregation="token-sum")
    without = step(AlgorithmConfig(aggregation="token-sum"), alone=False)
    got = step(algorithm, alone=False, kl_coef=1.0)
    sampled = FREE | CONSTRAINED
    expected = torch.where(sampled, got.distance * torch.where(FREE, 1.0, WEIGHT), 0.0)
    torch.testing.assert_close(without.rewards - got.rewards, expected, atol=1e-6, rtol=1e-4)
    assert got.updated.metrics["loss/kl_reference"] == pytest.approx((expected.sum() / sampled.sum()).item(), rel=1e-4)
