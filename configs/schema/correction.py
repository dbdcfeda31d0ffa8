"""Off-policy correction as data: presets and their options; ``trainer/algorithms/correction.py`` computes it.

Three policies meet: the behaviour policy mu that sampled a token, the proximal policy pi_old that the trainer held when
the step began, and the policy pi_theta that is being trained. The ratio of a token is r = pi/mu, where pi is pi_old if
it was recomputed (decoupled), else pi_theta (bypass).
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_async.configs.base import Config, Count, doc
from rl_async.errors import ConfigError

Weight = Literal["none", "token", "sequence"]
Limit = str | float  # "0.6_1.4" or a number
Factors = tuple[Annotated[float, Meta(ge=0)], ...]

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
MEASURES = ("k1", "k2", "k3")
REJECTIONS = tuple(f"{level}_{measure}" for level in LEVELS for measure in MEASURES)

# What can mask a token, or, with band, set its weight to 0; "" is nothing. The last four are no rules of a preset:
# queue.on_straggler=mask and algorithm.shaping.overlong_filter, which act before any correction sees the token, the
# greedy episodes of algorithm.advantage=remax, and a correction of the user's that names no rule.
RULES = ("", "band", "max_age", "veto", *REJECTIONS, "max_staleness", "overlong_filter", "greedy", "correction")


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
        Annotated[float, Meta(gt=0, lt=1)] | None,
        doc("A sequence with any token whose r is below this is rejected."),
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
    if given.get("weight") == "none":  # what a preset did with its weights goes with them
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
    """The rules that this correction may apply to a token, in the order in which they are tried."""
    return (
        *(("max_age",) if correction.max_age is not None else ()),
        *(("veto",) if correction.veto is not None else ()),
        *correction.reject,
        *(("band",) if correction.band is not None else ()),
    )
