"""Off-policy correction as data: what a preset or the user asks for. ``trainer/correction.py`` carries it out.

Three policies meet: the behaviour policy mu that sampled a token, the proximal policy pi_old that the trainer held when
the step began, and the policy pi_theta that is being trained. The ratio of a token is r = pi/mu, where pi is pi_old if
it was recomputed (decoupled), else pi_theta (bypass).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rl_async.configs.base import Config, Count, doc
from rl_async.errors import ConfigError

Weight = Literal["none", "token", "sequence"]
Limit = str | float  # "0.6_1.4" or a number

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
MEASURES = ("k1", "k2", "k3")


class Correction(Config, frozen=True):
    """One way to correct. The defaults correct nothing."""

    proximal: Annotated[
        Literal["recompute", "behaviour"],
        doc("recompute: pi_old by a forward pass (decoupled); behaviour: pi_old := mu, no pass (bypass)."),
    ] = "recompute"
    loss: Annotated[Literal["reinforce"] | None, doc("A loss that goes with it and takes algorithm.loss's place.")] = (
        None
    )
    weight: Annotated[Weight, doc("Importance weight: r of the token, or the product of r over its sequence.")] = "none"
    cap: Annotated[
        Annotated[float, Meta(gt=0)] | None, doc("Truncated importance sampling: the weight is min(w, cap).")
    ] = None
    band: Annotated[str | None, doc("IcePop, as low_high: a weight outside becomes 0; not with cap.")] = None
    normalise: Annotated[bool, doc("Divide weights by their mean over the batch, after truncation.")] = False
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
        tuple[float, ...], doc("Factor of tokens 0, 1, 2, … steps old; the last holds for all older ones.")
    ] = ()


class CorrectionOptions(Config, frozen=True):
    """Changes to the preset; null leaves a value as the preset has it."""

    weight: Annotated[Weight | None, doc("none, token or sequence.")] = None
    cap: Annotated[Annotated[float, Meta(gt=0)] | None, doc("Largest weight (TIS).")] = None
    band: Annotated[str | None, doc("Weights outside low_high become 0 (IcePop); takes the place of a cap.")] = None
    normalise: Annotated[bool | None, doc("Divide weights by their mean over the batch.")] = None
    reject: Annotated[dict[str, Limit] | None, doc("Rejection rules, e.g. {seq_mean_k1: 0.99_1.01}.")] = None
    veto: Annotated[Annotated[float, Meta(gt=0, lt=1)] | None, doc("Smallest r of a sequence that is kept.")] = None
    max_age: Annotated[Count | None, doc("Oldest tokens that train, in steps.")] = None
    age_weights: Annotated[tuple[float, ...] | None, doc("Factor of tokens by age in steps.")] = None


PRESETS: dict[str, Correction] = {
    "disabled": Correction(),
    "decoupled_token_is": Correction(weight="token", cap=2.0),
    "bypass_ppo_clip": Correction(proximal="behaviour"),
}


def resolve(preset: str, options: CorrectionOptions) -> Correction:
    """The preset with the options that are not null. Raises ConfigError if the name is unknown."""
    if preset not in PRESETS:
        raise ConfigError(f"algorithm.correction: no preset {preset!r}; known: {', '.join(PRESETS)}")
    given = {name: value for name in options.__struct_fields__ if (value := getattr(options, name)) is not None}
    if "band" in given:
        given.setdefault("cap", None)
    elif "cap" in given:
        given["band"] = None
    return msgspec.structs.replace(PRESETS[preset], **given)


def band(text: str) -> tuple[float, float]:
    """``low_high`` as two numbers, 0 <= low < high: ``0.6_1.4`` keeps 0.6 to 1.4. Raises ConfigError otherwise."""
    low, underscore, high = text.partition("_")
    try:
        limits = float(low), float(high)
    except ValueError:
        limits = (1.0, 0.0)
    if not underscore or not 0 <= limits[0] < limits[1]:
        raise ConfigError(f"{text!r} is not a band; write low_high with 0 <= low < high, such as 0.6_1.4")
    return limits
