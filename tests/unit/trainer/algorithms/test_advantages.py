"""Every advantage estimator against plain loops in float64, and what must not change it."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_async.configs.schema.algorithm import AdvantageOptions
from rl_async.configs.schema.formulas import ADVANTAGES as TRAITS
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs
from rl_async.trainer.algorithms.algorithm import padded_estimator
from rl_async.trainer.algorithms.rows import Rows as Packed
from rl_async.trainer.update import on_last_token

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
        turns=torch.where(whole, 0, -1),
        options=options or AdvantageOptions(),
        parts={"a": outcomes, "b": torch.from_numpy(draw.random(rows))},
        baselines=torch.from_numpy(draw.random(4))[torch.tensor(groups)],
        values=torch.from_numpy(draw.normal(size=(rows, width))),
        logprobs=distributions.amax(2).log(),
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


def dr_grpo(p: Plain) -> Rows:
    return p.spread(lambda i: p.rewards[i] - p.mean(i, p.rewards))


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


def gae(p: Plain) -> Rows:
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
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
    "optimal_token_baseline": lambda p: token_baseline(p, by_column=True),
    "tir_optimal_token_baseline": lambda p: token_baseline(p, by_column=False),
}
OPTIONS = AdvantageOptions(gamma=0.9, lam=0.8, gdpo_weights={"b": 0.5})


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
    for need, field in {"values": "values", "sum_squares": "sum_squares", "greedy": "baselines"}.items():
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
    for tensor in (x.values, x.logprobs, x.sum_squares, x.importance):
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

    def wider(value: object) -> object:
        is_token_wise = isinstance(value, torch.Tensor) and value.dim() == 2
        return torch.nn.functional.pad(value, (0, 3)) if is_token_wise else value  # type: ignore[arg-type]

    padded = AdvantageInputs(**{name: wider(getattr(x, name)) for name in x.__dataclass_fields__})  # type: ignore[arg-type]
    expected = ADVANTAGES[name](x)
    assert torch.equal(ADVANTAGES[name](padded)[:, :9], expected)
    rows = Packed(torch.arange(9).expand(x.mask.shape).where(x.mask, 0).amax(1) + 1)

    def packed(value: object) -> object:
        is_token_wise = isinstance(value, torch.Tensor) and value.dim() == 2
        return rows.pack(value) if is_token_wise else value  # type: ignore[arg-type]

    without = AdvantageInputs(**{n: packed(getattr(x, n)) for n in x.__dataclass_fields__} | {"rows": rows})  # type: ignore[arg-type]
    assert torch.equal(ADVANTAGES[name](without), rows.pack(expected))
    assert torch.equal(padded_estimator(ADVANTAGES[name])(without), rows.pack(expected))


@pytest.mark.parametrize("name", [n for n, t in TRAITS.items() if t.compares_group and "sum_squares" not in t.needs])
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
