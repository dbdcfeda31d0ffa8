"""The whole objective under every loss: no split into micro-batches and ranks changes gradients; what the KL adds."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_async.configs.schema.algorithm import AdvantageOptions, AlgorithmConfig, KlConfig
from rl_async.trainer.algorithms.advantages import AdvantageInputs
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.algorithms.losses import LOSSES
from rl_async.trainer.update import Precomputed, penalised
from tests.contracts.trainer.workers.objective import (
    DIVERGENCES,
    KL_COEF,
    LEARNING_RATE,
    SPLITS,
    TEACHER_COEF,
    TOP_K,
    Table,
    recorded,
    run_config,
    variants,
)
from tests.support.forked import run_ranks

EPISODES = torch.arange(2)  # each row is one
VARIANTS = [name for name, _ in variants()]
Found = dict[str, dict[str, dict[str, Tensor]]]  # variant -> split -> what


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the workers wrote, on one rank and on two."""
    folder = tmp_path_factory.mktemp("objective")
    result: Found = defaultdict(lambda: defaultdict(dict))
    for ranks in SPLITS:
        out = folder / f"{ranks}.safetensors"
        run_ranks("tests.contracts.trainer.workers.objective", str(out), ranks=ranks, timeout_s=180)
        for key, tensor in load_file(out).items():
            variant, split, what = key.split("|")
            result[variant][split][what] = tensor
    return result


@pytest.mark.parametrize("variant", VARIANTS)
def test_neither_micro_batches_nor_ranks_change_gradients_or_metrics(found: Found, variant: str) -> None:
    splits = found[variant]
    assert splits.keys() == SPLITS[1].keys() | SPLITS[2].keys()
    whole = splits["1 micro-batches"]
    for epoch in range(2):
        assert whole[f"gradient {epoch}"].abs().max() > 1e-4
    for split in splits.values():
        assert split.keys() == whole.keys()
        for what, tensor in split.items():
            torch.testing.assert_close(tensor, whole[what], rtol=1e-6, atol=1e-9, msg=lambda m, w=what: f"{w}: {m}")


def test_the_batch_tells_the_losses_apart(found: Found) -> None:
    """Else the test above would prove nothing: in the second epoch each loss has a gradient of its own."""
    second = {name: found[name]["1 micro-batches"]["gradient 1"] for name in LOSSES}
    second.pop("gpg")  # the loss is reinforce
    names = list(second)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not torch.allclose(second[one], second[other], rtol=1e-3, atol=1e-9), (one, other)


def test_the_full_kl_is_the_divergence_of_the_two_models(found: Found) -> None:
    """gpg's first epoch is on-policy; its second is on the table after one step of that gradient."""
    metrics = found["gpg"]["7 micro-batches"]
    policy, reference = Table(0).table.detach(), Table(1).table.detach().log_softmax(1)
    per_epoch = []
    for table in (policy, policy - LEARNING_RATE * metrics["gradient 0"]):
        p = table.log_softmax(1)
        tokens = [
            sum(math.exp(a) * (a - b) for a, b in zip(p[before].tolist(), reference[before].tolist(), strict=True))
            for row in recorded()
            for before, trained in zip(row.token_ids[:-1], row.loss_mask[1:], strict=True)
            if trained
        ]
        per_epoch.append(sum(tokens) / len(tokens))
    assert metrics["loss/kl_reference"].item() == pytest.approx(sum(per_epoch) / 2, rel=1e-6)


def trained_tokens() -> tuple[Tensor, Tensor]:
    """The token before each trained one, and that token."""
    pairs = [
        (before, after)
        for row in recorded()
        for before, after, trained in zip(row.token_ids[:-1], row.token_ids[1:], row.loss_mask[1:], strict=True)
        if trained
    ]
    befores, afters = zip(*pairs, strict=True)
    return torch.tensor(befores, dtype=torch.int64), torch.tensor(afters, dtype=torch.int64)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_teachers_gradient_is_that_of_the_mean_divergence(found: Found, divergence: str) -> None:
    table, (before, _) = Table(0).table, trained_tokens()
    p, t = table[before].softmax(-1), Table(2).table.detach()[before].softmax(-1)
    m = 0.3 * t + 0.7 * p
    tokens = {
        "reverse": (p * (p / t).log()).sum(-1),
        "forward": (t * (t / p).log()).sum(-1),
        "jsd": 0.3 * (t * (t / m).log()).sum(-1) + 0.7 * (p * (p / m).log()).sum(-1),
    }[divergence]
    (expected,) = torch.autograd.grad(TEACHER_COEF * tokens.mean(), table)
    got = found[f"teacher {divergence}"]["7 micro-batches"]
    torch.testing.assert_close(got["gradient 0"], expected, rtol=1e-6, atol=1e-9)
    assert got["loss/kl_teacher"].item() < tokens.mean().item(), "the mean with the second epoch, which is closer"


def test_a_teacher_of_sampled_tokens_gives_the_policy_gradient_of_the_divergence(found: Found) -> None:
    table, (before, after) = Table(0).table, trained_tokens()
    mine, its = table.log_softmax(-1)[before, after], Table(2).table.detach().log_softmax(-1)[before, after]
    distance = (mine - its).detach()
    (expected,) = torch.autograd.grad((TEACHER_COEF * distance * mine).mean(), table)
    got = found["teacher sampled"]["7 micro-batches"]
    # Advantages are float32.
    torch.testing.assert_close(got["gradient 0"], expected, rtol=1e-5, atol=1e-8)
    assert got["loss/kl_teacher"].item() == pytest.approx(distance.mean().item(), rel=1e-6)


def test_all_tokens_beyond_the_likeliest_count_as_one(found: Found) -> None:
    table, (before, _) = Table(0).table, trained_tokens()
    p, t = table[before].softmax(-1), Table(2).table.detach()[before].softmax(-1)
    likeliest = t.sort(-1, descending=True).indices[:, :TOP_K]
    p, t = p.gather(1, likeliest), t.gather(1, likeliest)
    p, t = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, t))
    tokens = (t * (t / p).log()).sum(1)
    (expected,) = torch.autograd.grad(TEACHER_COEF * tokens.mean(), table)
    torch.testing.assert_close(found["teacher top"]["7 micro-batches"]["gradient 0"], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("divergence", ["sampled", "reverse"])
def test_each_source_has_its_teacher_and_one_without_any_learns_nothing(found: Found, divergence: str) -> None:
    """The teachers of "one" and "two" are tables 2 and 3."""
    table = Table(0).table
    teachers = {"one": Table(2).table.detach(), "two": Table(3).table.detach()}
    terms, trained = list[Tensor](), 0
    for row in recorded():
        for before, after, trains in zip(row.token_ids[:-1], row.token_ids[1:], row.loss_mask[1:], strict=True):
            trained += bool(trains)
            if trains and row.data_source in teachers:
                mine = table[int(before)].log_softmax(-1)
                its = teachers[row.data_source][int(before)].log_softmax(-1)
                if divergence == "sampled":
                    terms.append((mine - its)[int(after)].detach() * mine[int(after)])
                else:
                    terms.append((mine.exp() * (mine - its)).sum())
    (expected,) = torch.autograd.grad(TEACHER_COEF * torch.stack(terms).sum() / trained, table)
    got = found[f"teachers {divergence}"]["7 micro-batches"]["gradient 0"]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)


def inputs() -> AdvantageInputs:
    mask = torch.tensor([[True, True, False], [False, True, False]])
    rewards = torch.tensor([1.0, 0.25], dtype=torch.float64)
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.25, 0.0]], dtype=torch.float64),
        mask=mask,
        groups=torch.tensor([0, 0]),
        scored=torch.tensor([True, True]),
        row_weights=torch.ones(2, dtype=torch.float64),
        lengths=mask.sum(1).double(),
        turns=torch.zeros(2, 3, dtype=torch.int64),
        options=AdvantageOptions(),
        parts={},
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_kl_in_the_reward_is_taken_from_each_sampled_token_and_from_the_rows_outcome(estimator: str) -> None:
    formulas = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
        "abs": abs,
    }
    difference = [[0.5, -0.25, 9.0], [7.0, 0.125, -8.0]]
    kl = KlConfig(coef=KL_COEF, place="reward", estimator=estimator)  # type: ignore[arg-type]
    algorithm = build(run_config(AlgorithmConfig(kl=kl)))
    reference = torch.full((2, 3), -1.0, dtype=torch.float64)
    precomputed = Precomputed(reference + torch.tensor(difference, dtype=torch.float64), reference)
    x = inputs()
    got, metrics = penalised(x, EPISODES, precomputed, algorithm, kl, 0.2)

    formula = formulas[estimator]
    sampled = [
        [formula(d) if m else 0.0 for d, m in zip(*row, strict=True)] for row in zip(difference, x.mask.tolist())
    ]
    for i in range(2):
        assert got.rewards[i].item() == pytest.approx(x.rewards[i].item() - 0.2 * sum(sampled[i]))
        expected = [r - 0.2 * v for r, v in zip(x.token_rewards[i].tolist(), sampled[i], strict=True)]
        assert got.token_rewards[i].tolist() == pytest.approx(expected)
    assert metrics == {"loss/kl_reference": pytest.approx(sum(map(sum, sampled)) / 3)}


def test_a_kl_in_the_loss_leaves_rewards_alone() -> None:
    kl = KlConfig(coef=KL_COEF)
    precomputed = Precomputed(torch.zeros(2, 3), torch.ones(2, 3))
    x = inputs()
    got, metrics = penalised(x, EPISODES, precomputed, build(run_config(AlgorithmConfig(kl=kl))), kl, 0.2)
    assert got is x and metrics == {}
    nobody = KlConfig(place="reward")
    got, metrics = penalised(
        x, EPISODES, replace(precomputed, reference=None), build(run_config(AlgorithmConfig(kl=nobody))), nobody, 0.0
    )
    assert got is x and metrics == {}


def test_only_a_full_kl_asks_for_distributions() -> None:
    for estimator, wanted in (("full", True), ("k3", False)):
        kl = KlConfig(coef=KL_COEF, estimator=estimator)  # type: ignore[arg-type]
        assert ("distribution" in build(run_config(AlgorithmConfig(kl=kl))).train_outputs) is wanted
    assert "distribution" not in build(run_config(AlgorithmConfig(kl=KlConfig(estimator="full")))).train_outputs
