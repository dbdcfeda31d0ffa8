"""Section `algorithm`: advantage, loss, off-policy correction, regularisation and their numbers, and the critic.

Corrections are data: presets and their options; ``trainer/algorithms/correction.py`` computes them. Three policies
meet: the behaviour policy mu that sampled a token, the proximal policy pi_old that the trainer held when the step
began, and the policy pi_theta that is being trained. The ratio of a token is r = pi/mu, where pi is pi_old if it was
recomputed (decoupled), else pi_theta (bypass).

``LOSSES`` and ``ADVANTAGES`` have every policy loss and advantage estimator by name, with the traits that the rest of
the system has to know. The formulas themselves are in ``trainer/algorithms/losses.py`` and ``advantages.py``, in
tables with the same names; they need torch, and config checks must not. Checks, derived settings and the trainer read
the traits declared here and never compare names. A user's own function, given as ``path.py:name``, has no traits and is
not restricted by them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_async.configs.schema import Config, Count, Fraction, Positive, doc
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import ConfigError

Need = Literal["values", "sum_squares", "greedy", "parts", "reference", "process", "states"]
Weight = Literal["none", "token", "sequence"]
# A number, or a band such as "0.6_1.4".
Limit = str | float
Factors = tuple[Annotated[float, Meta(ge=0)], ...]

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
MEASURES = ("k1", "k2", "k3")
REJECTIONS = tuple(f"{level}_{measure}" for level in LEVELS for measure in MEASURES)

# The reasons that mask a token, or, with band, set its weight to 0; "" stands for none. The last four do not come from
# a preset: queue.on_straggler=mask and algorithm.shaping.overlong_filter, which act before any correction sees the
# token, the greedy episodes of algorithm.advantage=remax, and a correction of the user's that names no rule.
RULES = ("", "band", "max_age", "veto", *REJECTIONS, "max_staleness", "overlong_filter", "greedy", "correction")


@dataclass(frozen=True)
class Loss:
    """Traits of a policy loss.

    Attributes:
        uses_ratio: Whether it uses pi_theta / pi_old; pi_old is mu when old log-probabilities are bypassed.
        behaviour: "weighs" if it multiplies by pi_old/mu, "limits" if it bounds pi_old against mu.
        options: Fields of LossOptions that it reads.
        weighs_rows: Whether it multiplies the weights of a row's tokens, so that one of the row would count too often.
        ascending: Pairs of options; the first must be below the second.
    """

    uses_ratio: bool = True
    behaviour: Literal["unused", "weighs", "limits"] = "unused"
    options: tuple[str, ...] = ()
    weighs_rows: bool = False
    ascending: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Advantage:
    """Traits of an advantage estimator.

    Attributes:
        compares_group: Whether it compares the members of a group, so that a group must have at least two.
        needs: Its inputs besides rewards: a critic's ``values``, the ``sum_squares`` of pi_old over the vocabulary, one
            more ``greedy`` episode per group, the ``parts`` of the reward in place of the whole, log-probabilities
            by the ``reference`` model, or by the ``process`` reward model that is trained in the critic's place; the
            ``states`` that turns answer.
        row_is_episode: Whether it compares rows one by one, so that an episode must not become several.
        options: Fields of AdvantageOptions that it reads.
    """

    compares_group: bool = True
    needs: frozenset[Need] = frozenset()
    row_is_episode: bool = False
    options: tuple[str, ...] = ()

    @property
    def needs_contrast(self) -> bool:
        """Whether it learns nothing from a group whose rewards are all equal."""
        return self.compares_group or "greedy" in self.needs


LOSSES: dict[str, Loss] = {
    "ppo": Loss(options=("clip_dual",)),
    "decoupled_ppo": Loss(behaviour="weighs", options=("clip_dual", "decoupled_cap")),
    "reinforce": Loss(uses_ratio=False),
    "gpg": Loss(uses_ratio=False),
    "gspo": Loss(),
    "gmpo": Loss(),
    "sapo": Loss(options=("sapo_tau_positive", "sapo_tau_negative")),
    "cispo": Loss(),
    "dro": Loss(options=("dro_beta",)),
    "dppo_tv": Loss(options=("dppo_tv", "dppo_high", "dppo_cap")),
    "dppo_kl": Loss(options=("dppo_kl", "dppo_high", "dppo_cap")),
    "vespo": Loss(
        options=("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative"),
        weighs_rows=True,
    ),
    "sppo": Loss(options=("sppo_eta",)),
    "ipo": Loss(options=("ipo", "ipo_penalty")),
    "prime_rl": Loss(options=("dppo_tv", "dppo_high", "dppo_cap", "ipo_penalty")),
    "m2po": Loss(behaviour="limits", options=("m2po",)),
    "clip_cov": Loss(
        options=("clip_dual", "clip_cov_share", "clip_cov_low", "clip_cov_high"),
        ascending=(("clip_cov_low", "clip_cov_high"),),
    ),
    "kl_cov": Loss(options=("kl_cov_share", "kl_cov_coef")),
}

ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(),
    "dr_grpo": Advantage(),
    "max_rl": Advantage(),
    "grpo_passk": Advantage(row_is_episode=True, options=("passk_std",)),
    "gdpo": Advantage(needs=frozenset({"parts"}), options=("gdpo_weights",)),
    "rloo": Advantage(),
    "dpo": Advantage(needs=frozenset({"reference"}), row_is_episode=True, options=("dpo_beta",)),
    "opo": Advantage(),
    "gpg": Advantage(),
    "remax": Advantage(compares_group=False, needs=frozenset({"greedy"}), row_is_episode=True),
    "reinforce_plus_plus": Advantage(compares_group=False, options=("gamma",)),
    "reinforce_plus_plus_baseline": Advantage(),
    "gae": Advantage(
        compares_group=False,
        needs=frozenset({"values"}),
        options=("gamma", "lam", "lam_alpha", "whiten", "bootstrap_cut"),
    ),
    "prime": Advantage(
        needs=frozenset({"process", "reference"}),
        row_is_episode=True,
        options=("gamma", "whiten", "prime_beta", "prime_coef"),
    ),
    "gigpo": Advantage(needs=frozenset({"states"}), options=("gamma", "gigpo_weight", "gigpo_by", "gigpo_std")),
    "optimal_token_baseline": Advantage(needs=frozenset({"sum_squares"}), row_is_episode=True),
    "tir_optimal_token_baseline": Advantage(needs=frozenset({"sum_squares"}), row_is_episode=True),
}


# The inputs that a model of the section `critic` gives.
BY_CRITIC: frozenset[Need] = frozenset({"values", "process"})


def advantage_needs(name: str) -> frozenset[Need]:
    """The estimator's inputs besides rewards. A user's own gets none, since its needs are unknown."""
    return ADVANTAGES.get(name, Advantage()).needs


def loss_option(option: str, text: str) -> Meta:
    """Describe a field of LossOptions: the names of the losses that read it, and ``text``."""
    return _read_by(LOSSES, option, text)


def advantage_option(option: str, text: str) -> Meta:
    """Describe a field of AdvantageOptions: the names of the estimators that read it, and ``text``."""
    return _read_by(ADVANTAGES, option, text)


def _read_by(table: Mapping[str, Loss] | Mapping[str, Advantage], option: str, text: str) -> Meta:
    readers = ", ".join(name for name, traits in table.items() if option in traits.options)
    return Meta(description=f"{readers}: {text}")


class Correction(Config, frozen=True):
    """A complete correction. The defaults correct nothing."""

    proximal: Annotated[
        Literal["recompute", "behaviour"],
        doc("recompute: pi_old by a forward pass (decoupled); behaviour: pi_old := mu, no pass (bypass)."),
    ] = "recompute"
    loss: Annotated[
        Literal["reinforce", "prime_rl"] | None, doc("A loss that goes with it and takes algorithm.loss's place.")
    ] = None
    weight: Annotated[Weight, doc("Importance weight: r of the token, or the product of r over its sequence.")] = "none"
    cap: Annotated[
        Annotated[float, Meta(gt=0)] | None, doc("Truncated importance sampling: the weight is min(w, cap).")
    ] = None
    band: Annotated[str | None, doc("IcePop, as low_high: a weight outside becomes 0; not with cap.")] = None
    normalise: Annotated[
        bool,
        doc(
            "Divide weights by their mean over the batch: over all sampled tokens, rejected ones too, or over rows for "
            "weights of sequences; not with bypass."
        ),
    ] = False
    reject: Annotated[
        dict[str, Limit],
        doc(
            "Rejection rules, all must be met: {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}: limit. k1 keeps the ratio "
            "(the product, geometric mean or every r of a sequence) inside low_high (one number c: [1/c, c]); "
            "k2 = log(r)^2/2 and k3 = r - 1 - log r up to a number."
        ),
    ] = msgspec.field(default_factory=dict)
    veto: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None, doc("A sequence with any token whose r is below this is rejected.")
    ] = None
    max_age: Annotated[Count | None, doc("Tokens sampled by weights older than this many steps are masked.")] = None
    age_weights: Annotated[
        Factors, doc("Factor of tokens 0, 1, 2, … steps old; the last holds for all older ones.")
    ] = ()


class CorrectionOptions(Config, frozen=True):
    """Changes to the preset; null leaves a value as the preset has it."""

    weight: Annotated[Weight | None, doc("none, token or sequence.")] = None
    cap: Annotated[Annotated[float, Meta(gt=0)] | None, doc("Largest weight (TIS); takes the place of a band.")] = None
    band: Annotated[str | None, doc("Weights outside low_high become 0 (IcePop); takes the place of a cap.")] = None
    normalise: Annotated[bool | None, doc("Divide weights by their mean over the batch.")] = None
    reject: Annotated[
        dict[str, Limit] | None, doc("Rejection rules in place of the preset's, e.g. {seq_mean_k1: 0.99_1.01}.")
    ] = None
    veto: Annotated[Annotated[float, Meta(gt=0, lt=1)] | None, doc("Smallest r of a sequence that is kept.")] = None
    max_age: Annotated[Count | None, doc("Oldest tokens that train, in steps.")] = None
    age_weights: Annotated[Factors | None, doc("Factor of tokens by age in steps.")] = None


_GEO: dict[str, Limit] = {"seq_mean_k1": "0.999_1.001"}
_K3: dict[str, Limit] = {"seq_mean_k3": 0.01}
_SEQ: dict[str, Limit] = {"seq_sum_k1": "0.5_2.0"}

# Names and numbers as the class methods of verl's RolloutCorrectionConfig have them (verl/trainer/config/algorithm.py,
# commit 0482624a). One difference: verl tests -log r against the logarithms of a k1 band, so that it keeps
# [1/high, 1/low]; here a band keeps r in [low, high]. For verl's own numbers the two agree to about 1e-6.
_VERL = {
    "disabled": Correction(),
    "decoupled_token_is": Correction(weight="token", cap=2.0),
    "decoupled_seq_is": Correction(weight="sequence", cap=2.0),
    "decoupled_token_icepop": Correction(weight="token", band="0.5_5.0"),
    "decoupled_seq_is_rs": Correction(weight="sequence", cap=2.0, reject=_SEQ),
    "decoupled_geo_rs": Correction(reject=_GEO),
    "decoupled_geo_rs_seq_tis": Correction(weight="sequence", cap=2.0, reject=_GEO),
    "decoupled_geo_rs_token_tis": Correction(weight="token", cap=2.0, reject=_GEO),
    "decoupled_k3_rs": Correction(reject=_K3),
    "decoupled_k3_rs_seq_tis": Correction(weight="sequence", cap=2.0, reject=_K3),
    "decoupled_k3_rs_token_tis": Correction(weight="token", cap=2.0, reject=_K3),
    "bypass_ppo_clip": Correction(proximal="behaviour"),
    "bypass_ppo_clip_geo_rs": Correction(proximal="behaviour", reject=_GEO),
    "bypass_ppo_clip_k3_rs": Correction(proximal="behaviour", reject=_K3),
    "bypass_pg_is": Correction(proximal="behaviour", loss="reinforce", weight="sequence", cap=2.0),
    "bypass_pg_token_icepop": Correction(proximal="behaviour", loss="reinforce", weight="token", band="0.5_5.0"),
    "bypass_pg_geo_rs": Correction(proximal="behaviour", loss="reinforce", reject=_GEO),
    "bypass_pg_geo_rs_seq_tis": Correction(
        proximal="behaviour", loss="reinforce", weight="sequence", cap=2.0, reject=_GEO
    ),
    "bypass_pg_geo_rs_token_tis": Correction(
        proximal="behaviour", loss="reinforce", weight="token", cap=2.0, reject=_GEO
    ),
}

# What other projects do, as far as their sources say; docs/reference/algorithms.md tells what was read and left out.
_OTHERS = {
    # AReaL: decoupled loss with RejectionSamplingConfig(): level token, action mask, metric ratio, upper 5.0, no lower.
    # Its masked tokens still count in the mean, which makes its mask a band.
    "areal": Correction(weight="token", band="0_5"),
    # prime-rl: no correction but a loss, DPPO with the total-variation mask against mu and a penalty on log(r)^2.
    "prime_rl": Correction(proximal="behaviour", loss="prime_rl"),
    # SkyRL: off_policy_correction is off by default (tis_ratio_type null, no masks).
    "skyrl": Correction(),
    # slime: --use-tis, vanilla_tis_function: clamp(pi_old/mu, tis_clip_low=0, tis_clip=2).
    "slime_tis": Correction(weight="token", cap=2.0),
}

PRESETS: dict[str, Correction] = _VERL | _OTHERS


def resolve(preset: str, options: CorrectionOptions) -> Correction:
    """The preset with the options that are not null.

    Raises ConfigError naming the key if the name is unknown or the values do not go together.
    """
    if preset not in PRESETS:
        raise ConfigError(f"algorithm.correction: no preset {preset!r}; known: {', '.join(PRESETS)}")
    given = {name: value for name in options.__struct_fields__ if (value := getattr(options, name)) is not None}
    # Without weights, the preset's settings for them do not apply.
    if given.get("weight") == "none":
        given = {"cap": None, "band": None, "normalise": False} | given
    if "band" in given:
        given.setdefault("cap", None)
    elif "cap" in given:
        given["band"] = None
    correction = msgspec.structs.replace(PRESETS[preset], **given)
    _check(correction)
    return correction


def _check(correction: Correction) -> None:
    where = "algorithm.correction_options"
    if correction.cap is not None and correction.band is not None:
        raise ConfigError(f"{where}: cap and band exclude each other; a cap truncates, a band zeroes")
    if correction.weight == "none":
        for name in ("cap", "band", "normalise"):
            if getattr(correction, name):
                raise ConfigError(f"{where}.{name} changes weights; set {where}.weight to token or sequence")
    if correction.band is not None:
        band(correction.band, f"{where}.band")
    for name, limit in correction.reject.items():
        limits(name, limit)


def band(text: str, where: str = "a band") -> tuple[float, float]:
    """``low_high`` as two numbers, 0 <= low < high: ``0.6_1.4`` keeps 0.6 to 1.4. Raises ConfigError otherwise."""
    low, underscore, high = text.partition("_")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = (1.0, 0.0)
    if not underscore or not 0 <= bounds[0] < bounds[1] < math.inf:
        raise ConfigError(f"{where}: {text!r} is not a band; write low_high with 0 <= low < high, such as 0.6_1.4")
    return bounds


def limits(rule: str, limit: Limit) -> tuple[float, float]:
    """The smallest and largest value that a rejection rule keeps: of a ratio for k1, of the measure for k2 and k3.

    k2 and k3 have no smallest: they are never below 0, but for the rounding of tokens that are almost on-policy.
    Raises ConfigError naming the rule.
    """
    where = f"algorithm.correction_options.reject.{rule}"
    if rule not in REJECTIONS:
        raise ConfigError(f"{where}: unknown rule; known: {', '.join(REJECTIONS)}")
    ratio = rule.endswith("k1")
    if ratio and isinstance(limit, str) and "_" in limit:
        return band(limit, where)
    try:
        number = float(limit)
    except ValueError:
        number = math.nan
    if ratio:
        if not 1 < number < math.inf:
            raise ConfigError(f"{where}: {limit!r} must be low_high, or a number c > 1 for [1/c, c]")
        return 1 / number, number
    if not 0 < number < math.inf:
        raise ConfigError(f"{where}: {limit!r} must be a number > 0, the largest value that is kept")
    return -math.inf, number


def rules(correction: Correction) -> tuple[str, ...]:
    """The rules that this correction may apply to a token; they are tried in this order."""
    return (
        *(("max_age",) if correction.max_age is not None else ()),
        *(("veto",) if correction.veto is not None else ()),
        *correction.reject,
        *(("band",) if correction.band is not None else ()),
    )


# A larger relative error changes the adaptive KL coefficient no more than this one.
ADAPTIVE_LIMIT = 0.2

AboveZero = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


class AdvantageOptions(Config, frozen=True):
    """Numbers of the advantage estimators, each read by those that declare it above."""

    gamma: Annotated[Fraction, advantage_option("gamma", "discount per token; with gigpo per turn.")] = 1.0
    lam: Annotated[Fraction, advantage_option("lam", "lambda.")] = 1.0
    lam_alpha: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        advantage_option("lam_alpha", "lambda is 1 - 1 / (lam_alpha l) of a row of l sampled tokens; null: lam."),
    ] = None
    whiten: Annotated[bool, advantage_option("whiten", "mean 0 and variance 1 over the batch's sampled tokens.")] = True
    bootstrap_cut: Annotated[
        bool,
        advantage_option(
            "bootstrap_cut", "rows that a limit on tokens or turns cut go on: the critic's last value follows, not 0."
        ),
    ] = False
    passk_std: Annotated[bool, advantage_option("passk_std", "divide by the group's standard deviation.")] = True
    dpo_beta: Annotated[
        Annotated[float, Meta(gt=0)], advantage_option("dpo_beta", "how strongly the policy is tied to the reference.")
    ] = 0.1
    prime_beta: Annotated[
        AboveZero,
        advantage_option("prime_beta", "a token's reward per log-ratio of process reward model and reference."),
    ] = 0.05
    prime_coef: Annotated[
        NotNegative, advantage_option("prime_coef", "weight of tokens' rewards beside the outcome's.")
    ] = 1.0
    gigpo_weight: Annotated[NotNegative, advantage_option("gigpo_weight", "of turns beside that of episodes.")] = 1.0
    gigpo_by: Annotated[
        Literal["state", "turn"],
        advantage_option(
            "gigpo_by", "state: turns that answer equal messages are compared; turn: those of one number."
        ),
    ] = "state"
    gigpo_std: Annotated[bool, advantage_option("gigpo_std", "divide by standard deviations.")] = True
    gdpo_weights: Annotated[
        dict[str, float],
        advantage_option("gdpo_weights", "factor per part of the reward; its weight in reward.functions if not named."),
    ] = msgspec.field(default_factory=dict)


class LossOptions(Config, frozen=True):
    """Numbers of the losses, each read by those that declare it above."""

    clip_dual: Annotated[
        Annotated[float, Meta(gt=1)] | None, loss_option("clip_dual", "dual clip, the bound c of -c A for A < 0.")
    ] = None
    decoupled_cap: Annotated[AboveZero, loss_option("decoupled_cap", "tokens with a larger pi_old/mu count 0.")] = 5.0
    sapo_tau_positive: Annotated[AboveZero, loss_option("sapo_tau_positive", "steepness where A > 0.")] = 1.0
    sapo_tau_negative: Annotated[AboveZero, loss_option("sapo_tau_negative", "steepness where A <= 0.")] = 1.05
    dro_beta: Annotated[AboveZero, loss_option("dro_beta", "weight of the quadratic penalty.")] = 0.1
    dppo_tv: Annotated[AboveZero, loss_option("dppo_tv", "largest total variation on a token.")] = 0.2
    dppo_kl: Annotated[AboveZero, loss_option("dppo_kl", "largest KL on a token.")] = 0.05
    dppo_high: Annotated[
        AboveZero | None, loss_option("dppo_high", "limit where A > 0, in place of dppo_tv or dppo_kl; null: no other.")
    ] = None
    dppo_cap: Annotated[
        AboveZero | None, loss_option("dppo_cap", "largest ratio in the gradient, verl's clip_ratio_c; null: none.")
    ] = None
    vespo_k_positive: Annotated[NotNegative, loss_option("vespo_k_positive", "exponent k where A >= 0.")] = 2.0
    vespo_lambda_positive: Annotated[AboveZero, loss_option("vespo_lambda_positive", "decay lambda where A >= 0.")] = (
        3.0
    )
    vespo_k_negative: Annotated[NotNegative, loss_option("vespo_k_negative", "exponent k where A < 0.")] = 3.0
    vespo_lambda_negative: Annotated[AboveZero, loss_option("vespo_lambda_negative", "decay lambda where A < 0.")] = 2.0
    sppo_eta: Annotated[AboveZero, loss_option("sppo_eta", "step towards the advantage, eta.")] = 1.0
    ipo: Annotated[AboveZero, loss_option("ipo", "largest change of a token's probability.")] = 0.1
    ipo_penalty: Annotated[NotNegative, loss_option("ipo_penalty", "weight of (log r)^2, on every token.")] = 1e-3
    m2po: Annotated[AboveZero, loss_option("m2po", "budget for the mean of (log pi_old/mu)^2.")] = 0.04
    clip_cov_share: Annotated[Fraction, loss_option("clip_cov_share", "share of tokens held back.")] = 2e-4
    clip_cov_low: Annotated[float, loss_option("clip_cov_low", "covariance above which a token may be held back.")] = (
        1.0
    )
    clip_cov_high: Annotated[float, loss_option("clip_cov_high", "and below which.")] = 5.0
    kl_cov_share: Annotated[Fraction, loss_option("kl_cov_share", "share of tokens with a penalty.")] = 2e-4
    kl_cov_coef: Annotated[NotNegative, loss_option("kl_cov_coef", "weight of |log r| on them.")] = 1.0


class AdaptiveKl(Config, frozen=True):
    """Changes the coefficient of the KL after each step, towards a target."""

    target: Annotated[float, Meta(gt=0, description="Wanted KL per token.")] = 0.01
    horizon: Annotated[Positive, doc("Time constant, in trajectories.")] = 10_000


class KlConfig(Config, frozen=True):
    """Distance to a reference model."""

    coef: Annotated[
        float, Meta(ge=0, description="Weight of the KL; 0: no KL, and a reference model only for advantage=dpo.")
    ] = 0.0
    estimator: Annotated[
        Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "full"],
        doc("Estimator of KL(pi || reference) per token; full needs both logits; + : k2's gradient."),
    ] = "k3"
    unbiased: Annotated[
        bool, doc("k1 and k3 in the loss: multiplied by pi/pi_old, so that their gradient is that of the divergence.")
    ] = False
    place: Annotated[Literal["loss", "reward"], doc("Added to the loss, or taken from each token's reward.")] = "loss"
    adaptive: Annotated[AdaptiveKl | None, doc("The coefficient follows a target; null: it stays.")] = None
    reference_path: Annotated[str | None, doc("Reference model; null: model.path.")] = None


class TeacherModelConfig(Config, frozen=True):
    """A model that teaches: one that is loaded beside the policy, or one that a server has."""

    path: Annotated[str | None, doc("Model that is loaded beside the policy, with the policy's tokenizer.")] = None
    endpoint: Annotated[
        EndpointConfig | None, doc("In place of path, a model that a vLLM server has, with the policy's tokenizer.")
    ] = None


class TeacherConfig(TeacherModelConfig, frozen=True):
    """On-policy distillation: a second model scores the tokens of the policy's own answers."""

    by_source: Annotated[
        dict[str, TeacherModelConfig],
        doc(
            "Teachers by the tasks' data_source, e.g. {math: {path: models/math}}; path and endpoint are then those "
            "of other tasks."
        ),
    ] = msgspec.field(default_factory=dict)
    hint: Annotated[
        str | None,
        doc(
            "System message that only the teacher reads, in front of the row; {ground_truth} and {feedback}, the "
            "reasons that the reward gave, are filled in. Without path and endpoint the policy itself is the teacher."
        ),
    ] = None
    divergence: Annotated[
        Literal["sampled", "reverse", "forward", "jsd"],
        doc(
            "sampled: log pi_old - log teacher of each sampled token is taken from its advantage. The others compare "
            "whole distributions in the loss: reverse: KL(pi || teacher); forward: KL(teacher || pi); jsd: "
            "beta KL(teacher || m) + (1 - beta) KL(pi || m) with m = beta teacher + (1 - beta) pi."
        ),
    ] = "sampled"
    beta: Annotated[float, Meta(gt=0, lt=1, description="jsd: the teacher's weight.")] = 0.5
    top_k: Annotated[
        Positive | None,
        doc("reverse, forward, jsd: compares the teacher's likeliest tokens, and all others as one; null: each token."),
    ] = None
    coef: Annotated[float, Meta(gt=0, description="Weight of the divergence.")] = 1.0
    rewards: Annotated[bool, doc("Whether the task's rewards teach, too.")] = False

    @property
    def whole(self) -> bool:
        """Whether the divergence compares distributions rather than sampled tokens."""
        return self.divergence != "sampled"

    @property
    def models(self) -> dict[str, tuple[str, TeacherModelConfig]]:
        """The teachers by data source, each with its config key; that of all other sources has the name ""."""
        found = {name: (f"algorithm.teacher.by_source.{name}", model) for name, model in self.by_source.items()}
        if self.path is not None or self.endpoint is not None or self.hint is not None:
            found[""] = ("algorithm.teacher", self)
        return found

    @property
    def paths(self) -> dict[str, str]:
        """The folders of the teachers that are loaded beside the policy, by config key."""
        return {f"{key}.path": model.path for key, model in self.models.values() if model.path is not None}

    @property
    def endpoints(self) -> dict[str, EndpointConfig]:
        """The servers that have teachers, by config key."""
        found = {f"{key}.endpoint": model.endpoint for key, model in self.models.values()}
        return {key: endpoint for key, endpoint in found.items() if endpoint is not None}


class OverlongConfig(Config, frozen=True):
    """A penalty for long answers (DAPO), taken from the reward."""

    max_tokens: Annotated[Positive, doc("Sampled tokens of an episode from which on the penalty is whole.")]
    cache_tokens: Annotated[Positive, doc("The penalty grows linearly over this many tokens before max_tokens.")] = 64
    factor: Annotated[float, Meta(gt=0, description="The whole penalty.")] = 1.0


class LengthConfig(Config, frozen=True):
    """A reward that depends on how long an answer is, in sampled tokens of its episode."""

    kind: Annotated[
        Literal["l1", "cosine"],
        doc(
            "l1: coef for each token of difference to `tokens` is taken from the reward. cosine: the reward goes "
            "along a cosine from no tokens to `tokens`, by whether the answer is good."
        ),
    ]
    tokens: Annotated[Positive, doc("l1: the wanted length; cosine: the length at which the curves end.")]
    coef: Annotated[float, Meta(gt=0, description="l1: weight of a token.")] = 3e-4
    good: Annotated[tuple[float, float], doc("cosine: reward of a good answer of no tokens, and of `tokens`.")] = (
        2.0,
        1.0,
    )
    bad: Annotated[tuple[float, float], doc("cosine: the same of any other answer.")] = (-10.0, 0.0)
    beyond: Annotated[float, doc("cosine: reward of an answer of `tokens` or more.")] = -10.0
    above: Annotated[float, doc("cosine: an answer is good if its reward, as scored, is above this.")] = 0.0


# Groups without signal that a batch gives up by default, on average, so that a task that nobody solves ends.
MAX_REFILLS = 64


class ImitationConfig(Config, frozen=True):
    """A language-model loss on the policy's own good answers, beside the policy's loss (VAPO)."""

    coef: Annotated[float, Meta(gt=0, description="Weight of the mean of -log pi over the tokens of good answers.")] = (
        0.1
    )
    above: Annotated[float, doc("An answer is good if its reward, as scored, is above this.")] = 0.0


class ObservationsConfig(Config, frozen=True):
    """A language-model loss on what tools and environments answered, beside the policy's loss (ECHO)."""

    coef: Annotated[float, Meta(gt=0, description="Weight of the mean of -log pi over the tokens of observations.")]


class ShapingConfig(Config, frozen=True):
    """What happens to rewards and groups before advantages are computed."""

    dynamic_sampling: Annotated[
        bool | Positive,
        doc(
            "Groups whose scored rewards are all equal are given up, and other tasks take their places (DAPO). A "
            "number bounds the groups given up per batch, on average; true: 64. After that, groups without signal are "
            "accepted. Every batch adds that many to an allowance of at most max_staleness + 1 times as many."
        ),
    ] = False
    overlong: Annotated[OverlongConfig | None, doc("The penalty for long answers; null: none.")] = None
    length: Annotated[LengthConfig | None, doc("A reward for length; null: none.")] = None
    overlong_filter: Annotated[
        bool, doc("Trajectories that were cut off (length, timeout) count in their group and do not train themselves.")
    ] = False
    reward_scale: Annotated[
        Literal["none", "batch_std"], doc("batch_std: divide by the standard deviation of the batch's scored outcomes.")
    ] = "none"
    reward_clip: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("Outcome rewards are clipped to [-reward_clip, reward_clip], last of all."),
    ] = None
    resample: Annotated[
        Literal["none", "pow", "max_min", "max_random"],
        doc(
            "PF-PPO: the batch's rows are drawn again with replacement. pow: by the squared reward; max_min: only "
            "the best and worst; max_random: the best four times as often as others."
        ),
    ] = "none"

    @property
    def max_refills(self) -> int:
        """The groups that a batch may give up, on average; 0 without dynamic sampling."""
        return MAX_REFILLS if self.dynamic_sampling is True else int(self.dynamic_sampling)


class GuardConfig(Config, frozen=True):
    """Watches how far the data is from the policy."""

    action: Annotated[
        Literal["off", "warn", "stop", "adapt"],
        doc(
            "When out of band: warn logs it, stop ends the run, adapt halves the staleness that the queue admits for, "
            "and gives it back step by step once back in band."
        ),
    ] = "warn"
    min_ess: Annotated[Fraction, doc("Smallest correction/ess, the tokens' effective share.")] = 0.3
    max_kl: Annotated[float, Meta(gt=0, description="Largest correction/k3: estimate of KL(mu || pi) per token.")] = 0.3


class AlgorithmConfig(Config, frozen=True):
    """The whole objective, by the names of its parts."""

    advantage: Annotated[str, doc(f"Advantage estimator: {', '.join(ADVANTAGES)}, or your own as path.py:name.")] = (
        "grpo"
    )
    loss: Annotated[str, doc(f"Policy loss: {', '.join(LOSSES)}, or your own as path.py:name.")] = "ppo"
    correction: Annotated[str, doc("Off-policy correction: a preset; correction_options changes its values.")] = (
        "decoupled_token_is"
    )
    correction_options: Annotated[CorrectionOptions, doc("Changes to the correction's preset.")] = CorrectionOptions()
    aggregation: Annotated[Aggregation, doc("How token losses become one number, over the global mini-batch.")] = (
        "token-mean"
    )
    norm_length: Annotated[
        Positive | None, doc("seq-mean-token-sum-norm: the length that divides; null: rollout.max_model_len.")
    ] = None
    top_entropy: Annotated[
        float,
        Meta(gt=0, le=1, description="Share of a mini-batch's tokens, those of highest entropy, that the loss trains."),
    ] = 1.0
    off_policy_mask: Annotated[
        AboveZero | None,
        doc("Tokens with A < 0 are left out of the loss if the mean log mu/pi of their row is above this (OPSM)."),
    ] = None
    clip_low: Annotated[float, Meta(gt=0, le=1, description="Ratio is clipped below 1 - clip_low.")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="Ratio is clipped above 1 + clip_high.")] = 0.28
    entropy_coef: Annotated[float, Meta(ge=0, description="Weight of the entropy bonus.")] = 0.0
    advantage_options: Annotated[AdvantageOptions, doc("Options of the advantage estimator; others are refused.")] = (
        AdvantageOptions()
    )
    loss_options: Annotated[LossOptions, doc("Options of the loss; those of other losses are refused.")] = LossOptions()
    kl: KlConfig = KlConfig()
    teacher: Annotated[TeacherConfig | None, doc("A model that teaches the policy; null: none.")] = None
    imitation: Annotated[ImitationConfig | None, doc("Imitation of good answers; null: none.")] = None
    observations: Annotated[ObservationsConfig | None, doc("Imitation of observations; null: none.")] = None
    shaping: ShapingConfig = ShapingConfig()
    guard: GuardConfig = GuardConfig()

    @property
    def uses_rewards(self) -> bool:
        """Whether the loss depends on the task's rewards."""
        return self.teacher is None or self.teacher.rewards

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model scores the rows."""
        return self.kl.coef > 0 or "reference" in advantage_needs(self.advantage)

    @property
    def keeps_distributions(self) -> bool:
        """Whether training passes keep the log-probabilities of the whole vocabulary."""
        by_teacher = self.teacher is not None and self.teacher.whole
        return by_teacher or (self.kl.coef > 0 and self.kl.estimator == "full")


def read_options(advantage: str, loss: str, correction: str) -> dict[str, frozenset[str]]:
    """Return the names in ``advantage_options`` and ``loss_options`` that the chosen formulas declare.

    A user's own formula declares none and may read all. So may an unknown name, about which a rule complains.
    """
    preset = PRESETS.get(correction)
    loss = (preset.loss if preset else None) or loss
    every_advantage, every_loss = AdvantageOptions.__struct_fields__, LossOptions.__struct_fields__
    return {
        "advantage_options": frozenset(ADVANTAGES.get(advantage, Advantage(options=every_advantage)).options),
        "loss_options": frozenset(LOSSES.get(loss, Loss(options=every_loss)).options),
    }


class CriticConfig(Config, frozen=True):
    """The critic: a model of the expected return, for advantages that need one.

    What is not here (AdamW's betas and weight decay, mini-batches) is taken from the trainer's section.
    """

    path: Annotated[
        str | None, doc("Model that the critic starts from, or the `critic` folder of a checkpoint; null: model.path.")
    ] = None
    shared: Annotated[
        bool, doc("A value head on the policy's own backbone, trained with it by one loss, instead of a second model.")
    ] = False
    value_coef: Annotated[float, Meta(gt=0, description="shared: weight of the value loss beside the policy's.")] = 0.5
    clip: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc("Values that moved further than this within a step get no gradient; in units of reward; null: off."),
    ] = 0.5
    lam: Annotated[
        Fraction | None, doc("lambda of the critic's targets; null: that of algorithm.advantage_options.")
    ] = None
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW; shared: the trainer's.")] = (
        1e-5
    )
    schedule: Annotated[Literal["constant", "linear", "cosine"], doc("As trainer.schedule; shared: the trainer's.")] = (
        "constant"
    )
    lr_warmup_steps: Annotated[Count, doc("Optimizer steps of linear warm-up; shared: the trainer's.")] = 0
    grad_clip: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this; shared: the trainer's.")] = (
        1.0
    )
    warmup_steps: Annotated[Count, doc("Trainer steps, from the run's first, in which only the critic trains.")] = 0
