"""Every advantage estimator against plain loops, its edges, reward shaping, and a critic's values."""

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_async.configs.schema.algorithm import ADVANTAGES as TRAITS
from rl_async.configs.schema.algorithm import (
    AdvantageOptions,
    AlgorithmConfig,
    LengthConfig,
    OverlongConfig,
    ShapingConfig,
)
from rl_async.configs.schema.data import DataConfig, ModelConfig, PreferenceConfig
from rl_async.configs.schema.reward import RewardConfig, RewardTerm
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import Media, ToolCall, Trajectory, TrajectoryHeader, Turn, Version, VersionRun
from rl_async.trainer.algorithms import advantages
from rl_async.trainer.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    explained_variance,
    gae,
    gae_advantage,
    value_loss,
    whiten,
)
from rl_async.trainer.algorithms.algorithm import padded_estimator
from rl_async.trainer.batches import turn_states
from rl_async.trainer.finetune.loop import preference_losses
from rl_async.trainer.packing import Rows as Packed
from rl_async.trainer.train import batch_metrics, conversation_sums
from rl_async.trainer.update import Precomputed, advantage_inputs, on_last_token
from tests.conftest import make_rows
from tests.support.batches import whole_batch

Rows = list[list[float]]  # advantage of each sampled token, by row


def random_inputs(seed: int, options: AdvantageOptions | None = None, unscored: bool = True) -> AdvantageInputs:
    """Groups of 1 to 4 episodes of unequal length, tools in between; two rows share an episode, one has no score."""
    draw = np.random.default_rng(seed)
    groups = [g for g, size in enumerate([3, 1, 4, 2]) for _ in range(size)]
    rows, width = len(groups), 9
    mask = draw.random((rows, width)) < 0.6
    mask[:, 2] = True
    rewards = draw.integers(0, 4, rows) / 2.0
    weights = np.ones(rows)
    rewards[5], weights[4], weights[5] = rewards[4], 0.5, 0.5  # rows 4 and 5 are one episode
    scored = np.ones(rows, dtype=bool)
    scored[7] = not unscored
    turn_rewards = np.where(mask, draw.random((rows, width)) < 0.2, False) * 0.25
    turn_rewards[5] = turn_rewards[4] = 0.0
    whole = torch.from_numpy(mask)
    distributions = torch.from_numpy(draw.dirichlet(np.full(4, 0.5), (rows, width)))
    outcomes = torch.from_numpy(rewards)
    return AdvantageInputs(
        rewards=outcomes + torch.from_numpy(turn_rewards).sum(1),
        token_rewards=torch.from_numpy(turn_rewards) + on_last_token(outcomes, whole),
        mask=whole,
        groups=torch.tensor(groups) * 7 + 3,
        scored=torch.from_numpy(scored),
        row_weights=torch.from_numpy(weights),
        lengths=whole.sum(1).double(),
        turns=torch.where(whole, (torch.arange(width) > 4).long(), -1),
        options=options or AdvantageOptions(),
        parts={"a": outcomes, "b": torch.from_numpy(draw.random(rows))},
        baselines=torch.from_numpy(draw.random(4))[torch.tensor(groups)],
        values=torch.from_numpy(draw.normal(size=(rows, width))),
        logprobs=distributions.amax(2).log(),
        reference=distributions.amin(2).log() / 2,
        process=distributions.amin(2).log() / 3,
        # One state of each of the two turns.
        states=torch.from_numpy(draw.integers(0, 2, (rows, 2)).repeat([5, 4], axis=1)),
        sum_squares=(distributions**2).sum(2),
        importance=torch.from_numpy(draw.random((rows, width)) + 0.5),
    )


class Plain:
    """The same batch as lists, for the loops."""

    def __init__(self, x: AdvantageInputs) -> None:
        self.x = x
        self.rewards = x.rewards.tolist()
        self.groups = x.groups.tolist()
        self.scored = x.scored.tolist()
        self.weight = [w if s else 0.0 for w, s in zip(x.row_weights.tolist(), self.scored, strict=True)]
        self.tokens = [[t for t, m in enumerate(row) if m] for row in x.mask.tolist()]
        self.count = len(self.rewards)

    def members(self, i: int) -> list[int]:
        return [j for j in range(self.count) if self.groups[j] == self.groups[i] and self.scored[j]]

    def size(self, i: int) -> float:
        return sum(self.weight[j] for j in self.members(i))

    def mean(self, i: int, values: list[float]) -> float:
        return sum(self.weight[j] * values[j] for j in self.members(i)) / self.size(i)

    def std(self, i: int, values: list[float]) -> float:
        mean, size = self.mean(i, values), self.size(i)
        if size <= 1:
            return 0.0
        return math.sqrt(sum(self.weight[j] * (values[j] - mean) ** 2 for j in self.members(i)) / (size - 1))

    def spread(self, row: Callable[[int], float]) -> Rows:
        return [[row(i) if self.scored[i] else 0.0] * len(self.tokens[i]) for i in range(self.count)]

    def to_go(self, gamma: float = 1.0) -> Rows:
        result = []
        for i in range(self.count):
            rewards = [self.x.token_rewards[i, t].item() for t in self.tokens[i]]
            result.append(
                [sum(gamma ** (k - s) * rewards[k] for k in range(s, len(rewards))) for s in range(len(rewards))]
            )
        return result

    def whiten(self, rows: Rows) -> Rows:
        tokens = [a for i, row in enumerate(rows) if self.scored[i] for a in row]
        mean, std = np.mean(tokens), np.std(tokens, ddof=1)
        return [[(a - mean) / (std + 1e-8) if self.scored[i] else 0.0 for a in row] for i, row in enumerate(rows)]


def grpo(p: Plain) -> Rows:
    return p.spread(lambda i: (p.rewards[i] - p.mean(i, p.rewards)) / (p.std(i, p.rewards) + 1e-4))


def dpo(p: Plain) -> Rows:
    """The derivative of the mean loss of all pairs by the log-probability of each row, times the number of rows."""
    assert p.x.logprobs is not None and p.x.reference is not None
    rows = torch.where(p.x.mask, p.x.logprobs, 0.0).sum(1).requires_grad_()
    ratios = rows - torch.where(p.x.mask, p.x.reference, 0.0).sum(1)
    order = [(i, j) for i in range(p.count) for j in p.members(i) if p.scored[i] and p.rewards[i] > p.rewards[j]]
    if not order:
        return p.spread(lambda i: 0.0)
    config = PreferenceConfig(beta=p.x.options.dpo_beta)
    places = torch.tensor(order).flatten()
    pairs = preference_losses(config, ratios[places], torch.zeros(len(places)), torch.ones(len(places)))
    pairs.losses.mean().backward()
    assert rows.grad is not None
    gradient = (-p.x.row_weights.sum() * rows.grad).tolist()
    return p.spread(lambda i: gradient[i])


def dr_grpo(p: Plain) -> Rows:
    return p.spread(lambda i: p.rewards[i] - p.mean(i, p.rewards))


def max_rl(p: Plain) -> Rows:
    def row(i: int) -> float:
        mean = p.mean(i, p.rewards)
        return (p.rewards[i] - mean) / mean if mean > 0 else 0.0

    return p.spread(row)


def rloo(p: Plain) -> Rows:
    def row(i: int) -> float:
        n = p.size(i)
        if n <= 1:
            return 0.0
        others = (sum(p.weight[j] * p.rewards[j] for j in p.members(i)) - p.rewards[i]) / (n - 1)
        return p.rewards[i] - others

    return p.spread(row)


def opo(p: Plain) -> Rows:
    def row(i: int) -> float:
        if p.size(i) <= 1:
            return 0.0
        lengths = {j: len(p.tokens[j]) for j in p.members(i)}
        return p.rewards[i] - sum(n * p.rewards[j] for j, n in lengths.items()) / sum(lengths.values())

    return p.spread(row)


def gpg(p: Plain) -> Rows:
    teaching = sum(p.weight[i] for i in range(p.count) if p.std(i, p.rewards) > 0)
    alpha = sum(p.weight) / teaching
    return p.spread(lambda i: alpha * (p.rewards[i] - p.mean(i, p.rewards)))


def grpo_passk(p: Plain) -> Rows:
    def row(i: int) -> float:
        best = max(p.rewards[j] for j in p.members(i))
        top = [j for j in p.members(i) if p.rewards[j] == best]
        rest = [p.rewards[j] for j in p.members(i) if p.rewards[j] < best]
        if p.rewards[i] < best or sum(p.weight[j] for j in top) > 1 or not rest:
            return 0.0
        return (best - max(rest)) / (p.std(i, p.rewards) + 1e-4)

    return p.spread(row)


def gdpo(p: Plain) -> Rows:
    parts = {name: values.tolist() for name, values in p.x.parts.items()}
    weights = {"a": 1.0, "b": 0.5}
    return p.whiten(
        p.spread(
            lambda i: sum(
                weights[name] * (values[i] - p.mean(i, values)) / (p.std(i, values) + 1e-4)
                for name, values in parts.items()
            )
        )
    )


def remax(p: Plain) -> Rows:
    assert p.x.baselines is not None
    greedy = p.x.baselines.tolist()
    return p.spread(lambda i: p.rewards[i] - greedy[i])


def reinforce_plus_plus(p: Plain) -> Rows:
    return p.whiten(p.to_go(p.x.options.gamma))


def reinforce_plus_plus_baseline(p: Plain) -> Rows:
    return p.whiten(p.spread(lambda i: p.rewards[i] - p.mean(i, p.rewards)))


def gae_reference(p: Plain) -> Rows:
    assert p.x.values is not None
    gamma, lam, result = p.x.options.gamma, p.x.options.lam, []
    for i, tokens in enumerate(p.tokens):
        values = [p.x.values[i, t].item() for t in tokens] + [0.0]
        rewards = [p.x.token_rewards[i, t].item() for t in tokens]
        deltas = [r + gamma * values[k + 1] - values[k] for k, r in enumerate(rewards)]
        result.append(
            [sum((gamma * lam) ** (k - s) * deltas[k] for k in range(s, len(deltas))) for s in range(len(deltas))]
        )
    return p.whiten(result)


def prime(p: Plain) -> Rows:
    """Equation 5 of the paper, one sum for each token."""
    assert p.x.process is not None and p.x.reference is not None
    options = p.x.options
    ratios = options.prime_beta * (p.x.process - p.x.reference)
    rewards = [[ratios[i, t].item() for t in tokens] for i, tokens in enumerate(p.tokens)]
    means, outcomes, result = [float(np.mean(row)) for row in rewards], rloo(p), []
    for i, row in enumerate(rewards):
        advantages = [0.0] * len(row)
        if p.scored[i] and p.size(i) > 1:
            others = (sum(p.weight[j] * means[j] for j in p.members(i)) - means[i]) / (p.size(i) - 1)
            for t in range(len(row)):
                later = sum(options.gamma ** (s - t) * (row[s] - others) for s in range(t, len(row)))
                advantages[t] = options.prime_coef * later + outcomes[i][t]
        result.append(advantages)
    return p.whiten(result)


def gigpo(p: Plain) -> Rows:
    """Equations 3 and 6 to 8 of the paper, turn by turn."""
    assert p.x.states is not None
    steps = dict[tuple[int, int], tuple[tuple[int, int], float]]()
    for i, tokens in enumerate(p.tokens):
        numbers = sorted({int(p.x.turns[i, t]) for t in tokens})
        earned = [sum(p.x.token_rewards[i, t].item() for t in tokens if p.x.turns[i, t] == n) for n in numbers]
        for place, number in enumerate(numbers):
            first = next(t for t in tokens if p.x.turns[i, t] == number)
            value = sum(p.x.options.gamma**k * r for k, r in enumerate(earned[place:]))
            steps[i, number] = (p.groups[i], int(p.x.states[i, first])), value
    result = grpo(p)
    for (i, number), (key, value) in steps.items():
        among = [other for (j, _), (its, other) in steps.items() if its == key and p.scored[j]]
        if not p.scored[i] or len(among) == 1:
            continue
        step = (value - np.mean(among)) / (np.std(among, ddof=1) + 1e-4) if len({*among}) > 1 else 0.0
        for k, t in enumerate(p.tokens[i]):
            if p.x.turns[i, t] == number:
                result[i][k] += float(p.x.options.gigpo_weight * step)
    return result


def token_baseline(p: Plain, *, by_column: bool) -> Rows:
    assert p.x.logprobs is not None and p.x.sum_squares is not None
    to_go, energy = p.to_go(), []
    factors = [[1.0] * len(p.x.mask[0])] * p.count if p.x.importance is None else p.x.importance.tolist()
    for i, tokens in enumerate(p.tokens):
        chosen, squares = p.x.logprobs[i].exp().tolist(), p.x.sum_squares[i].tolist()
        steps = [(1 - 2 * chosen[t] + squares[t]) * factors[i][t] ** 2 for t in tokens]
        energy.append([sum(steps[: k + 1]) for k in range(len(steps))])

    def place(i: int, k: int) -> int:
        return p.tokens[i][k] if by_column else k

    result = []
    for i, tokens in enumerate(p.tokens):
        row = []
        for k in range(len(tokens)):
            same = [(j, m) for j in p.members(i) for m in range(len(p.tokens[j])) if place(j, m) == place(i, k)]
            others = [place(j, len(p.tokens[j]) - 1) for j in p.members(i) if j != i]
            baseline = 0.0
            if others and place(i, k) <= max(others):
                total = sum(p.weight[j] * energy[j][m] for j, m in same)
                baseline = sum(p.weight[j] * energy[j][m] * to_go[j][m] for j, m in same) / total
            row.append(to_go[i][k] - baseline if p.scored[i] and p.size(i) > 1 else 0.0)
        result.append(row)
    return result


REFERENCES: dict[str, Callable[[Plain], Rows]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "max_rl": max_rl,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "dpo": dpo,
    "opo": opo,
    "gpg": gpg,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae_reference,
    "prime": prime,
    "gigpo": gigpo,
    "optimal_token_baseline": lambda p: token_baseline(p, by_column=True),
    "tir_optimal_token_baseline": lambda p: token_baseline(p, by_column=False),
}
OPTIONS = AdvantageOptions(gamma=0.9, lam=0.8, gdpo_weights={"b": 0.5}, prime_beta=0.3, prime_coef=2.0)


# The field that holds an input.
NEEDED = {need: need for need in ("values", "sum_squares", "reference", "process", "states")} | {"greedy": "baselines"}


def test_rewards_for_length_are_the_papers() -> None:
    headers = [header(reward=reward, sampled=length) for reward, length in LENGTHS]
    l1 = ShapingConfig(length=LengthConfig(kind="l1", tokens=40, coef=0.01))
    assert advantages.shaped_rewards(headers, l1).tolist() == pytest.approx([0.6, 0.8, -0.2, 1.0, 0.0])
    cosine = LengthConfig(kind="cosine", tokens=40, good=(2.0, 1.0), bad=(-10.0, 0.0), beyond=-7.0, above=0.5)
    expected = [2.0, 1.5, -5.0, -7.0, -7.0]
    assert advantages.shaped_rewards(headers, ShapingConfig(length=cosine)).tolist() == pytest.approx(expected)


# Rewards and lengths.
LENGTHS = ((1.0, 0), (1.0, 20), (0.0, 20), (1.0, 40), (0.4, 80))


def test_names_registry_and_references_agree() -> None:
    assert TRAITS.keys() == ADVANTAGES.keys() == REFERENCES.keys()


@pytest.mark.parametrize("name", TRAITS)
def test_an_estimator_reads_the_options_and_inputs_that_it_declares(name: str) -> None:
    read = set[str]()

    class Recording:
        def __getattr__(self, option: str) -> object:
            read.add(option)
            return getattr(OPTIONS, option)

    x = replace(random_inputs(0), options=Recording())  # type: ignore[arg-type]
    ADVANTAGES[name](x)
    assert read == set(TRAITS[name].options)
    for need, field in NEEDED.items():
        if need in TRAITS[name].needs:
            with pytest.raises(AssertionError):
                ADVANTAGES[name](replace(x, **{field: None}))
        else:
            ADVANTAGES[name](replace(x, **{field: None}))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", TRAITS)
def test_estimators_match_plain_loops(name: str, seed: int) -> None:
    x = random_inputs(seed, OPTIONS)
    got, expected = ADVANTAGES[name](x), REFERENCES[name](Plain(x))
    assert got.dtype == torch.float64
    assert (got[~x.mask] == 0).all()
    for i, row in enumerate(expected):
        assert got[i][x.mask[i]].tolist() == pytest.approx(row, rel=1e-6, abs=1e-6), f"row {i}"


@pytest.mark.parametrize("name", [n for n, traits in TRAITS.items() if "sum_squares" in traits.needs])
def test_token_baselines_weigh_a_rows_gradient_by_its_squared_importance_weights(name: str) -> None:
    x = random_inputs(3, OPTIONS)
    plain = replace(x, importance=None)
    got, expected = ADVANTAGES[name](plain), REFERENCES[name](Plain(plain))
    for i, row in enumerate(expected):
        assert got[i][x.mask[i]].tolist() == pytest.approx(row, rel=1e-6, abs=1e-6)
    doubled = replace(x, importance=torch.full_like(x.token_rewards, 2.0))
    torch.testing.assert_close(ADVANTAGES[name](doubled), got, msg="a factor of all tokens cancels")
    assert not torch.allclose(ADVANTAGES[name](x), got)


def permuted(x: AdvantageInputs, order: torch.Tensor) -> AdvantageInputs:
    def at(value: object) -> object:
        return value[order] if isinstance(value, torch.Tensor) else value

    fields = {name: at(getattr(x, name)) for name in x.__dataclass_fields__}
    return AdvantageInputs(**fields | {"parts": {name: value[order] for name, value in x.parts.items()}})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TRAITS)
def test_row_order_does_not_matter(name: str) -> None:
    x = random_inputs(11, OPTIONS)
    order = torch.randperm(len(x.rewards), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ADVANTAGES[name](permuted(x, order)), ADVANTAGES[name](x)[order], atol=1e-12)


@pytest.mark.parametrize("name", TRAITS)
def test_what_was_not_sampled_or_scored_does_not_matter(name: str) -> None:
    x = random_inputs(12, OPTIONS)
    before = ADVANTAGES[name](x)
    for tensor in (x.values, x.logprobs, x.reference, x.process, x.sum_squares, x.importance):
        assert tensor is not None
        tensor[~x.mask] = 77.0
        tensor[7] = -5.0
    x.rewards[7] = 99.0
    for part in x.parts.values():
        part[7] = -99.0
    x.token_rewards[7][x.mask[7]] = 99.0
    assert torch.equal(ADVANTAGES[name](x), before)
    assert (before[7] == 0).all()


@pytest.mark.parametrize("name", TRAITS)
def test_padding_does_not_matter(name: str) -> None:
    x = random_inputs(13, OPTIONS)

    def wider(field: str) -> object:
        value, nothing = getattr(x, field), -1 if field == "turns" else 0
        is_token_wise = isinstance(value, torch.Tensor) and value.dim() == 2
        return torch.nn.functional.pad(value, (0, 3), value=nothing) if is_token_wise else value

    padded = AdvantageInputs(**{field: wider(field) for field in x.__dataclass_fields__})  # type: ignore[arg-type]
    expected = ADVANTAGES[name](x)
    assert torch.equal(ADVANTAGES[name](padded)[:, :9], expected)
    rows = Packed(torch.arange(9).expand(x.mask.shape).where(x.mask, 0).amax(1) + 1)

    def packed(value: object) -> object:
        is_token_wise = isinstance(value, torch.Tensor) and value.dim() == 2
        return rows.pack(value) if is_token_wise else value  # type: ignore[arg-type]

    without = AdvantageInputs(**{n: packed(getattr(x, n)) for n in x.__dataclass_fields__} | {"rows": rows})  # type: ignore[arg-type]
    # dpo sums nine tokens of a row, whose order differs: at most 81 roundings of float64 of numbers below 10.
    bound = 81 * 10 * torch.finfo(torch.float64).eps if "reference" in TRAITS[name].needs else 0.0
    torch.testing.assert_close(ADVANTAGES[name](without), rows.pack(expected), atol=bound, rtol=0.0)
    assert torch.equal(padded_estimator(ADVANTAGES[name])(without), rows.pack(expected))


@pytest.mark.parametrize(
    "name", [n for n, t in TRAITS.items() if t.compares_group and not t.needs & {"sum_squares", "process", "states"}]
)
def test_a_group_without_signal_teaches_nothing(name: str) -> None:
    x = random_inputs(14, OPTIONS)
    same = x.groups == x.groups[0]
    x.rewards[same] = 1.0
    for part in x.parts.values():
        part[same] = 1.0
    if name in ("gdpo", "reinforce_plus_plus_baseline"):  # whitened over the batch, so only equal among themselves
        values = ADVANTAGES[name](x)[same][x.mask[same]]
        assert torch.allclose(values, values[0].expand_as(values))
    else:
        assert (ADVANTAGES[name](x)[same] == 0).all()


@pytest.mark.parametrize("name", TRAITS)
def test_a_batch_without_any_score_gives_zeros(name: str) -> None:
    x = random_inputs(15, OPTIONS)
    x.scored[:] = False
    assert (ADVANTAGES[name](x) == 0).all()


def edge_inputs(
    rewards: list[float], groups: list[int], mask: Tensor | None = None, **given: object
) -> AdvantageInputs:
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
    got = ADVANTAGES["gpg"](edge_inputs([0.1, 0.1, 0.1, 0.0, 1.0], [0, 0, 0, 1, 1]))
    assert got[:, 0].tolist() == pytest.approx([0, 0, 0, -5 / 2 * 0.5, 5 / 2 * 0.5])


GROUP_NAMES = ["grpo", "dr_grpo", "max_rl", "grpo_passk", "gdpo", "rloo", "gpg", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("name", GROUP_NAMES)
def test_a_batch_without_signal_gives_exactly_0(name: str) -> None:
    """Rounding of a mean is not scaled up by what divides or whitens it, nor by an optimizer after it."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    rewards, groups = [0.1, 0.1, 0.1, 0.7, 0.7], [0, 0, 0, 1, 1]
    parts = {"a": torch.tensor(rewards, dtype=torch.float64), "b": torch.tensor([0.3] * 5, dtype=torch.float64)}
    for values in ({}, parts):
        assert not ADVANTAGES[name](edge_inputs(rewards, groups, mask, parts=values)).any()


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if "sum_squares" in traits.needs])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 3e-7])
def test_token_baselines_stay_within_the_groups_returns(name: str, noise: float) -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    got = ADVANTAGES[name](edge_inputs([1.0, 0.0, 0.0], [0, 0, 0], mask, **certain(mask, noise)))
    baselines = edge_inputs([1.0, 0.0, 0.0], [0, 0, 0], mask).rewards[:, None] - got
    assert ((baselines >= 0) & (baselines <= 1)).all()


def test_a_lone_token_between_others_is_compared_with_itself_and_one_behind_all_others_with_nothing() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]], dtype=torch.bool)
    logprobs = torch.full(mask.shape, -1.0, dtype=torch.float64)
    x = edge_inputs([2.0, 2.0], [0, 0], mask, logprobs=logprobs, sum_squares=torch.full_like(logprobs, 0.3))
    by_column = [[0, 0, 0, 0, 2.0], [0, 0, 0, 0, 0]]
    assert torch.allclose(ADVANTAGES["optimal_token_baseline"](x), torch.tensor(by_column, dtype=torch.float64))
    # counted by sampled tokens, the first row has four and the second three: the last of the first is alone
    assert torch.allclose(ADVANTAGES["tir_optimal_token_baseline"](x), torch.tensor(by_column, dtype=torch.float64))


@pytest.mark.parametrize("name", [name for name, traits in TRAITS.items() if "sum_squares" in traits.needs])
@pytest.mark.parametrize("rows", [2, 6, 9, 13])  # depending on the order of adding, 1/9 or 1/13 add up to more than 1
def test_one_episode_of_many_rows_is_a_group_of_one(name: str, rows: int) -> None:
    mask = torch.ones(rows, 1, dtype=torch.bool)
    weights = torch.full((rows,), 1 / rows, dtype=torch.float64)
    x = edge_inputs([1.0] * rows, [0] * rows, mask, row_weights=weights, **certain(mask))
    assert (ADVANTAGES[name](x) == 0).all()
    assert x.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "max_rl", "rloo", "gpg", "grpo_passk", "gdpo"])
@pytest.mark.parametrize("rows", [2, 6, 9])
def test_an_episode_counts_once_however_many_rows_it_became(name: str, rows: int) -> None:
    single = ADVANTAGES[name](edge_inputs([1.0, 0.0, 0.5, 2.0, 0.0], [0, 0, 0, 1, 1]))
    weights = torch.tensor([1 / rows] * rows + [1.0] * 4, dtype=torch.float64)
    split = ADVANTAGES[name](
        edge_inputs([1.0] * rows + [0.0, 0.5, 2.0, 0.0], [0] * (rows + 2) + [1, 1], row_weights=weights)
    )
    if name == "gdpo":  # whitened over tokens, of which there are more now: compared up to that
        single, split = (values - values[-1] for values in (single, split))
        single, split = single / single[1], split / split[rows]
    assert torch.allclose(split[:rows], single[:1].expand(rows, 1))
    assert torch.allclose(split[rows:], single[1:])


def test_max_rl_weighs_tasks_by_their_rarity_and_is_0_without_a_positive_mean() -> None:
    """One success in four weighs 3, three in four 1/3; rewards that a penalty made negative say nothing."""
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, -1.0, -2.0]
    got = ADVANTAGES["max_rl"](edge_inputs(rewards, [0] * 4 + [1] * 4 + [2] * 2))[:, 0]
    assert got.tolist() == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0])


def test_opo_weighs_an_episode_by_the_tokens_of_all_its_rows() -> None:
    whole = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    split = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    one = ADVANTAGES["opo"](edge_inputs([1.0, 0.0], [0, 0], whole))
    weights = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64)
    two = ADVANTAGES["opo"](edge_inputs([1.0, 1.0, 0.0], [0, 0, 0], split, row_weights=weights))
    assert one[0, 0].item() == two[0, 0].item() == two[1, 0].item() == pytest.approx(1 - 4 / 5)
    assert one[1, 0].item() == two[2, 0].item() == pytest.approx(-4 / 5)


def test_a_row_that_does_not_train_keeps_its_place_in_opos_baseline() -> None:
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]], dtype=torch.bool)
    x = edge_inputs([1.0, 0.0, 0.0], [0, 0, 0], mask)
    cut_off = torch.tensor([True, False, False])[:, None]  # as overlong_filter does
    filtered = dataclasses.replace(x, mask=mask & cut_off)
    assert ADVANTAGES["opo"](filtered)[0].tolist() == ADVANTAGES["opo"](x)[0].tolist() == [1 - 2 / 5] * 2
    assert not ADVANTAGES["opo"](filtered)[1:].any()


def test_gpgs_alpha_makes_up_for_groups_without_signal_whatever_their_reward() -> None:
    x = edge_inputs(
        [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]
    )  # one group of three differs; three rewards are not 0
    assert ADVANTAGES["gpg"](x)[:, 0].tolist() == [3 * 0.5, 3 * -0.5, 0.0, 0.0, 0.0, 0.0]


def test_passk_without_the_deviation_is_the_gap_to_the_second_best() -> None:
    x = edge_inputs([3.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1], options=AdvantageOptions(passk_std=False))
    assert ADVANTAGES["grpo_passk"](x)[:, 0].tolist() == [2.0, 0, 0, 0, 0]


def test_gae_without_whitening_is_the_plain_sum_and_leaves_unscored_rows_out() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    values = torch.tensor([[0.5, 9.0, 0.25], [1.0, 1.0, 9.0]], dtype=torch.float64)
    options = AdvantageOptions(gamma=1.0, lam=1.0, whiten=False)
    x = edge_inputs([1.0, 1.0], [0, 0], mask, values=values, options=options, scored=torch.tensor([True, False]))
    assert ADVANTAGES["gae"](x).tolist() == [[0.5, 0, 0.75], [0, 0, 0]]
    whitened = ADVANTAGES["gae"](dataclasses.replace(x, options=msgspec.structs.replace(options, whiten=True)))
    assert whitened[0, [0, 2]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


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
    whole = whole_batch(made, with_states=True)
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


SEEDS = range(8)


def valued_batch(seed: int, rows: int = 6, width: int = 9) -> AdvantageInputs:
    """Rows whose sampled tokens stand in several stretches, with NaN wherever nothing was sampled."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand((rows, width), generator=draw) > 0.4
    mask[0] = False  # a row of which nothing trains
    mask[1, -1] = True  # one without padding
    numbers = torch.randn((2, rows, width), generator=draw, dtype=torch.float64)
    rewards, values = torch.where(mask, numbers, math.nan)
    scored = torch.ones(rows, dtype=torch.bool)
    scored[2] = False
    return AdvantageInputs(
        rewards=torch.zeros(rows, dtype=torch.float64),
        token_rewards=rewards,
        mask=mask,
        groups=torch.arange(rows) // 2,
        scored=scored,
        row_weights=torch.ones(rows, dtype=torch.float64),
        lengths=mask.sum(1).double(),
        turns=torch.where(mask, 0, -1),
        options=AdvantageOptions(gamma=0.9, lam=0.8),
        parts={},
        values=values,
    )


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_k = sum over l of (gamma lam)^l delta_{k+l}, the sum written out as it stands in eq. 16 of the paper."""
    steps = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[k] + gamma * after[k] - values[k] for k in range(steps)]
    return [sum((gamma * lam) ** (k - start) * delta[k] for k in range(start, steps)) for start in range(steps)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.97, 0.0), (1.0, 1.0)])
def test_gae_is_the_sum_of_the_paper_over_sampled_tokens_only(seed: int, gamma: float, lam: float) -> None:
    x = valued_batch(seed)
    assert x.values is not None
    advantages, returns = gae(x.token_rewards, x.values, x.mask, gamma, lam)
    assert advantages.dtype == returns.dtype == torch.float64
    for row in range(len(x.mask)):
        picked = x.mask[row]
        rewards, values = x.token_rewards[row, picked].tolist(), x.values[row, picked].tolist()
        expected = by_hand(rewards, values, gamma, lam)
        assert advantages[row, picked].tolist() == pytest.approx(expected, abs=1e-12)
        assert returns[row, picked].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=True)], abs=1e-12
        )
        assert not advantages[row, ~picked].any() and not returns[row, ~picked].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_lambda_may_follow_the_length_of_each_row(seed: int) -> None:
    """1 - 1 / (alpha l), not below 0: alpha is such that short rows reach that limit and long ones do not."""
    x = valued_batch(seed)
    assert x.values is not None
    x = replace(x, options=AdvantageOptions(gamma=0.9, lam_alpha=0.3, whiten=False))
    advantages = ADVANTAGES["gae"](x)
    for row in range(len(x.mask)):
        picked = x.mask[row]
        rewards, values = x.token_rewards[row, picked].tolist(), x.values[row, picked].tolist()
        lam = max(0.0, 1 - 1 / (0.3 * max(len(values), 1)))
        expected = by_hand(rewards, values, 0.9, lam) if x.scored[row] else [0.0] * len(values)
        assert advantages[row, picked].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_row_that_a_limit_cut_goes_on_with_the_critics_last_value(seed: int) -> None:
    x = valued_batch(seed)
    assert x.values is not None
    cut = torch.arange(len(x.mask)) % 2 == 1
    ended, _ = gae(x.token_rewards, x.values, x.mask, 0.9, 0.8)
    advantages, returns = gae(x.token_rewards, x.values, x.mask, 0.9, 0.8, cut)
    for row in range(len(x.mask)):
        picked = x.mask[row]
        rewards, values = x.token_rewards[row, picked].tolist(), x.values[row, picked].tolist()
        if not cut[row] or not values:
            assert torch.equal(advantages[row], ended[row])
            continue
        rewards[-1] += 0.9 * values[-1]
        assert advantages[row, picked].tolist() == pytest.approx(by_hand(rewards, values, 0.9, 0.8), abs=1e-12)
        assert returns[row, picked].tolist() == pytest.approx(
            (advantages[row, picked] + x.values[row, picked]).tolist()
        )


def test_rows_bootstrap_by_the_option_alone() -> None:
    x = dataclasses.replace(valued_batch(3), cut=torch.tensor([True] * 6))
    plain = gae_advantage(dataclasses.replace(x, cut=None))
    assert torch.equal(gae_advantage(x), plain)
    on = msgspec.structs.replace(x.options, bootstrap_cut=True)
    assert not torch.equal(gae_advantage(dataclasses.replace(x, options=on)), plain)


def test_whitening_is_the_formula_of_verl_and_trl() -> None:
    """(A - mean) * rsqrt(var + 1e-8), var unbiased: a deviation of 1e-4 is not taken for a signal of 1."""
    for scale in (1.0, 1e-4, 1e-6):
        values = scale * torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
        expected = (values - values.mean()) / (values.var() + 1e-8).sqrt()
        assert whiten(values, torch.ones_like(values, dtype=torch.bool)).tolist()[0] == pytest.approx(
            expected.tolist()[0], rel=1e-12
        )


def test_with_lambda_one_returns_are_discounted_sums_whatever_the_critic_says() -> None:
    x = valued_batch(1)
    rewards = torch.where(x.mask, x.token_rewards, 0.0)
    for values in (torch.zeros_like(rewards), torch.randn_like(rewards)):
        _, returns = gae(rewards, values, x.mask, 0.9, 1.0)
        for row in range(len(x.mask)):
            sampled = rewards[row, x.mask[row]].tolist()
            expected = [sum(0.9 ** (j - k) * r for j, r in enumerate(sampled) if j >= k) for k in range(len(sampled))]
            assert returns[row, x.mask[row]].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_critic_that_knows_the_outcome_leaves_no_advantage() -> None:
    mask = torch.tensor([[False, True, True, False, True, False]])
    rewards = torch.where(torch.arange(6) == 4, 1.0, 0.0)[None].double()
    advantages, returns = gae(rewards, torch.ones_like(rewards), mask, 1.0, 0.95)
    assert not advantages.any()
    assert returns.tolist() == [[0, 1, 1, 0, 1, 0]]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_registered_estimator_whitens_over_sampled_tokens_of_scored_rows(seed: int) -> None:
    x = valued_batch(seed)
    assert x.values is not None
    rows = [r for r in range(len(x.mask)) if x.scored[r]]
    raw = {
        row: by_hand(x.token_rewards[row, x.mask[row]].tolist(), x.values[row, x.mask[row]].tolist(), 0.9, 0.8)
        for row in rows
    }
    every = [a for row in rows for a in raw[row]]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / (len(every) - 1))
    got = ADVANTAGES["gae"](x)
    for row in rows:
        expected = [(a - mean) / std for a in raw[row]]
        assert got[row, x.mask[row]].tolist() == pytest.approx(expected, abs=1e-6)
    assert not got[2].any() and not got[~x.mask].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_and_the_order_of_rows_change_nothing(seed: int) -> None:
    x = valued_batch(seed)
    expected = gae_advantage(x)
    order = list(range(len(x.mask)))
    random.Random(seed).shuffle(order)
    torch.testing.assert_close(gae_advantage(reorder(x, order)), expected[order])
    assert x.values is not None
    wide = dataclasses.replace(
        x,
        token_rewards=pad(x.token_rewards, math.nan),
        values=pad(x.values, math.nan),
        mask=pad(x.mask, False),
        turns=pad(x.turns, -1),
    )
    torch.testing.assert_close(gae_advantage(wide), pad(expected, 0.0))


def reorder(x: AdvantageInputs, order: list[int]) -> AdvantageInputs:
    names = ("rewards", "token_rewards", "mask", "groups", "scored", "row_weights", "turns", "values")
    return dataclasses.replace(x, **{name: getattr(x, name)[order] for name in names})


def pad(values: Tensor, fill: float) -> Tensor:
    """Three more columns in front and two behind."""
    rows = len(values)
    return torch.cat([values.new_full((rows, 3), fill), values, values.new_full((rows, 2), fill)], dim=1)


def test_whitening_nothing_and_one_number() -> None:
    values = torch.tensor([[3.0, math.nan]], dtype=torch.float64)
    assert whiten(values, torch.tensor([[False, False]])).tolist() == [[0, 0]]
    assert whiten(values, torch.tensor([[True, False]])).tolist() == [[0, 0]]


numbers = st.floats(-5, 5)


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@given(numbers, numbers, numbers, st.none() | st.floats(0.01, 2))
def test_the_loss_is_the_larger_of_two_squared_errors(v: float, old: float, target: float, clip: float | None) -> None:
    expected = 0.5 * (v - target) ** 2
    if clip is not None:
        kept = old + min(max(v - old, -clip), clip)
        expected = max(expected, 0.5 * (kept - target) ** 2)
    assert value_loss(one(v), one(old), one(target), clip).item() == pytest.approx(expected, abs=1e-12)


@given(numbers, numbers, st.floats(0.01, 2))
def test_before_the_first_step_clipping_changes_nothing(v: float, target: float, clip: float) -> None:
    clipped, plain = (value_loss(one(v), one(v), one(target), c) for c in (clip, None))
    assert clipped.item() == pytest.approx(plain.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [
        (0.1, 0.1 - 1.0),  # within the range: the plain error's gradient
        (0.5, 0.0),  # moved far enough towards the return
        (-0.5, -0.5 - 1.0),  # moved away: pulled back
        (3.0, 3.0 - 1.0),  # overshot the return by more than the kept value lacks
    ],
)
def test_gradient_by_where_the_value_moved(value: float, gradient: float) -> None:
    v = one(value).requires_grad_()
    value_loss(v, one(0.0), one(1.0), 0.2).sum().backward()
    assert v.grad is not None
    assert v.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradcheck(clip: float | None) -> None:
    torch.manual_seed(0)
    values, old, returns = torch.randn(3, 2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, clip), (values.requires_grad_(),))


def test_explained_variance() -> None:
    torch.manual_seed(0)
    returns, noise = torch.randn(2, 5, 7, dtype=torch.float64)
    mask = torch.rand(5, 7) > 0.3
    values = returns + 0.5 * noise
    target, error = returns[mask].tolist(), (0.5 * noise)[mask].tolist()

    def variance(items: list[float]) -> float:
        mean = sum(items) / len(items)
        return sum((item - mean) ** 2 for item in items) / len(items)

    expected = 1 - variance(error) / variance(target)
    assert explained_variance(values, returns, mask) == pytest.approx(expected)
    garbage = torch.where(mask, values, math.nan)
    assert explained_variance(garbage, returns, mask) == pytest.approx(expected)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(values * 1e-3, returns * 1e-3, mask) == pytest.approx(expected)
    assert explained_variance(torch.ones_like(returns), returns, mask) == pytest.approx(0.0)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    mask = torch.ones((1, 2), dtype=torch.bool)
    assert explained_variance(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), mask) == 0.0
    assert explained_variance(torch.ones(1, 2), torch.ones(1, 2), ~mask) == 0.0


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
    options = ShapingConfig(overlong=OverlongConfig(max_tokens=cache + more, cache_tokens=cache, factor=factor))
    expected = factor * soft_punishment(length, cache + more, cache)
    assert advantages.overlong_penalties([header(sampled=length)], options).item() == pytest.approx(expected, abs=1e-12)


def test_the_penalty_is_that_of_the_episode_or_of_a_role_in_it() -> None:
    options = ShapingConfig(overlong=OverlongConfig(max_tokens=20, cache_tokens=10))
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
        overlong=OverlongConfig(max_tokens=longest, cache_tokens=10) if longest else None,
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
    options = ShapingConfig(reward_scale="batch_std", overlong=OverlongConfig(max_tokens=20, cache_tokens=10))
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
    got = advantages.resample_weights(np.array(values), method, power)
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
    options = ShapingConfig(overlong=OverlongConfig(max_tokens=10, cache_tokens=4), overlong_filter=True)
    assert advantages.shaping_metrics(made, options) == {
        "shaping/reward_mean": pytest.approx((0.0 + 0.5) / 2),
        "shaping/overlong_penalty_mean": pytest.approx(-1 / 3),
        "shaping/filtered_fraction": pytest.approx(1 / 3),
    }
    assert advantages.shaping_metrics(made, ShapingConfig(dynamic_sampling=3)) == {}


def test_no_scored_row_is_no_error() -> None:
    options = ShapingConfig(resample="max_min", reward_scale="batch_std", reward_clip=1.0)
    headers = [header(scored=False)]
    assert advantages.shaped_rewards(headers, options).tolist() == [0.0]
    assert advantages.row_repeats(headers, options, 0, 0).tolist() == [1.0]


def conversation(group: int, sample: int, reward: float, *played: tuple[str, float | None]) -> Trajectory:
    """A row of turns of two tokens, each told something in one token before; the last one has the outcome, too."""
    (row,) = make_rows(0, groups=1, samples=1)
    turns, mask = list[Turn](), list[bool]()
    for told, earned in played:
        turns.append(Turn(role="user", text=told, start=len(mask), end=len(mask) + 1))
        turns.append(Turn(role="assistant", text="", start=len(mask) + 1, end=len(mask) + 3, reward=earned))
        mask += [False, True, True]
    return msgspec.structs.replace(
        row,
        group_id=group,
        sample=sample,
        episode_id=f"{group}-{sample}",
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask),
        logprobs=np.zeros(len(mask), np.float32),
        versions=[VersionRun(Version(0, 0), 0, sum(mask))],
        turns=turns,
        reward=reward,
    )


PLAYED = [
    (0, 1.0, [("door", 0.5), ("hall", None), ("door", None)]),
    (0, 0.0, [("door", None), ("cellar", 0.25)]),
    (0, 0.0, [("door", None), ("hall", 1.0)]),
    # In another group nothing is compared with the first.
    (1, 1.0, [("door", None)]),
    (1, 0.0, [("door", None), ("hall", None)]),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("by", "std"), [("state", True), ("state", False), ("turn", True)])
def test_gigpo_compares_the_turns_that_answer_the_same(by: str, std: bool, packed: bool) -> None:
    """Against the paper's equations, turn by turn."""
    made = [conversation(group, i, reward, *played) for i, (group, reward, played) in enumerate(PLAYED)]
    options: dict[str, Any] = {"gamma": 0.9, "gigpo_weight": 0.5, "gigpo_by": by, "gigpo_std": std}
    algorithm = AlgorithmConfig(advantage="gigpo", advantage_options=AdvantageOptions(**options))
    settings = RunConfig(model=ModelConfig(path="none"), data=DataConfig(path="none"), algorithm=algorithm)
    # The row and turn of each step, the state that it is compared by, and its return.
    steps = list[tuple[int, int, object, float]]()
    for row, (group, reward, played) in enumerate(PLAYED):
        earned = [given or 0.0 for _, given in played]
        earned[-1] += reward
        for turn, (told, _) in enumerate(played):
            value = sum(0.9**k * r for k, r in enumerate(earned[turn:]))
            steps.append((row, turn, (group, told if by == "state" else turn), value))
    totals = [(group, reward + sum(given or 0.0 for _, given in played)) for group, reward, played in PLAYED]

    def relative(value: float, among: list[float]) -> float:
        if len(among) == 1:
            return 0.0
        centred = value - statistics.mean(among)
        return centred / (statistics.stdev(among) + 1e-4) if std else centred

    whole = whole_batch(made, with_states=True)
    x = advantage_inputs(whole, Precomputed(proximal=whole.behaviour), None, settings)
    got = whole.rows.pad_all(ADVANTAGES["gigpo"](x)) if packed else ADVANTAGES["gigpo"](x.padded())
    for row, turn, key, value in steps:
        group, total = totals[row]
        episode = relative(total, [other for its, other in totals if its == group])
        step = relative(value, [other for _, _, its, other in steps if its == key])
        assert got[row][3 * turn : 3 * turn + 2].tolist() == pytest.approx([episode + 0.5 * step] * 2, rel=1e-12)
    assert (got[~x.padded().mask] == 0).all()


def test_a_state_is_what_was_told_since_the_turn_before_with_its_images() -> None:
    row = conversation(0, 0, 0.0, ("door", None), ("hall", None), ("door", None))
    first, second, third = (state for _, state in turn_states(row))
    assert first == third != second
    row.media = [Media(sha256="0" * 64, mime="image/png", position=6)]
    assert [state for _, state in turn_states(row)][:2] == [first, second]
    assert [state for _, state in turn_states(row)][2] != third
