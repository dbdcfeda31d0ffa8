"""What tokens teach that a grammar's mask restricted, against a float64 reference by enumeration.

Four tokens, two sampled per row; the grammar allows some of them, depending on the one before. mu is the policy
restricted to those and renormalised, and all rows that mu can sample are there, each as often as mu samples it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.correction import PRESETS
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Sampling, Trajectory, Version, VersionRun
from rl_async.trainer.algorithms.advantages import AdvantageInputs
from rl_async.trainer.algorithms.algorithm import build, padded_estimator
from rl_async.trainer.algorithms.losses import LOSSES
from rl_async.trainer.backend import LossFn, Outputs
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.models import Models
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import pure_data_parallel
from rl_async.trainer.update import Updated, update

pytestmark = pytest.mark.usefixtures("one_rank")

VOCAB = 4
RATE = 1.0
START = 0  # the prompt, a single token
ALLOWED = {0: [1, 2], 1: [0, 3], 2: [1, 2, 3], 3: [0]}  # after each token; 3 leaves no choice


class Markov:
    """A policy over the next token given the last one, softmax of a float64 table that gradient descent changes."""

    device = "cpu"
    row_cost = RowCost()
    replays_routers = False

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=draw).mul_(2).requires_grad_()
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
            self.table -= RATE * gradient
        return loss.item(), gradient.norm().item()


def masked(policy: Tensor, state: int) -> Tensor:
    """mu [V] after a token: the policy over what the grammar allows."""
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
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
        mu = torch.stack([masked(table.log_softmax(-1), s) for s in range(VOCAB)])
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


def step(algorithm: AlgorithmConfig, *, constrained: bool = True) -> tuple[Markov, Tensor, Updated]:
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
    return policy, (policy.table.detach() - before) / RATE, updated


@pytest.mark.parametrize("correction", PRESETS)
def test_with_any_correction_the_expected_gradient_is_the_policys_over_what_is_allowed(correction: str) -> None:
    policy, gradient, _ = step(AlgorithmConfig(correction=correction, aggregation="token-sum"))
    assert policy.looks > 0, "also where log pi_old is bypassed"
    torch.testing.assert_close(gradient, reference(Markov().table.detach()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_any_loss_it_is(loss: str) -> None:
    _, gradient, _ = step(AlgorithmConfig(loss=loss, correction="disabled", aggregation="token-sum"))
    torch.testing.assert_close(gradient, reference(Markov().table.detach()), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("correction", ["disabled", "decoupled_geo_rs", "bypass_ppo_clip"])
def test_unmarked_rows_would_teach_something_else(correction: str) -> None:
    _, gradient, _ = step(AlgorithmConfig(correction=correction, aggregation="token-sum"), constrained=False)
    assert (gradient - reference(Markov().table.detach())).abs().max() > 0.05


def test_weights_are_what_the_policy_left_to_the_grammar_and_metrics_of_drift_leave_the_tokens_out() -> None:
    policy, _, updated = step(AlgorithmConfig())
    logs = Markov().table.detach().log_softmax(-1)
    left = {s: logs[s].exp()[ALLOWED[s]].sum().item() for s in range(VOCAB)}
    expected = torch.tensor([[left[START], left[a]] for a, _ in sequences()]).flatten()
    torch.testing.assert_close(updated.tokens.corrected.weights.float(), expected, atol=1e-6, rtol=1e-5)
    assert updated.tokens.corrected.keep.all() and (expected < 1).all()
    assert updated.metrics["constrained/share"] == 1.0
    assert updated.metrics["constrained/weight_mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert not [name for name in updated.metrics if name.startswith("correction/")], "no token is free"
    _, _, free = step(AlgorithmConfig(), constrained=False)
    assert free.metrics["correction/k3"] > 0.05 and "constrained/share" not in free.metrics
    assert policy.looks > 0
