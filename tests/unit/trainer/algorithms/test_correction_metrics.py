"""Metrics of the correction against float64 loops."""

import math
import random

import pytest
import torch

from rl_async.configs.schema.correction import Correction, rules
from rl_async.trainer.algorithms.correction import correct, correction_metrics

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
