"""Corrections in words, as ``rl-async config explain algorithm.correction`` prints them below the key's own line."""

from rl_async.configs.schema.correction import PRESETS, Correction, band, limits

FORMULAS = """\
r = pi/mu of a sampled token, and R its product over the tokens of a sequence, where mu sampled the token.
  decoupled   pi is the policy when the step began, pi_old, by one more forward pass; the loss clips pi_theta/pi_old
  bypass      pi_old := mu, no such pass; the loss clips pi_theta/mu, and r = pi_theta/mu as training goes on
What a correction may do, each by algorithm.correction_options.KEY (null: as the preset has it):
  weight      none: w = 1; token: w = r; sequence: w = R for all its tokens. log r and log R are cut at +-20
  cap         truncated importance sampling (TIS): min(w, cap)
  band        IcePop: w becomes 0 outside low_high; the token still counts in the loss's mean
  normalise   w over its mean over the batch's sampled tokens, or rows for weight=sequence
  reject      masks what breaks a rule; {LEVEL_MEASURE: limit}, all must be met
              level    token, or a whole sequence by seq_sum, seq_mean, seq_max of the measure
              measure  k1: r itself, kept inside low_high (seq_sum: R; seq_mean: geometric mean; seq_max: every r);
                       k2: log(r)^2 / 2, k3: r - 1 - log r, kept up to the limit
  veto        masks a sequence with any r below it
  max_age     masks tokens more steps old than this
  age_weights w times the factor of the token's age in steps"""

_MEASURE = {"k1": "r", "k2": "k2", "k3": "k3"}


def describe(correction: Correction) -> str:
    """Describe a correction in one line, with its numbers."""
    parts = ["decoupled" if correction.proximal == "recompute" else "bypass"]
    if correction.loss is not None:
        parts.append(f"loss {correction.loss}")
    parts += [_weight(correction)] if correction.weight != "none" else []
    parts += ["over its mean"] if correction.normalise else []
    parts += [_rejection(rule, *limits(rule, limit)) for rule, limit in correction.reject.items()]
    parts += [f"masks sequences with any r < {correction.veto:g}"] if correction.veto is not None else []
    parts += [f"masks tokens over {correction.max_age} steps old"] if correction.max_age is not None else []
    if correction.age_weights:
        parts.append("times " + ", ".join(f"{factor:g}" for factor in correction.age_weights) + ", … by age")
    return "; ".join(parts if len(parts) > 1 else [*parts, "no weights, nothing masked"])


def explanation() -> str:
    """Explain the modes, formulas and all presets."""
    width = max(map(len, PRESETS))
    table = "\n".join(f"  {name:<{width}}  {describe(correction)}" for name, correction in PRESETS.items())
    return f"{FORMULAS}\nPresets:\n{table}"


def _weight(correction: Correction) -> str:
    ratio = "r" if correction.weight == "token" else "R"
    if correction.cap is not None:
        return f"w = min({ratio}, {correction.cap:g})"
    if correction.band is not None:
        low, high = band(correction.band)
        return f"w = {ratio}, 0 outside [{low:g}, {high:g}]"
    return f"w = {ratio}"


def _rejection(rule: str, low: float, high: float) -> str:
    level, _, measure = rule.rpartition("_")
    kept = f"in [{low:g}, {high:g}]" if measure == "k1" else f"up to {high:g}"
    if level == "token":
        return f"keeps tokens with {_MEASURE[measure]} {kept}"
    of = {"seq_sum": "sum", "seq_mean": "mean", "seq_max": "largest"}[level]
    what = f"{of} {_MEASURE[measure]}"
    if measure == "k1":
        what = {"seq_sum": "R", "seq_mean": "geometric mean of r", "seq_max": "every r"}[level]
    return f"keeps sequences with {what} {kept}"
