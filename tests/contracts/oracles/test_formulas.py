"""Losses, advantages, corrections, aggregations and settings, against those that verl and TRL have too.

Conversions of losses, each at its place below:
- verl's dual clip cannot be off: c = 1e9, more than any ratio, stands for it.
- `dppo_*`: verl's term is -A sg(min(r, c)) log pi, ours -min(r, c) A; their gradients are the same.
- `gmpo`: verl takes the mean over rows whatever the aggregation.
- Aggregations: verl divides by what it is told the batch holds: the tokens that train, and all rows.
- `clip_cov` and `kl_cov`: verl picks tokens by pi_theta, ours by pi_old, so that ours is given pi_theta there.
- `clip_cov`: verl never picks what PPO clips, which changes the value; such tokens have no gradient either way. Which
  tokens are drawn is chance, so that the share is 1.
- `sapo`: verl ignores the aggregation and takes seq-mean-token-mean.
- Bypass: verl divides by what it is told the batch holds, ours by all sampled tokens.

Ours compute in float64 what verl computes in the type of the rewards. Conversions of advantages, each at its place
below:
- epsilon beside a standard deviation: verl is given ours, 1e-4 (its own is 1e-6).
- `gpg`: alpha counts episodes of groups whose rewards differ here, and non-zero rewards in verl.
- `remax`: without turn rewards, which verl's advantage takes from their turn on and ours as a whole.
- `gdpo`: verl computes in float32 whatever it is given.
- Token baselines: verl adds 1e-8 to the sum that divides; it is given 1e-30.
- `optimal_token_baseline`: without holes, where verl takes a count of tokens for a column.
- A row alone in its group gets 0 here and its reward in verl; no group of these cases is that small.

Conversions of corrections, each at its place below:
- A k1 band: verl tests -log r, which keeps r in [1 / high, 1 / low], so that it is given the inverse. Its presets'
  bands are not inverted: 0.999_1.001 keeps what is within 1e-6 of the bounds on one side only, and no ratio of these
  cases lies there.
- verl leaves weights where a rule rejects; the mask makes them 0.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rl_async.configs.importing import trl as trl_keys
from rl_async.configs.importing import verl as verl_keys
from rl_async.configs.importing.translation import Values, flatten, resolve_references
from rl_async.configs.load import load_config, parse
from rl_async.configs.schema.algorithm import (
    PRESETS,
    REJECTIONS,
    AdaptiveKl,
    AdvantageOptions,
    Aggregation,
    AlgorithmConfig,
    Correction,
    KlConfig,
    LossOptions,
    TeacherConfig,
)
from rl_async.configs.schema.data import PreferenceConfig
from rl_async.trainer.algorithms.advantages import ADVANTAGES, EPSILON, AdvantageInputs, Groups, gae, value_loss
from rl_async.trainer.algorithms.correction import Corrected, correct
from rl_async.trainer.algorithms.losses import (
    AGGREGATIONS,
    ESTIMATORS,
    LOSSES,
    Counts,
    KlController,
    LossInputs,
    SelectInputs,
    count,
    divergence_of,
    high_entropy,
    near_policy,
)
from rl_async.trainer.finetune.loop import preference_losses
from rl_async.trainer.update import on_last_token
from tests.contracts.oracles.oracle import Case, Oracle, Tensors, assert_same, both_types

ROWS, WIDTH = 6, 12
NO_CAP = 1e9
SCALES = (0.0, 1e-7, 1e-4, 0.05, 0.3, 1.0)  # of log r: on-policy, rounding, an engine's mismatch, staleness
# Losses of ours that verl 0.9.1 does not have.
OURS_ALONE = {"decoupled_ppo", "ipo", "m2po", "prime_rl", "sppo", "vespo"}
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
        cap = draw.choice([None, draw.uniform(1.1, 3.0)])
        clip = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": cap or NO_CAP}
        return Numbers({name: low, "dppo_high": high, "dppo_cap": cap}, clip)

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


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_loss_and_its_gradient_are_verls(verl: Oracle, name: str) -> None:
    cases, configs = make_cases(name)
    for case, config, theirs in zip(cases, configs, verl.ask("policy_loss", cases), strict=True):
        weights = case.tensors.get("weights", torch.ones(ROWS, WIDTH, dtype=case.dtype))
        ours = our_loss(name, case, config, weights, case["mask"])
        assert_same(ours["gradient"], theirs["gradient"], case)
        if PAIRS[name].value:
            assert_same(ours["loss"], theirs["loss"], case)


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_loss_of_either_side_is_compared(verl: Oracle) -> None:
    assert LOSSES.keys() - PAIRS.keys() == OURS_ALONE
    [answer] = verl.ask("names", [Case({"any": torch.zeros(1)}, torch.float64, {"registry": "losses"})])
    theirs = set(bytes(answer["names"].tolist()).decode().split("\n"))
    assert theirs - {pair.theirs for pair in PAIRS.values()} == {"bypass_mode"}  # the presets' test


ADVANTAGE_WIDTH = 12
GROUP_ARGUMENTS = ["index", "epsilon"]
GAMMAS = (1.0, 0.99, 0.5)


@dataclass(frozen=True)
class AdvantagePair:
    """An estimator of verl's, what of a case it is given, and the factor that makes of its answer ours."""

    ours: str
    arguments: list[str]
    options: dict[str, Any] = field(default_factory=dict)  # of the request to verl
    turn_rewards: bool = True
    holes: bool = True
    in_float32: bool = False
    factor: Callable[[AdvantageInputs], float] = lambda x: 1.0


def _alpha(x: AdvantageInputs) -> float:
    groups = Groups.of(x.groups, x.weights)
    return int(x.rewards.count_nonzero()) / max(int(groups.differs(x.rewards).sum()), 1)


_NORM = [*GROUP_ARGUMENTS, "norm_adv_by_std_in_grpo"]
_BASELINE = [*GROUP_ARGUMENTS, "old_log_probs", "sum_pi_squared", "rollout_is_weights"]
_PARTS = ["index", "epsilon", "config", "non_tensor_batch", "batch"]
ADVANTAGE_PAIRS = {
    "grpo": AdvantagePair("grpo", _NORM, {"norm": True}),
    "grpo without deviation": AdvantagePair("dr_grpo", _NORM, {"norm": False}),
    "grpo_vectorized": AdvantagePair("grpo", _NORM, {"norm": True}),
    "grpo_passk": AdvantagePair("grpo_passk", [*GROUP_ARGUMENTS, "config"]),
    "gdpo": AdvantagePair("gdpo", _PARTS, {"algorithm": {"gdpo_reward_keys": ["a", "b"]}}, in_float32=True),
    "rloo": AdvantagePair("rloo", ["index"]),
    "rloo_vectorized": AdvantagePair("rloo", ["index"]),
    "opo": AdvantagePair("opo", ["index"]),
    "gpg": AdvantagePair("gpg", ["index"], factor=_alpha),
    "remax": AdvantagePair("remax", ["reward_baselines"], turn_rewards=False),
    "reinforce_plus_plus": AdvantagePair("reinforce_plus_plus", ["config"]),
    "reinforce_plus_plus_baseline": AdvantagePair("reinforce_plus_plus_baseline", ["index"]),
    "gae": AdvantagePair("gae", ["values", "gamma", "lam"]),
    "optimal_token_baseline": AdvantagePair("optimal_token_baseline", _BASELINE, {"epsilon": 1e-30}, holes=False),
    "tir_optimal_token_baseline": AdvantagePair("tir_optimal_token_baseline", _BASELINE, {"epsilon": 1e-30}),
}


def draw_advantage_batch(generator: torch.Generator, number: int) -> Tensors:
    """Groups of two to four rows of unequal length, rewards of which many are equal, and rewards of turns."""
    sizes = (torch.randint(2, 5, (3,), generator=generator)).tolist()
    groups = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)])
    rows = len(groups)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, ADVANTAGE_WIDTH + 1, (rows, 1), generator=generator)
    within = torch.arange(ADVANTAGE_WIDTH) < lengths
    holes = within & (uniform(rows, ADVANTAGE_WIDTH) < 0.7)
    holes[:, 0] = True
    distributions = uniform(rows, ADVANTAGE_WIDTH, 5).pow(3)
    distributions /= distributions.sum(2, keepdim=True)
    choices = (0.0, 1.0) if number % 2 else (-1.0, 0.0, 0.5, 2.0)
    return {
        "outcomes": torch.tensor(choices).double()[torch.randint(len(choices), (rows,), generator=generator)],
        "turn_rewards": (0.25 * (uniform(rows, ADVANTAGE_WIDTH) < 0.2).double()),
        "within": within,
        "mask": holes,
        "groups": groups,
        "values": torch.randn(rows, ADVANTAGE_WIDTH, generator=generator, dtype=torch.float64),
        "baselines": uniform(3)[groups],
        "logprobs": distributions[:, :, 0].log(),
        "sum_squares": (distributions**2).sum(2),
        "importance": 2 * uniform(rows, ADVANTAGE_WIDTH),
        "part.a": torch.randint(2, (rows,), generator=generator).double(),
        "part.b": torch.randint(9, (rows,), generator=generator).double() / 8,  # equal in either type, or far apart
    }


def make_advantage_cases(name: str) -> list[Case]:
    """The cases as verl's estimator ``name`` takes them."""
    pair, cases = ADVANTAGE_PAIRS[name], both_types(draw_advantage_batch)
    for number, case in enumerate(cases):
        if not pair.holes:
            case.tensors["mask"] = case["within"]
        turn_rewards = torch.where(case["mask"], case["turn_rewards"], 0.0)
        rewards = on_last_token(case["outcomes"], case["mask"])
        case.tensors["rewards"] = rewards + turn_rewards if pair.turn_rewards else rewards
        algorithm = {"gamma": GAMMAS[number % 3]} | pair.options.get("algorithm", {})
        if name == "gdpo":
            algorithm["gdpo_reward_weights"] = [1.0, 0.5 + number % 4]
        case.options = {"epsilon": EPSILON, "arguments": pair.arguments} | pair.options
        case.options |= {"name": name.partition(" ")[0], "algorithm": algorithm, "lam": (1.0, 0.9)[number % 2]}
    return cases


def our_inputs(case: Case) -> AdvantageInputs:
    """The same batch as our estimators take it."""
    x = {name: t.double() if t.is_floating_point() else t for name, t in case.tensors.items()}
    weights = case.options["algorithm"].get("gdpo_reward_weights", [1.0, 1.0])
    rows = len(x["groups"])
    return AdvantageInputs(
        rewards=x["rewards"].sum(1),
        token_rewards=x["rewards"],
        mask=x["mask"],
        groups=x["groups"],
        scored=torch.ones(rows, dtype=torch.bool),
        row_weights=torch.ones(rows, dtype=torch.float64),
        lengths=x["mask"].sum(1).double(),
        turns=torch.where(x["mask"], 0, -1),
        options=AdvantageOptions(
            gamma=case.options["algorithm"]["gamma"],
            lam=case.options["lam"],
            gdpo_weights=dict(zip("ab", weights, strict=True)),
        ),
        parts={"a": x["part.a"], "b": x["part.b"]},
        baselines=x["baselines"],
        values=x["values"],
        logprobs=x["logprobs"],
        sum_squares=x["sum_squares"],
        importance=x["importance"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVANTAGE_PAIRS)
def test_an_advantage_is_verls(verl: Oracle, name: str) -> None:
    pair, cases = ADVANTAGE_PAIRS[name], make_advantage_cases(name)
    for case, theirs in zip(cases, verl.ask("advantage", cases), strict=True):
        x = our_inputs(case)
        case.dtype = torch.float32 if pair.in_float32 else case.dtype
        expected = torch.where(x.mask, theirs["advantages"].double(), 0.0)  # verl's gae gives numbers elsewhere, too
        assert_same(ADVANTAGES[pair.ours](x), pair.factor(x) * expected, case)


@pytest.mark.slow
def test_the_critics_targets_are_verls(verl: Oracle) -> None:
    cases = make_advantage_cases("gae")
    for case, theirs in zip(cases, verl.ask("advantage", cases), strict=True):
        x = our_inputs(case)
        assert x.values is not None
        _, returns = gae(x.token_rewards, x.values, x.mask, x.options.gamma, x.options.lam)
        assert_same(returns, torch.where(x.mask, theirs["returns"].double(), 0.0), case)


# From papers; the unit tests have plain references for them.
# verl's package holds no formulas of PRIME, which is compared with the paper's.
ADVANTAGES_OF_OURS_ALONE = {"dpo", "gigpo", "max_rl", "prime"}


@pytest.mark.slow
def test_every_estimator_of_either_side_is_compared(verl: Oracle) -> None:
    assert ADVANTAGES.keys() - ADVANTAGES_OF_OURS_ALONE == {pair.ours for pair in ADVANTAGE_PAIRS.values()}
    [answer] = verl.ask("names", [Case({"any": torch.zeros(1)}, torch.float64, {"registry": "advantages"})])
    assert set(bytes(answer["names"].tolist()).decode().split("\n")) == {
        name.partition(" ")[0] for name in ADVANTAGE_PAIRS
    }


CORRECTION_ROWS, CORRECTION_WIDTH = 8, 40
OTHERS = {"areal", "prime_rl", "skyrl", "slime_tis"}  # presets that are not verl's
CORRECTIONS_OF_OURS_ALONE = {"seq_max_k1"}
CORRECTION_SCALES = (0.0, 1e-8, 1e-7, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.5, 2.0)  # of log r


def draw_ratios(generator: torch.Generator, number: int) -> Tensors:
    """Rows with holes; a row's log r scatter and are shifted by as much as the case says.

    One row stays on-policy, since verl's metrics divide by zero where all weights are 0.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behaviour = -0.05 - normal(CORRECTION_ROWS, CORRECTION_WIDTH).abs()
    scale = CORRECTION_SCALES[number % len(CORRECTION_SCALES)]
    mask = torch.rand(CORRECTION_ROWS, CORRECTION_WIDTH, generator=generator) < 0.7
    mask[:, 0] = True
    distance = scale * (normal(CORRECTION_ROWS, CORRECTION_WIDTH) + normal(CORRECTION_ROWS, 1))
    distance[0] = 0.0
    return {"behaviour": behaviour, "target": torch.minimum(behaviour + distance, torch.tensor(-1e-4)), "mask": mask}


def our_correction(case: Case, correction: Correction) -> Corrected:
    """What ours makes of the case."""
    age = torch.zeros(CORRECTION_ROWS, CORRECTION_WIDTH, dtype=torch.int64)
    return correct(case["target"], case["behaviour"], case["mask"], age, correction)


def assert_corrects_alike(ours: Corrected, theirs: Tensors, case: Case) -> None:
    """The same tokens train, with the same weights."""
    assert torch.equal(ours.keep, theirs["mask"] & case["mask"]), case.options
    assert_same(ours.weights, torch.where(theirs["mask"], theirs["weights"], 0.0), case)


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - OTHERS))
def test_a_preset_is_verls(verl: Oracle, preset: str) -> None:
    cases = both_types(draw_ratios)
    for case in cases:
        case.options = {"preset": preset}
    for case, theirs in zip(cases, verl.ask("correction", cases), strict=True):
        assert_corrects_alike(our_correction(case, PRESETS[preset]), theirs, case)


@pytest.mark.slow
def test_verl_has_no_other_preset(verl: Oracle) -> None:
    [answer] = verl.ask("names", [Case({"any": torch.zeros(1)}, torch.float64, {"registry": "presets"})])
    assert set(bytes(answer["names"].tolist()).decode().split("\n")) == PRESETS.keys() - OTHERS


def rule_limits(rule: str, scale: float, draw: random.Random) -> tuple[Any, Any]:
    """A limit that rejects some of the rows or tokens of a case of that scale: ours, verl's."""
    scale = max(scale, 1e-6)
    if rule.endswith("k1"):
        reach = scale * draw.uniform(0.3, 3.0) * (CORRECTION_WIDTH if "sum" in rule else 1)
        low, high = 2.718281828 ** -min(reach, 5.0), 2.718281828 ** min(1.7 * reach, 5.0)
        return f"{low!r}_{high!r}", f"{1 / high!r}_{1 / low!r}"
    limit = max(
        scale**2 * draw.uniform(0.1, 3.0) * (CORRECTION_WIDTH if "sum" in rule else 1), 1e-5
    )  # above what rounding adds up to
    return limit, limit


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(set(REJECTIONS) - CORRECTIONS_OF_OURS_ALONE))
def test_a_rejection_rule_is_verls(verl: Oracle, rule: str) -> None:
    cases, ours = both_types(draw_ratios), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        ours_limit, theirs_limit = rule_limits(rule, CORRECTION_SCALES[number % len(CORRECTION_SCALES)], draw)
        ours.append(Correction(reject={rule: ours_limit}))
        case.options = {"rollout_rs": rule, "rollout_rs_threshold": str(theirs_limit)}
    answers = verl.ask("correction", cases)
    for case, correction, theirs in zip(cases, ours, answers, strict=True):
        assert_corrects_alike(our_correction(case, correction), theirs, case)
    cut = [not torch.equal(theirs["mask"], case["mask"]) for case, theirs in zip(cases, answers, strict=True)]
    assert sum(cut) > len(cases) / 8  # one row is always kept, so that these limits reject some and not all


@pytest.mark.slow
def test_several_rules_and_a_weight_are_verls(verl: Oracle) -> None:
    cases, ours = both_types(draw_ratios), []
    for number, case in enumerate(cases):
        draw, scale = random.Random(number), CORRECTION_SCALES[number % len(CORRECTION_SCALES)]
        rules = draw.sample(sorted(set(REJECTIONS) - CORRECTIONS_OF_OURS_ALONE), 3)
        limits = [rule_limits(rule, 3 * scale, draw) for rule in rules]
        level, cap, normalises = draw.choice(["token", "sequence"]), draw.uniform(0.8, 3.0), number % 3 == 0
        reject = dict(zip(rules, (mine for mine, _ in limits), strict=True))
        ours.append(Correction(weight=level, cap=cap, normalise=normalises, reject=reject))
        case.options = {"rollout_is": level, "rollout_is_threshold": cap, "rollout_rs": ",".join(rules)}
        case.options["rollout_is_batch_normalize"] = normalises
        case.options["rollout_rs_threshold"] = ",".join(str(theirs) for _, theirs in limits)
    for case, correction, theirs in zip(cases, ours, verl.ask("correction", cases), strict=True):
        assert_corrects_alike(our_correction(case, correction), theirs, case)


@pytest.mark.slow
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


KL_NAMES = {"k1": ["kl", "k1"], "k2": ["mse", "k2"], "k3": ["low_var_kl", "k3"], "abs": ["abs"]}
KL_PAIRS = [(ours, theirs) for ours, names in KL_NAMES.items() for theirs in names]
KL_PAIRS += [(f"{ours}+", f"{theirs}+") for ours, theirs in KL_PAIRS if ours != "k2"]


def draw_values(generator: torch.Generator, number: int) -> Tensors:
    """Three numbers a token, and rows with holes, of which one may train nothing."""

    def normal() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0, 0] = True
    mask[1] = mask[1] & (number % 3 > 0)
    return {"values": normal(), "old_values": normal(), "returns": normal(), "mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("name", get_args(Aggregation))
def test_an_aggregation_is_verls(verl: Oracle, name: Aggregation) -> None:
    cases = both_types(draw_values)
    for number, case in enumerate(cases):
        tokens, rows = 5 + number, int(case["mask"].any(1).sum()) + number % 3  # of a batch of several micro-batches
        counts = {"batch_num_tokens": tokens, "global_batch_size": rows, "loss_scale_factor": WIDTH + number}
        case.options = {"name": name, "counts": counts}
    for case, theirs in zip(cases, verl.ask("aggregation", cases), strict=True):
        values = case["values"].clone().requires_grad_()
        tokens, rows, width = case.options["counts"].values()
        ones = torch.ones(ROWS, dtype=case.dtype)
        loss = AGGREGATIONS[name](values, case["mask"], ones, Counts(tokens, rows, width))
        loss.backward()
        assert values.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(values.grad, theirs["gradient"], case)


def draw_logprobs(generator: torch.Generator, number: int) -> Tensors:
    """Log-probabilities of two models, from almost equal to far apart."""
    reference = -torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).abs()
    scale = (1e-7, 1e-3, 0.3, 1.0, 20.0)[number % 5]
    distance = scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {"reference": reference, "logprobs": reference + distance}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "theirs"), KL_PAIRS)
def test_a_kl_estimator_and_its_gradient_are_verls(verl: Oracle, name: str, theirs: str) -> None:
    cases = both_types(draw_logprobs)
    for case in cases:
        case.options = {"name": theirs}
    for case, answer in zip(cases, verl.ask("kl", cases), strict=True):
        logprobs = case["logprobs"].clone().requires_grad_()
        values = ESTIMATORS[name](logprobs, case["reference"])
        values.sum().backward()
        assert logprobs.grad is not None
        assert_same(values.detach(), answer["values"], case)
        assert_same(logprobs.grad, answer["gradient"], case)


@pytest.mark.slow
def test_every_kl_estimator_but_the_whole_distributions_is_compared() -> None:
    assert ESTIMATORS.keys() - {ours for ours, _ in KL_PAIRS} == {"full"}  # verl raises NotImplementedError


@pytest.mark.slow
def test_the_adaptive_coefficient_is_verls(verl: Oracle) -> None:
    cases = both_types(lambda generator, number: {"kl": torch.rand(20, generator=generator, dtype=torch.float64)})
    for number, case in enumerate(cases):
        draw = random.Random(number)
        case.options = {
            "coef": draw.uniform(1e-4, 1.0),
            "target": draw.uniform(0.1, 0.9),
            "horizon": draw.randint(500, 10_000),
            "trajectories": draw.randint(1, 1024),
        }
    for case, theirs in zip(cases, verl.ask("kl_controller", cases), strict=True):
        given = SimpleNamespace(**case.options)
        controller = KlController(
            KlConfig(coef=given.coef, adaptive=AdaptiveKl(target=given.target, horizon=given.horizon))
        )
        coefs = []
        for value in case["kl"].tolist():
            controller.after_step(value, given.trajectories)
            coefs.append(controller.coef)
        assert_same(torch.tensor(coefs), theirs["coefs"], Case({}, torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_the_value_loss_and_its_gradient_are_verls(verl: Oracle, clip: float | None) -> None:
    cases = both_types(draw_values)
    for case in cases:
        case.options = {"clip": clip or 1e9, "aggregation": "token-mean"}
    for case, theirs in zip(cases, verl.ask("value_loss", cases), strict=True):
        values = case["values"].clone().requires_grad_()
        per_token = value_loss(values, case["old_values"], case["returns"], clip)
        loss = per_token[case["mask"]].mean()
        loss.backward()
        assert values.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(values.grad, theirs["gradient"], case)


OF_A_SCRIPT = {"model_name_or_path", "dataset_name"}  # of TRL's other dataclasses, which its scripts read together


def settings(oracle: Oracle) -> str:
    """The project's own defaults, as text."""
    [answer] = oracle.ask("settings", [Case({"any": torch.zeros(1)}, torch.float64)])
    return bytes(answer["text"].tolist()).decode()


@pytest.mark.slow
def test_verls_keys_and_defaults(verl: Oracle) -> None:
    theirs, _ = resolve_references(flatten(parse(settings(verl), "verl")))
    for key in (*verl_keys.KEYS, *verl_keys.ENGINE_KEYS, *verl_keys.CRITIC_KEYS):
        assert key.theirs in theirs, key
        if key.default is not None:
            assert key.default == theirs[key.theirs], key


@pytest.mark.slow
def test_trls_fields_and_defaults(trl: Oracle) -> None:
    theirs: Values = parse(settings(trl), "TRL")
    for key in trl_keys.KEYS:
        assert key.theirs in theirs or key.theirs in OF_A_SCRIPT, key
        if key.default is not None:
            assert key.default == theirs[key.theirs], key


@pytest.mark.slow
def test_verls_whole_default_config_becomes_one_of_ours(verl: Oracle, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    theirs.write_text(settings(verl))
    ours.write_text(verl_keys.write(theirs, ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]))
    config = load_config(str(ours))
    assert (config.algorithm.clip_high, config.algorithm.loss_options.clip_dual) == (0.2, 3.0)


# TRL's GRPO loss, whole: the policy loss, its aggregation, the weights of the engine's mismatch and the KL; and the
# divergence of its GKDTrainer and the losses of its DPOTrainer.


AGGREGATION: dict[str, Aggregation] = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
BY_ROW = [("grpo", "sequence"), ("luspo", "sequence")]
KINDS = [(loss_type, "token") for loss_type in AGGREGATION if loss_type != "luspo"] + BY_ROW


def draw_trl_batch(generator: torch.Generator, number: int) -> Tensors:
    """Rows with holes and one advantage each, one of which may train nothing; half of the cases have weights."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    proximal = -0.05 - normal(ROWS, WIDTH).abs()
    scale = (0.0, 1e-7, 1e-3, 0.3)[number % 4]
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0, 0] = True
    mask[1] = mask[1] & (number % 3 > 0)
    logprobs = torch.minimum(proximal + scale * normal(ROWS, WIDTH), torch.tensor(-1e-3))
    batch = {
        "proximal": proximal,
        "logprobs": logprobs,
        "reference": logprobs + (scale * normal(ROWS, WIDTH)).clamp(-2.5, 2.5),
        "advantages": normal(ROWS),
        "mask": mask,
        "entropy": normal(ROWS, WIDTH).abs(),
    }
    if number % 2:
        batch["weights"] = 2 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return batch


def make_trl_cases(loss_type: str, level: str) -> tuple[list[Case], list[AlgorithmConfig]]:
    """The cases with TRL's numbers, and ours."""
    cases, ours = both_types(draw_trl_batch), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        low, high = draw.uniform(0.05, 0.5), draw.uniform(0.05, 0.5)
        delta = draw.choice([None, draw.uniform(1.6, 3.0)]) if loss_type not in ("cispo", "sapo", "vespo") else None
        if level == "sequence":
            # Ours has no dual clip of a row's ratio.
            delta = None
            if "weights" in case.tensors:
                case.tensors["weights"] = case["weights"][:, :1].expand(ROWS, WIDTH)
        if loss_type == "vespo" and "weights" in case.tensors:
            case.tensors["weights"] = torch.where(case["mask"], case["weights"], 1.0)
        vespo = {name: draw.randint(4, 16) / 4 for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
        numbers: dict[str, Any] = {
            "vespo": vespo,
            "unbiased": level == "token" and draw.random() < 0.5,
            "top_entropy": draw.choice([1.0, draw.uniform(0.1, 0.9)]) if level == "token" else 1.0,
            "off_policy_mask": draw.choice([None, 10 ** draw.uniform(-5, -1)]),
            "delta": delta,
            "beta": draw.choice([0.0, draw.uniform(0.01, 1.0)]),
            "tau_positive": draw.randint(4, 16) / 8,
            "tau_negative": draw.randint(4, 16) / 8,
            "clip_low": low,
            "clip_high": 1 + high if loss_type == "cispo" else high,
        }
        case.options = numbers | {"loss_type": loss_type, "level": level, "width": WIDTH + number}
        options = LossOptions(
            clip_dual=delta,
            sapo_tau_positive=numbers["tau_positive"],
            sapo_tau_negative=numbers["tau_negative"],
            vespo_k_positive=vespo["k_pos"],
            vespo_lambda_positive=vespo["lambda_pos"],
            vespo_k_negative=vespo["k_neg"],
            vespo_lambda_negative=vespo["lambda_neg"],
        )
        low = 1.0 if loss_type == "cispo" else low
        aggregation = AGGREGATION[loss_type]
        ours.append(AlgorithmConfig(clip_low=low, clip_high=high, loss_options=options, aggregation=aggregation))
    return cases, ours


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_the_grpo_loss_and_its_gradient_are_trls(trl: Oracle, loss_type: str, level: str) -> None:
    name = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo"}.get(loss_type, "ppo" if level == "token" else "gspo")
    cases, configs = make_trl_cases(loss_type, level)
    for case, config, theirs in zip(cases, configs, trl.ask("policy_loss", cases), strict=True):
        logprobs, mask = case["logprobs"].clone().requires_grad_(), case["mask"]
        ones = torch.ones(ROWS, WIDTH, dtype=case.dtype)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal=case["proximal"],
            behaviour=case["proximal"],
            advantages=case["advantages"][:, None] * ones,
            weights=case.tensors.get("weights", ones),
            mask=mask,
            free=mask,
            options=config,
        )
        per_token = LOSSES[name].per_token(inputs)
        if (limit := case.options["off_policy_mask"]) is not None:
            per_token = torch.where(near_policy(inputs, limit), per_token, 0.0)
        if case.options["top_entropy"] < 1:
            per_token = torch.where(high_entropy(case["entropy"], mask, case.options["top_entropy"]), per_token, 0.0)
        if case.options["beta"]:
            kl = ESTIMATORS["k3"](logprobs, case["reference"]) * (inputs.ratio if case.options["unbiased"] else 1.0)
            per_token = per_token + case.options["beta"] * kl
        counts = count(mask, ones[:, 0], case.options["width"])
        loss = AGGREGATIONS[config.aggregation](per_token, mask, ones[:, 0], counts)
        loss.backward()
        assert logprobs.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(logprobs.grad, theirs["gradient"], case)


VOCABULARY = 9


def draw_distributions(generator: torch.Generator, number: int) -> Tensors:
    """Logits of a policy and a teacher, from equal to far apart."""
    shape = (ROWS, WIDTH, VOCABULARY)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0, 0] = True
    far = (0.0, 1e-3, 1.0, 6.0)[number % 4]
    teacher = logits + far * torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"logits": logits, "teacher": teacher, "mask": mask}


def assert_divergences(cases: Sequence[Case], configs: Sequence[TeacherConfig], told: Sequence[Tensors]) -> None:
    """Compare the mean divergence of the masked tokens, and its gradient by the logits, with TRL's."""
    for case, config, theirs in zip(cases, configs, told, strict=True):
        logits = case["logits"].clone().requires_grad_()
        tokens = divergence_of(config)(logits.log_softmax(-1), case["teacher"].log_softmax(-1))
        loss = tokens[case["mask"]].mean()
        loss.backward()
        assert logits.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(logits.grad, theirs["gradient"], case)


@pytest.mark.slow
def test_a_teachers_divergences_and_their_gradients_are_gkds(trl: Oracle) -> None:
    cases, configs = both_types(draw_distributions), []
    for number, case in enumerate(cases):
        beta = random.Random(number).choice([0.0, 0.1, 0.5, 0.8, 1.0])
        case.options = {"beta": beta}
        configs.append(
            TeacherConfig(divergence="forward")
            if beta == 0
            else TeacherConfig(divergence="reverse")
            if beta == 1
            else TeacherConfig(divergence="jsd", beta=beta)
        )
    assert_divergences(cases, configs, trl.ask("distillation", cases))


@pytest.mark.slow
def test_divergences_over_the_likeliest_tokens_and_their_gradients_are_sdpos(trl: Oracle) -> None:
    """TRL takes the tokens that the policy finds likeliest, ours are the teacher's: both models have one order.

    In float64 alone, since rounding of a mass near 1 changes the logarithm of the rest.
    """
    cases = [case for case in both_types(draw_distributions) if case.dtype == torch.float64]
    configs = list[TeacherConfig]()
    for number, case in enumerate(cases):
        draw = random.Random(number)
        beta, top_k = draw.choice([0.0, 0.3, 1.0]), draw.randrange(1, VOCABULARY)
        order = case["logits"].argsort(-1)
        ranked = {name: torch.zeros_like(case[name]) for name in ("logits", "teacher")}
        for name, values in ranked.items():
            values.scatter_(-1, order, case[name].sort(-1).values)
        case.tensors |= ranked
        case.options = {"beta": beta, "top_k": top_k}
        kind: Any = {0.0: "forward", 0.3: "jsd", 1.0: "reverse"}[beta]
        configs.append(TeacherConfig(divergence=kind, beta=0.3, top_k=top_k))
    assert_divergences(cases, configs, trl.ask("likeliest", cases))


def draw_pairs(generator: torch.Generator, number: int) -> Tensors:
    """Three pairs, the better rows first, from equal to far from the reference."""
    reference = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    far = (0.0, 0.01, 0.5, 5.0)[number % 4]
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.6
    mask[:, 0] = True
    noise = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {"logprobs": reference + far * noise, "reference": reference, "mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "robust", "hinge", "ipo"])
def test_the_losses_of_pairs_and_their_gradients_are_trls(trl: Oracle, loss: str) -> None:
    cases, configs = both_types(draw_pairs), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        beta, wrong = draw.uniform(0.05, 0.8), draw.uniform(0.01, 0.4) if loss == "robust" else 0.0
        case.options = {"loss": loss, "beta": beta, "label_smoothing": wrong}
        name: Any = "sigmoid" if loss == "robust" else loss
        configs.append(PreferenceConfig(beta=beta, loss=name, label_smoothing=wrong))
    order = torch.arange(ROWS).reshape(2, -1).T.flatten()
    for case, config, theirs in zip(cases, configs, trl.ask("preferences", cases), strict=True):
        logprobs, mask = case["logprobs"].clone().requires_grad_(), case["mask"]
        policy, reference = (torch.where(mask, x, 0.0).sum(-1)[order] for x in (logprobs, case["reference"]))
        ours = preference_losses(config, policy, reference, mask.sum(-1)[order]).losses.mean()
        ours.backward()
        assert logprobs.grad is not None
        assert_same(ours.detach(), theirs["loss"], case)
        assert_same(logprobs.grad, theirs["gradient"], case)


# One process for each project, which all tests ask.


def _oracle(project: str, factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(project, factory.mktemp(project))
    yield oracle
    oracle.close()


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Start the process that computes verl's formulas."""
    yield from _oracle("verl", tmp_path_factory)


@pytest.fixture(scope="session")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Start the process that computes TRL's formulas."""
    yield from _oracle("trl", tmp_path_factory)
