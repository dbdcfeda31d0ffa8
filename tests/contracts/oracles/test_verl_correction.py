"""The off-policy correction: verl's presets by name, every rejection rule, bands, normalisation.

Conversions, each at its place below:
- A k1 band: verl tests -log r, which keeps r in [1 / high, 1 / low], so that it is given the inverse. Its presets'
  bands are not inverted: 0.999_1.001 keeps what is within 1e-6 of the bounds on one side only, and no ratio of these
  cases lies there.
- verl leaves weights where a rule rejects; the mask makes them 0.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import PRESETS, REJECTIONS, Correction
from rl_async.trainer.algorithms.correction import Corrected, correct
from tests.contracts.oracles.oracle import Case, Oracle, Tensors, assert_same, both_types

pytestmark = pytest.mark.slow
ROWS, WIDTH = 8, 40
OTHERS = {"areal", "prime_rl", "skyrl", "slime_tis"}  # presets that are not verl's
OURS_ALONE = {"seq_max_k1"}
SCALES = (0.0, 1e-8, 1e-7, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.5, 2.0)  # of log r


def draw_ratios(generator: torch.Generator, number: int) -> Tensors:
    """Rows with holes; a row's log r scatter and are shifted by as much as the case says.

    One row stays on-policy, since verl's metrics divide by zero where all weights are 0.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behaviour = -0.05 - normal(ROWS, WIDTH).abs()
    scale = SCALES[number % len(SCALES)]
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[:, 0] = True
    distance = scale * (normal(ROWS, WIDTH) + normal(ROWS, 1))
    distance[0] = 0.0
    return {"behaviour": behaviour, "target": torch.minimum(behaviour + distance, torch.tensor(-1e-4)), "mask": mask}


def our_correction(case: Case, correction: Correction) -> Corrected:
    """What ours makes of the case."""
    age = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    return correct(case["target"], case["behaviour"], case["mask"], age, correction)


def assert_corrects_alike(ours: Corrected, theirs: Tensors, case: Case) -> None:
    """The same tokens train, with the same weights."""
    assert torch.equal(ours.keep, theirs["mask"] & case["mask"]), case.options
    assert_same(ours.weights, torch.where(theirs["mask"], theirs["weights"], 0.0), case)


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - OTHERS))
def test_a_preset_is_verls(verl: Oracle, preset: str) -> None:
    cases = both_types(draw_ratios)
    for case in cases:
        case.options = {"preset": preset}
    for case, theirs in zip(cases, verl.ask("correction", cases), strict=True):
        assert_corrects_alike(our_correction(case, PRESETS[preset]), theirs, case)


def test_verl_has_no_other_preset(verl: Oracle) -> None:
    [answer] = verl.ask("names", [Case({"any": torch.zeros(1)}, torch.float64, {"registry": "presets"})])
    assert set(bytes(answer["names"].tolist()).decode().split("\n")) == PRESETS.keys() - OTHERS


def rule_limits(rule: str, scale: float, draw: random.Random) -> tuple[Any, Any]:
    """A limit that rejects some of the rows or tokens of a case of that scale: ours, verl's."""
    scale = max(scale, 1e-6)
    if rule.endswith("k1"):
        reach = scale * draw.uniform(0.3, 3.0) * (WIDTH if "sum" in rule else 1)
        low, high = 2.718281828 ** -min(reach, 5.0), 2.718281828 ** min(1.7 * reach, 5.0)
        return f"{low!r}_{high!r}", f"{1 / high!r}_{1 / low!r}"
    limit = max(
        scale**2 * draw.uniform(0.1, 3.0) * (WIDTH if "sum" in rule else 1), 1e-5
    )  # above what rounding adds up to
    return limit, limit


@pytest.mark.parametrize("rule", sorted(set(REJECTIONS) - OURS_ALONE))
def test_a_rejection_rule_is_verls(verl: Oracle, rule: str) -> None:
    cases, ours = both_types(draw_ratios), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        ours_limit, theirs_limit = rule_limits(rule, SCALES[number % len(SCALES)], draw)
        ours.append(Correction(reject={rule: ours_limit}))
        case.options = {"rollout_rs": rule, "rollout_rs_threshold": str(theirs_limit)}
    answers = verl.ask("correction", cases)
    for case, correction, theirs in zip(cases, ours, answers, strict=True):
        assert_corrects_alike(our_correction(case, correction), theirs, case)
    cut = [not torch.equal(theirs["mask"], case["mask"]) for case, theirs in zip(cases, answers, strict=True)]
    assert sum(cut) > len(cases) / 8  # one row is always kept, so that these limits reject some and not all


def test_several_rules_and_a_weight_are_verls(verl: Oracle) -> None:
    cases, ours = both_types(draw_ratios), []
    for number, case in enumerate(cases):
        draw, scale = random.Random(number), SCALES[number % len(SCALES)]
        rules = draw.sample(sorted(set(REJECTIONS) - OURS_ALONE), 3)
        limits = [rule_limits(rule, 3 * scale, draw) for rule in rules]
        level, cap, normalises = draw.choice(["token", "sequence"]), draw.uniform(0.8, 3.0), number % 3 == 0
        reject = dict(zip(rules, (mine for mine, _ in limits), strict=True))
        ours.append(Correction(weight=level, cap=cap, normalise=normalises, reject=reject))
        case.options = {"rollout_is": level, "rollout_is_threshold": cap, "rollout_rs": ",".join(rules)}
        case.options["rollout_is_batch_normalize"] = normalises
        case.options["rollout_rs_threshold"] = ",".join(str(theirs) for _, theirs in limits)
    for case, correction, theirs in zip(cases, ours, verl.ask("correction", cases), strict=True):
        assert_corrects_alike(our_correction(case, correction), theirs, case)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("banded", [False, True])
def test_weights_are_verls(verl: Oracle, level: Any, banded: bool) -> None:
    cases, ours = both_types(draw_ratios), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        low, high = draw.uniform(0.2, 0.9), draw.uniform(1.1, 4.0)
        normalises = number % 2 == 0
        bounds = {"band": f"{low!r}_{high!r}"} if banded else {"cap": high}
        ours.append(Correction(weight=level, normalise=normalises, **bounds))
        case.options = {"rollout_is": level, "rollout_is_batch_normalize": normalises}
        case.options["rollout_is_threshold"] = f"{low!r}_{high!r}" if banded else high
    for case, correction, theirs in zip(cases, ours, verl.ask("correction", cases), strict=True):
        assert_corrects_alike(our_correction(case, correction), theirs, case)
