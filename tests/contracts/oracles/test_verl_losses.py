"""Every policy loss that verl has too, with its gradient, under every aggregation.

Conversions, each at its place below:
- verl's dual clip cannot be off: c = 1e9, more than any ratio, stands for it.
- `dppo_*`: verl's term is -A sg(min(r, c)) log pi, ours -r A; their gradients are the same without its cap c.
- `gmpo`: verl takes the mean over rows whatever the aggregation.
- Aggregations: verl divides by what it is told the batch holds: the tokens that train, and all rows.
- `clip_cov` and `kl_cov`: verl picks tokens by pi_theta, ours by pi_old, so that ours is given pi_theta there.
- `clip_cov`: verl never picks what PPO clips, which changes the value; such tokens have no gradient either way. Which
  tokens are drawn is chance, so that the share is 1.
- `sapo`: verl ignores the aggregation and takes seq-mean-token-mean.
- Bypass: verl divides by what it is told the batch holds, ours by all sampled tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import PRESETS, Aggregation, AlgorithmConfig, LossOptions
from rl_async.trainer.algorithms.correction import correct
from rl_async.trainer.algorithms.losses import AGGREGATIONS, LOSSES, LossInputs, SelectInputs, count
from tests.contracts.oracles.oracle import Case, Oracle, Tensors, assert_same, both_types

pytestmark = pytest.mark.slow
ROWS, WIDTH = 6, 12
NO_CAP = 1e9
SCALES = (0.0, 1e-7, 1e-4, 0.05, 0.3, 1.0)  # of log r: on-policy, rounding, an engine's mismatch, staleness
# Losses of ours that verl 0.9.1 does not have.
OURS_ALONE = {"decoupled_ppo", "ipo", "m2po", "prime_rl"}
BYPASS = sorted(
    name for name, preset in PRESETS.items() if name.startswith("bypass") and preset.proximal == "behaviour"
)


@dataclass
class Numbers:
    """A case's numbers, in our terms and in verl's."""

    options: dict[str, Any] = field(default_factory=dict)  # of LossOptions
    actor: dict[str, Any] = field(default_factory=dict)
    policy_loss: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """A loss of verl's and how the numbers of ours and its are drawn."""

    theirs: str
    numbers: Callable[[random.Random], Numbers] = lambda draw: Numbers()
    value: bool = True  # whether values are the same, beside gradients
    aggregation: Aggregation | None = None  # the only one that verl has


def _ppo(draw: random.Random) -> Numbers:
    dual = draw.choice([None, draw.uniform(1.1, 3.0)])
    return Numbers({"clip_dual": dual}, {"clip_ratio_c": dual or NO_CAP})


def _sapo(draw: random.Random) -> Numbers:
    positive, negative = draw.uniform(0.5, 2.0), draw.uniform(0.5, 2.0)
    return Numbers(
        {"sapo_tau_positive": positive, "sapo_tau_negative": negative}, {"tau_pos": positive, "tau_neg": negative}
    )


def _dppo(name: str) -> Callable[[random.Random], Numbers]:
    def numbers(draw: random.Random) -> Numbers:
        low, high = 10 ** draw.uniform(-3, -0.5), 10 ** draw.uniform(-3, -0.5)
        clip = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": NO_CAP}
        return Numbers({name: low, "dppo_high": high}, clip)

    return numbers


def _dro(draw: random.Random) -> Numbers:
    beta = draw.uniform(0.01, 2.0)
    return Numbers({"dro_beta": beta}, policy_loss={"dro_beta": beta})


def _clip_cov(draw: random.Random) -> Numbers:
    low, high = draw.uniform(0.0, 0.5), draw.uniform(0.6, 3.0)
    return Numbers(
        {"clip_cov_share": 1.0, "clip_cov_low": low, "clip_cov_high": high},
        policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": low, "clip_cov_ub": high},
    )


def _kl_cov(draw: random.Random) -> Numbers:
    share, coef = draw.choice([1e-4, draw.uniform(0.02, 0.9)]), draw.uniform(0.1, 2.0)
    return Numbers(
        {"kl_cov_share": share, "kl_cov_coef": coef}, policy_loss={"kl_cov_ratio": share, "ppo_kl_coef": coef}
    )


PAIRS = {
    "ppo": Pair("vanilla", _ppo),
    "reinforce": Pair("reinforce"),
    "gpg": Pair("gpg"),
    "gspo": Pair("gspo"),
    "gmpo": Pair("geo_mean", aggregation="seq-mean-token-mean"),
    "sapo": Pair("sapo", _sapo, aggregation="seq-mean-token-mean"),
    "cispo": Pair("cispo"),
    "dro": Pair("dro", _dro),
    "dppo_tv": Pair("dppo_tv", _dppo("dppo_tv"), value=False),
    "dppo_kl": Pair("dppo_kl", _dppo("dppo_kl"), value=False),
    "clip_cov": Pair("clip_cov", _clip_cov, value=False),
    "kl_cov": Pair("kl_cov", _kl_cov),
}


def draw_batch(generator: torch.Generator, number: int) -> Tensors:
    """Rows with holes, some without a token that trains; half of the cases have weights."""

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    proximal = -0.05 - normal().abs()
    logprobs = torch.minimum(proximal + normal(SCALES[number % len(SCALES)]), torch.tensor(-1e-3))
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0, 0] = True
    mask[1] = mask[1] & (number % 3 > 0)
    batch = {"proximal": proximal, "logprobs": logprobs, "advantages": normal(), "mask": mask}
    if number % 2:
        batch["weights"] = 2 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return batch


def make_cases(name: str) -> tuple[list[Case], list[AlgorithmConfig]]:
    """The cases with verl's numbers, and ours."""
    pair, cases, ours = PAIRS[name], both_types(draw_batch), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        numbers, low, high = pair.numbers(draw), draw.uniform(0.05, 0.5), draw.uniform(0.05, 0.5)
        aggregation = pair.aggregation or get_args(Aggregation)[number % 5]
        case.options = {
            "name": pair.theirs,
            "aggregation": aggregation,
            "actor": {"clip_ratio_low": low, "clip_ratio_high": high} | numbers.actor,
            "policy_loss": numbers.policy_loss,
            "counts": {"batch_num_tokens": int(case["mask"].sum()), "global_batch_size": ROWS},
        }
        options = LossOptions(**numbers.options)
        ours.append(AlgorithmConfig(loss_options=options, aggregation=aggregation, clip_low=low, clip_high=high))
    return cases, ours


def our_loss(name: str, case: Case, config: AlgorithmConfig, weights: Tensor, keep: Tensor) -> Tensors:
    """The loss over what ``keep`` says, divided by what was sampled, and its gradient."""
    logprobs = case["logprobs"].clone().requires_grad_()
    loss = LOSSES[name]
    selected = None
    if loss.select:
        selected = loss.select(SelectInputs(logprobs.detach(), case["proximal"], case["advantages"], keep, config, 0))
    values = loss.per_token(
        LossInputs(
            logprobs=logprobs,
            proximal=case["proximal"],
            behaviour=case["proximal"],
            advantages=case["advantages"],
            weights=weights,
            mask=keep,
            free=keep,
            options=config,
            selected=selected,
        )
    )
    ones = torch.ones(ROWS, dtype=case.dtype)
    counts = count(case["mask"], ones, WIDTH)
    AGGREGATIONS[config.aggregation](values, keep, ones, counts).backward()
    assert logprobs.grad is not None
    total = AGGREGATIONS[config.aggregation](values.detach(), keep, ones, counts)
    return {"loss": total, "gradient": logprobs.grad}


@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_and_its_gradient_are_verls(verl: Oracle, name: str) -> None:
    cases, configs = make_cases(name)
    for case, config, theirs in zip(cases, configs, verl.ask("policy_loss", cases), strict=True):
        weights = case.tensors.get("weights", torch.ones(ROWS, WIDTH, dtype=case.dtype))
        ours = our_loss(name, case, config, weights, case["mask"])
        assert_same(ours["gradient"], theirs["gradient"], case)
        if PAIRS[name].value:
            assert_same(ours["loss"], theirs["loss"], case)


@pytest.mark.parametrize("preset", BYPASS)
def test_a_bypass_preset_and_its_gradient_are_verls(verl: Oracle, preset: str) -> None:
    cases = both_types(draw_batch)
    for number, case in enumerate(cases):
        case.tensors.pop("weights", None)
        case["mask"][:, 0] = True
        case.options = {
            "name": "bypass_mode",
            "aggregation": ("token-mean", "token-sum", "seq-mean-token-sum")[number % 3],
            "preset": preset,
            "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": NO_CAP},
            "counts": {"batch_num_tokens": int(case["mask"].sum()), "global_batch_size": ROWS},
        }
    correction = PRESETS[preset]
    for case, theirs in zip(cases, verl.ask("policy_loss", cases), strict=True):
        config = AlgorithmConfig(aggregation=case.options["aggregation"], clip_low=0.2, clip_high=0.28)
        age = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
        corrected = correct(case["logprobs"], case["proximal"], case["mask"], age, correction)
        ours = our_loss(correction.loss or "ppo", case, config, corrected.weights, corrected.keep)
        assert_same(ours["gradient"], theirs["gradient"], case)
        assert_same(ours["loss"], theirs["loss"], case)


def test_every_loss_of_either_side_is_compared(verl: Oracle) -> None:
    assert LOSSES.keys() - PAIRS.keys() == OURS_ALONE
    [answer] = verl.ask("names", [Case({"any": torch.zeros(1)}, torch.float64, {"registry": "losses"})])
    theirs = set(bytes(answer["names"].tolist()).decode().split("\n"))
    assert theirs - {pair.theirs for pair in PAIRS.values()} == {"bypass_mode"}  # the presets' test
