"""Off-policy correction against plain loops, and its metrics."""

import math
import random
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import Tensor

from rl_async.configs.checks import problems
from rl_async.configs.schema.algorithm import (
    LOSSES,
    PRESETS,
    REJECTIONS,
    RULES,
    AlgorithmConfig,
    Correction,
    CorrectionOptions,
    Weight,
    resolve,
    rules,
)
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.algorithms.correction import correct, correction_metrics
from rl_async.trainer.packing import Rows

Row = list[tuple[float, bool, int]]  # log ratio, sampled, age


def rows(seed: int, spread: float = 1.0) -> list[Row]:
    """A few rows of uneven length; each samples at least one token."""
    draw = random.Random(seed)
    drawn = []
    for _ in range(draw.randint(1, 6)):
        row = [(draw.gauss(0, spread), draw.random() < 0.7, draw.randint(0, 4)) for _ in range(draw.randint(1, 9))]
        drawn.append([*row, (draw.gauss(0, spread), True, draw.randint(0, 4))])
    return drawn


def tensors(drawn: list[Row], padding: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """target, behaviour, mask, age; log pi - log mu is the log ratio."""
    width = max(len(row) for row in drawn) + padding
    target, behaviour = torch.zeros(len(drawn), width).double(), torch.full((len(drawn), width), -1.5).double()
    mask, age = torch.zeros_like(target, dtype=torch.bool), torch.zeros_like(target, dtype=torch.int64)
    for i, row in enumerate(drawn):
        for t, (log_ratio, sampled, steps) in enumerate(row):
            target[i, t], mask[i, t], age[i, t] = log_ratio - 1.5, sampled, steps
    return target, behaviour, mask, age


def measured(name: str, log_ratio: float) -> float:
    """k1 as a ratio, k2 and k3 as they are."""
    r = math.exp(log_ratio)
    return {"k1": r, "k2": log_ratio**2 / 2, "k3": r - 1 - log_ratio}[name[-2:]]


def passes(name: str, row: list[float], at: int, low: float, high: float) -> bool:
    """Whether the rule keeps sampled token ``at`` of a row of log ratios."""
    values = [measured(name, x) for x in row]
    if name.startswith("token"):
        return low <= values[at] <= high
    if name.startswith("seq_max"):
        return all(low <= value <= high for value in values)
    if name.endswith("k1"):
        product = math.prod(values)
        return low <= (product if name.startswith("seq_sum") else product ** (1 / len(values))) <= high
    total = sum(values)
    return low <= (total if name.startswith("seq_sum") else total / len(values)) <= high


def judged(drawn: list[Row], correction: Correction) -> Iterator[tuple[int, int, float, bool]]:
    """The reference: (row, position, weight, keep) of every sampled token."""
    for i, row in enumerate(drawn):
        sampled = [(t, x, steps) for t, (x, is_sampled, steps) in enumerate(row) if is_sampled]
        logs = [x for _, x, _ in sampled]
        for number, (t, x, steps) in enumerate(sampled):
            keep = correction.max_age is None or steps <= correction.max_age
            keep &= correction.veto is None or min(math.exp(y) for y in logs) >= correction.veto
            for name, limit in correction.reject.items():
                low, high = (float(part) for part in limit.split("_")) if isinstance(limit, str) else (0.0, limit)
                keep &= passes(name, logs, number, low, high)
            total = {"none": 0.0, "token": x, "sequence": sum(logs)}[correction.weight]
            weight = math.exp(max(-20.0, min(20.0, total)))
            weight = min(weight, correction.cap or math.inf)
            if correction.band is not None:
                low, high = (float(part) for part in correction.band.split("_"))
                weight = weight if low <= weight <= high else 0.0
            if correction.age_weights:
                weight *= correction.age_weights[min(steps, len(correction.age_weights) - 1)]
            yield i, t, weight if keep else 0.0, keep


CASES = {
    "token, capped": Correction(weight="token", cap=1.3),
    "sequence, capped": Correction(weight="sequence", cap=2.0),
    "sequence, free": Correction(weight="sequence"),
    "icepop": Correction(weight="token", band="0.4_3.0"),
    "icepop of sequences": Correction(weight="sequence", band="0.5_1.5"),
    "veto": Correction(weight="token", veto=0.3),
    "age": Correction(weight="token", max_age=2, age_weights=(1.0, 0.5, 0.25)),
    "everything": Correction(
        weight="sequence", cap=3.0, veto=0.05, max_age=3, reject={"seq_mean_k3": 0.6, "token_k1": "0.1_4.0"}
    ),
} | {name: Correction(weight="token", reject={name: "0.6_1.9" if name.endswith("k1") else 0.4}) for name in REJECTIONS}


@pytest.mark.parametrize("name", CASES)
def test_weights_and_verdicts_match_the_plain_formulas(name: str) -> None:
    kept, seen = 0, 0
    for seed in range(30):
        drawn = rows(seed, spread=0.6)
        target, behaviour, mask, age = tensors(drawn)
        got = correct(target, behaviour, mask, age, CASES[name])
        expected_weights, expected_keep = torch.zeros_like(got.weights), torch.zeros_like(got.keep)
        for i, t, weight, keep in judged(drawn, CASES[name]):
            expected_weights[i, t], expected_keep[i, t] = weight, keep
        assert torch.equal(got.keep, expected_keep)
        torch.testing.assert_close(got.weights, expected_weights, rtol=1e-12, atol=1e-12)
        kept, seen = kept + int(got.keep.sum()), seen + int(mask.sum())
    assert 0 < kept <= seen and (kept < seen or not (CASES[name].reject or CASES[name].veto or CASES[name].max_age))


def rejected(log_ratios: list[float], rule: str, limit: str | float) -> list[bool]:
    target = torch.tensor([log_ratios], dtype=torch.float64)
    mask = torch.ones_like(target, dtype=torch.bool)
    found = correct(target, torch.zeros_like(target), mask, mask.long(), Correction(reject={rule: limit}))
    return (~found.keep[0]).tolist()


def test_an_asymmetric_band_keeps_the_ratios_it_names_and_not_their_inverses() -> None:
    ratios = [0.59, 0.61, 1.0, 1.39, 1.41, 1 / 0.61]
    assert rejected([math.log(r) for r in ratios], "token_k1", "0.6_1.4") == [True, False, False, False, True, True]
    assert rejected([math.log(0.65), math.log(0.95)], "seq_sum_k1", "0.6_1.4") == [False, False]
    assert rejected([math.log(1.3), math.log(1.2)], "seq_sum_k1", "0.6_1.4") == [True, True]
    assert rejected([math.log(1.3), math.log(1.2)], "seq_mean_k1", "0.6_1.4") == [False, False]
    assert rejected([math.log(0.5), math.log(0.7)], "seq_mean_k1", "0.6_1.4") == [True, True]
    assert rejected([0.0, math.log(1.5), 0.0], "seq_max_k1", "0.6_1.4") == [True, True, True]
    assert rejected([math.log(4.0), math.log(1e-8), math.log(6.0)], "token_k1", "0_5") == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [name for name in REJECTIONS if not name.endswith("k1")])
def test_a_measure_that_rounding_makes_negative_is_within_its_limit(rule: str, dtype: torch.dtype) -> None:
    # r - 1 - log r of tokens that are almost on-policy: never negative, but in rounding it often is
    log_ratio = torch.linspace(-3e-7, 3e-7, 512, dtype=dtype).reshape(16, 32)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    got = correct(log_ratio, torch.zeros_like(log_ratio), mask, mask.long(), Correction(reject={rule: 0.01}))
    assert got.keep.all()


@pytest.mark.parametrize("rule", ["seq_max_k1", "seq_mean_k1", "seq_sum_k1", "token_k1"])
def test_tokens_that_were_not_sampled_are_in_no_band(rule: str) -> None:
    target, mask = torch.tensor([[0.0, math.log(2.0), 0.0]]), torch.tensor([[False, True, False]])
    got = correct(target, torch.zeros(1, 3), mask, mask.long(), Correction(reject={rule: "1.5_3.0"}))
    assert torch.equal(got.keep, mask)


def test_one_number_is_a_band_with_its_inverse() -> None:
    ratios = [0.49, 0.51, 1.99, 2.01]
    assert rejected([math.log(r) for r in ratios], "token_k1", 2.0) == [True, False, False, True]


def test_the_first_rule_that_rejects_is_named_and_a_band_only_zeroes() -> None:
    correction = Correction(weight="token", band="0.5_2.0", veto=0.01, max_age=3, reject={"token_k3": 1.0})
    target = torch.tensor([[0.0, math.log(3.9), math.log(2.1), 0.0], [math.log(0.001), 0.0, 0.0, 9.0]]).double()
    mask = torch.ones_like(target, dtype=torch.bool)
    mask[1, 3] = False
    age = torch.tensor([[0, 0, 0, 4], [4, 0, 0, 0]])
    got = correct(target, torch.zeros_like(target), mask, age, correction)
    names = [[RULES[i] for i in row] for row in got.rule.tolist()]
    assert names == [["", "token_k3", "band", "max_age"], ["max_age", "veto", "veto", ""]]
    assert got.keep.tolist() == [[True, False, True, False], [False, False, False, False]]
    assert got.weights[0].tolist() == [1.0, 0.0, 0.0, 0.0]


EVERYTHING = Correction(
    weight="sequence",
    cap=2.0,
    veto=1e-3,
    max_age=3,
    age_weights=(1.0, 0.9, 0.5),
    reject={"seq_mean_k1": "0.5_1.8", "token_k3": 0.5, "seq_max_k2": 1.0},
)


@pytest.mark.parametrize("seed", range(10))
def test_padding_row_order_splits_and_garbage_change_nothing(seed: int) -> None:
    drawn = rows(seed, spread=0.4)
    target, behaviour, mask, age = tensors(drawn)
    whole = correct(target, behaviour, mask, age, EVERYTHING)

    padded = correct(*tensors(drawn, padding=5), EVERYTHING)
    order = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(seed))
    permuted = correct(target[order], behaviour[order], mask[order], age[order], EVERYTHING)
    one_row = [slice(i, i + 1) for i in range(len(drawn))]
    single = [correct(target[i], behaviour[i], mask[i], age[i], EVERYTHING) for i in one_row]
    spoilt = target.clone()
    spoilt[~mask] = math.nan
    garbage = correct(spoilt, behaviour, mask, age + 1000 * ~mask, EVERYTHING)
    packed = Rows(torch.tensor([len(row) for row in drawn]))
    pack = packed.pack
    without = correct(pack(target), pack(behaviour), pack(mask), pack(age), EVERYTHING, rows=packed)
    torch.testing.assert_close(without.weights, packed.pack(whole.weights))
    for name in ("weights", "keep", "rule"):
        expected = getattr(whole, name)
        assert name == "weights" or torch.equal(getattr(without, name), packed.pack(expected))
        assert torch.equal(getattr(padded, name)[:, : expected.shape[1]], expected)
        assert torch.equal(getattr(permuted, name), expected[order])
        assert torch.equal(torch.cat([getattr(part, name) for part in single]), expected)
        assert torch.equal(getattr(garbage, name), expected)
    assert not padded.keep[:, whole.keep.shape[1] :].any()


def test_nothing_carries_gradient() -> None:
    target = torch.tensor([[0.3, -0.2]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert not correct(target, torch.zeros(1, 2), mask, mask.long(), EVERYTHING).weights.requires_grad


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_the_identity_on_policy(preset: str) -> None:
    target, _, mask, age = tensors(rows(3))
    got = correct(target, target, mask, age, PRESETS[preset])
    assert torch.equal(got.keep, mask) and not got.rule.any()
    assert torch.equal(got.weights, mask.to(got.weights))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_bounds_its_weights(preset: str) -> None:
    correction = PRESETS[preset]
    bound = correction.cap or {"0.5_5.0": 5.0, "0_5": 5.0, None: 1.0}[correction.band]
    for seed in range(20):
        target, behaviour, mask, age = tensors(rows(seed, spread=8.0))
        got = correct(target, behaviour, mask, age, correction)
        assert got.weights.max() <= bound and torch.isfinite(got.weights).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_and_corrects(preset: str) -> None:
    config = RunConfig(
        model=ModelConfig(path="m"), data=DataConfig(path="d"), algorithm=AlgorithmConfig(correction=preset)
    )
    if PRESETS[preset].loss not in (None, *LOSSES):
        assert [p for p in problems(config) if "not available yet" in p]
        return
    assert list(problems(config)) == []
    algorithm = build(config)
    target, behaviour, mask, age = tensors(rows(5, spread=0.3))
    got = algorithm.correct(target, behaviour, mask, age, mask)
    assert got.weights.shape == mask.shape and set(got.rule.unique().tolist()) <= {
        RULES.index(name) for name in ("", *algorithm.rules)
    }
    assert algorithm.decoupled == (not preset.startswith(("bypass", "prime")))


def test_tokens_beyond_areals_bound_weigh_nothing_and_count_in_the_mean() -> None:
    target = torch.tensor([[math.log(r) for r in (0.0625, 4.0, 5.1)]], dtype=torch.float64)
    mask = torch.ones_like(target, dtype=torch.bool)
    got = correct(target, torch.zeros_like(target), mask, mask.long(), PRESETS["areal"])
    assert got.weights[0].tolist() == pytest.approx([0.0625, 4.0, 0.0]) and got.keep.all()


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_normalised_weights_are_divided_by_their_mean_over_all_that_was_sampled(weight: Weight) -> None:
    drawn = rows(11, spread=0.8)
    target, behaviour, mask, age = tensors(drawn)
    rejecting = Correction(weight=weight, cap=2.0, reject={"token_k3": 0.3})
    raw = correct(target, behaviour, mask, age, rejecting)
    normalised = msgspec.structs.replace(rejecting, normalise=True)
    got = correct(target, behaviour, mask, age, normalised)
    assert torch.equal(got.rule, raw.rule) and torch.equal(got.keep, raw.keep) and not torch.equal(raw.keep, mask)
    logs = [[x for x, sampled, _ in row if sampled] for row in drawn]
    sequences = [min(math.exp(sum(row)), 2.0) for row in logs]
    tokens = [min(math.exp(x), 2.0) for row in logs for x in row]
    every = tokens if weight == "token" else sequences
    torch.testing.assert_close(got.weights, raw.weights / (sum(every) / len(every)), rtol=1e-12, atol=0)
    packed = Rows(torch.tensor([len(row) for row in drawn]))
    pack = packed.pack
    without = correct(pack(target), pack(behaviour), pack(mask), pack(age), normalised, rows=packed)
    torch.testing.assert_close(without.weights, packed.pack(got.weights), rtol=1e-12, atol=0)


def test_weights_that_are_all_zero_cannot_be_normalised_and_stay() -> None:
    correction = Correction(weight="token", band="0.5_2.0", normalise=True)
    target, mask = torch.full((1, 2), 5.0), torch.ones(1, 2, dtype=torch.bool)
    for sampled in (mask, ~mask):
        assert correct(target, torch.zeros(1, 2), sampled, mask.long(), correction).weights.tolist() == [[0.0, 0.0]]


def test_options_change_a_preset() -> None:
    assert resolve("decoupled_token_is", CorrectionOptions(band="0.5_2.0")).cap is None
    assert resolve("decoupled_token_icepop", CorrectionOptions(cap=3.0)).band is None
    assert resolve("decoupled_token_is", CorrectionOptions(weight="none")) == Correction()
    assert resolve("decoupled_geo_rs", CorrectionOptions(reject={})).reject == {}
    assert resolve("areal", CorrectionOptions(max_age=4)) == msgspec.structs.replace(PRESETS["areal"], max_age=4)


CORRECTION = Correction(weight="token", band="0.4_2.5", max_age=8, reject={"seq_mean_k3": 0.25, "token_k1": "0.1_9.0"})
BUCKETS = {"": (0, 99), "age_0/": (0, 0), "age_3-4/": (3, 4), "age_5-8/": (5, 8), "age_9+/": (9, 99)}


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    """target, behaviour, mask, age; no token is 1 or 2 steps old."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    behaviour = -torch.rand(7, 6, dtype=torch.float64) * 3
    target = behaviour + torch.randn(7, 6, dtype=torch.float64) * 0.7
    age = torch.tensor([[draw.choice([0, 0, 3, 4, 5, 8, 9, 12]) for _ in range(6)] for _ in range(7)])
    return target, behaviour, torch.rand(7, 6) > 0.25, age


def ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.mark.parametrize("bucket", BUCKETS)
def test_metrics_match_their_formulas_overall_and_by_age(bucket: str) -> None:
    target, behaviour, mask, age = batch(2)
    corrected = correct(target, behaviour, mask, age, CORRECTION)
    got = correction_metrics(target, behaviour, mask, age, corrected, rules(CORRECTION))
    first, last = BUCKETS[bucket]
    tokens = [(i, t) for i in range(7) for t in range(6) if mask[i, t] and first <= age[i, t] <= last]
    logs = {at: (target[at] - behaviour[at]).item() for at in tokens}
    ratios = [math.exp(x) for x in logs.values()]
    products = [math.exp(sum(x for (i, _), x in logs.items() if i == row)) for row in {i for i, _ in tokens}]
    n = len(tokens)
    expected = {
        "kl": -sum(logs.values()) / n,
        "k3": sum(r - 1 - math.log(r) for r in ratios) / n,
        "logprob_diff_max": max(abs(x) for x in logs.values()),
        "ess": ess(ratios),
        "seq_ess": ess(products),
        "chi2": sum(r * r for r in ratios) / n - 1,
        "seq_chi2": sum(r * r for r in products) / len(products) - 1,
        "ppl_policy": math.exp(-sum(target[at].item() for at in tokens) / n),
        "ppl_behaviour": math.exp(-sum(behaviour[at].item() for at in tokens) / n),
        "masked": sum(not corrected.keep[at] for at in tokens) / n,
    }
    expected["ppl_ratio"] = expected["ppl_policy"] / expected["ppl_behaviour"]
    weights = [corrected.weights[at].item() for at in tokens if corrected.keep[at]]
    if weights:
        mean = sum(weights) / len(weights)
        expected |= {"weight_mean": mean, "weight_min": min(weights), "weight_max": max(weights)}
        expected |= {"weight_std": math.sqrt(sum((w - mean) ** 2 for w in weights) / len(weights))}
        expected |= {"weight_ess": ess(weights) if any(weights) else 0.0}
    prefix = f"correction/{bucket}"
    found = {key.removeprefix(prefix): value for key, value in got.items() if key.startswith(prefix)}
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key
    assert ("weight_mean" in found) == bool(weights)
    shares = [found[f"rule/{name}"] for name in rules(CORRECTION) if name != "band"]
    assert sum(shares) == pytest.approx(found["masked"])


def test_only_ages_that_occur_are_reported() -> None:
    target, behaviour, mask, age = batch(4)
    got = correction_metrics(target, behaviour, mask, age, correct(target, behaviour, mask, age, CORRECTION), ())
    assert {key.split("/")[1] for key in got if "age_" in key} == {"age_0", "age_3-4", "age_5-8", "age_9+"}


def test_an_empty_batch_has_no_metrics() -> None:
    target, behaviour, mask, age = batch(4)
    nothing = torch.zeros_like(mask)
    corrected = correct(target, behaviour, nothing, age, CORRECTION)
    assert correction_metrics(target, behaviour, nothing, age, corrected, rules(CORRECTION)) == {}


def test_on_policy_data_is_worth_all_its_tokens() -> None:
    target, _, mask, age = batch(5)
    age.zero_()
    got = correction_metrics(target, target, mask, age, correct(target, target, mask, age, CORRECTION), ())
    for key, value in {"kl": 0, "k3": 0, "chi2": 0, "seq_chi2": 0, "ess": 1, "seq_ess": 1, "ppl_ratio": 1}.items():
        assert got[f"correction/{key}"] == pytest.approx(value, abs=1e-12), key
    assert got["correction/weight_mean"] == got["correction/weight_ess"] == 1 and got["correction/masked"] == 0


def test_tokens_that_were_not_sampled_do_not_count() -> None:
    target, behaviour, mask, age = batch(6)
    spoilt = torch.where(mask, target, math.nan)
    names = rules(CORRECTION)
    clean = correction_metrics(target, behaviour, mask, age, correct(target, behaviour, mask, age, CORRECTION), names)
    dirty = correction_metrics(spoilt, behaviour, mask, age, correct(spoilt, behaviour, mask, age, CORRECTION), names)
    assert clean == dirty
