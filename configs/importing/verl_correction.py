"""verl's `algorithm.rollout_correction` as one of our presets, or as a preset and its changes."""

from typing import Any

import msgspec

from rl_async.configs.importing.translation import Translation
from rl_async.configs.schema.correction import PRESETS, CorrectionOptions, resolve
from rl_async.errors import ConfigError

SECTION = "algorithm.rollout_correction"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
SAME = 1e-5  # of a k1 band and its inverse, below which the two are taken for equal


def put(t: Translation) -> None:
    """Choose the preset that corrects as verl does; say what cannot be had."""
    weight, threshold = t.take(f"{SECTION}.rollout_is"), t.take(f"{SECTION}.rollout_is_threshold", 2.0)
    if weight not in (None, "token", "sequence"):
        raise ConfigError(f"{SECTION}.rollout_is: {weight!r}; verl knows token and sequence")
    rules, limits = t.take(f"{SECTION}.rollout_rs"), t.take(f"{SECTION}.rollout_rs_threshold")
    normalises, loss = t.take(f"{SECTION}.rollout_is_batch_normalize"), t.take(f"{SECTION}.loss_type", "ppo_clip")
    bypass = t.take(f"{SECTION}.bypass_mode", False) or t.take(LOSS_MODE) == "bypass_mode"
    base = ("bypass_ppo_clip" if loss == "ppo_clip" else "bypass_pg_is") if bypass else "disabled"
    if bypass and loss == "ppo_clip" and weight:
        t.notes.append("bypass with ppo_clip: verl computes weights and does not use them; they are left out")
        weight = None
    options: dict[str, Any] = {"weight": weight or "none"}
    if weight:
        options |= {"band": threshold} if "_" in str(threshold) else {"cap": _number(threshold)}
        if normalises and bypass:
            t.notes.append(f"{SECTION}.rollout_is_batch_normalize with bypass_mode has no counterpart")
        elif normalises:
            options["normalise"] = True
    if rules:
        options["reject"] = _rejections(t, str(rules), limits)
    wanted = resolve(base, msgspec.convert(options, CorrectionOptions))
    preset = next((name for name, known in PRESETS.items() if known == wanted), None)
    given = [key for key in t.given if key.startswith(f"{SECTION}.")] or [f"{SECTION}.rollout_is"]
    t.put("algorithm.correction", preset or base, *given)
    if preset is None:
        for name, value in options.items():
            t.put(f"algorithm.correction_options.{name}", value, *given)


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{SECTION}: {text!r} is no threshold; verl has a number or low_high") from None


def _rejections(t: Translation, rules: str, limits: Any) -> dict[str, Any]:
    """Rules and their limits; verl tests -log r against a k1 band, so that it keeps r in [1 / high, 1 / low]."""
    names = [name.strip() for name in rules.split(",") if name.strip()]
    texts = [text.strip() for text in str(limits).split(",") if text.strip()]
    texts = texts * len(names) if len(texts) == 1 else texts
    found: dict[str, Any] = {}
    for name, text in zip(names, texts, strict=False):
        if "_" not in text:
            found[name] = _number(text)
            continue
        low, high = (_number(bound) for bound in text.split("_", 1))
        if abs(1 / high - low) < SAME:
            found[name] = text
        else:
            found[name] = f"{1 / high:.6g}_{1 / low:.6g}"
            t.notes.append(f"{name}: verl keeps r in [1/high, 1/low] of {text}, which is {found[name]} here")
    return found
