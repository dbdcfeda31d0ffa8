"""Looks config keys up by dotted name, for error messages and `rl-async config explain`: type, default, meaning.

``algorithm.correction`` is explained in words, preset by preset.
"""

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from rl_async.configs.schema.algorithm import PRESETS, Correction, band, limits
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.suggestions import replacement
from rl_async.errors import ConfigError

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


@dataclass(frozen=True)
class KeyText:
    """What a key means, its type with its bounds, and its default, as a reader sees them."""

    meaning: str
    type: str
    default: str


# keys whose explanation goes on below type and default
MORE: dict[str, Callable[[], str]] = {"algorithm.correction": explanation}


def _struct(kind: inspect.Type) -> inspect.StructType | None:
    """Return the struct that a type is or, for an optional, contains."""
    if isinstance(kind, inspect.Metadata):
        return _struct(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next((s for s in map(_struct, kind.types) if s is not None), None)
    return kind if isinstance(kind, inspect.StructType) else None


@functools.cache
def _root() -> inspect.StructType | None:
    """Return the type of the whole config, cached: every look-up starts here, and inspecting it takes milliseconds."""
    return _struct(inspect.type_info(RunConfig))


def struct_at(key: str) -> inspect.StructType | None:
    """Return the struct at a dotted key ('' is the whole config), or None for a section that does not exist."""
    current = _root()
    for part in key.split(".") if key else ():
        field = next((f for f in current.fields if f.name == part), None) if current else None
        current = _struct(field.type) if field else None
    return current


def field_at(key: str) -> inspect.Field | None:
    """Return the field of a dotted key, or None for a key that does not exist."""
    parent, _, leaf = key.rpartition(".")
    struct = struct_at(parent)
    return next((f for f in struct.fields if f.name == leaf), None) if struct else None


def field_names(section: str) -> list[str]:
    """List the keys of a section; a section that does not exist has none."""
    struct = struct_at(section)
    return [field.name for field in struct.fields] if struct else []


def choices(key: str) -> list[str]:
    """List the values of a key that takes one of several names, directly, in a list or beside other types."""
    field = field_at(key)
    return list(dict.fromkeys(str(value) for value in _literals(field.type))) if field else []


def _literals(kind: inspect.Type) -> list[Any]:
    kind, _ = _unwrap(kind)
    if isinstance(kind, inspect.UnionType):
        return [value for inner in kind.types for value in _literals(inner)]
    if isinstance(kind, inspect.VarTupleType):
        return _literals(kind.item_type)
    return list(kind.values) if isinstance(kind, inspect.LiteralType) else []


def all_keys(prefix: str = "") -> list[str]:
    """List every dotted key below ``prefix``, sections before their keys."""
    keys = []
    for name in field_names(prefix):
        key = f"{prefix}.{name}" if prefix else name
        keys += [key, *all_keys(key)]
    return keys


def explain(key: str) -> str:
    """Describe a key with its type, default and bounds, or a section with one line per key; without a key, name all.

    Raises ConfigError for a key that does not exist, naming the nearest ones.
    """
    if not key:
        return "\n".join(field_names(""))
    field = field_at(key)
    if field is None:
        raise ConfigError(f"unknown key {key!r}{replacement(key) or _suggestion(key)}")
    if struct_at(key) is not None:
        return f"{key}\n" + "\n".join(f"  {_line(f'{key}.{name}')}" for name in field_names(key))
    text = key_text(key)
    more = f"\n\n{MORE[key]()}" if key in MORE else ""
    return f"{key}\n  {text.meaning}\n  type: {text.type}\n  default: {text.default}{more}"


def key_text(key: str) -> KeyText:
    """Describe a key that exists; a section's default is `(section)`, or `null` where it may be absent."""
    field = field_at(key)
    assert field is not None, key
    kind, meaning = _unwrap(field.type)
    default = _default(field)
    if struct_at(key) is not None:
        default = "null" if default == "null" else "(section)"
    return KeyText(meaning, _type_name(kind), default)


def _suggestion(key: str) -> str:
    leaf = key.rpartition(".")[2]
    close = difflib.get_close_matches(key, all_keys(), n=3, cutoff=0.5)
    close += [k for k in all_keys() if k.rpartition(".")[2] == leaf and k not in close]
    return f"; did you mean {' or '.join(close)}?" if close else "; `rl-async config explain` lists the sections"


def _line(key: str) -> str:
    field = field_at(key)
    assert field is not None
    return f"{field.name:<26} {_default(field):<22} {_unwrap(field.type)[1]}"


def _unwrap(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """Strip the annotations off a type; return it with the outermost description."""
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = description or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return kind, description


def _default(field: inspect.Field) -> str:
    if field.required:
        return "(required)"
    if field.default is not msgspec.NODEFAULT:
        return _show(field.default)
    return _show(field.default_factory())


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(msgspec.to_builtins(value))


def _type_name(kind: inspect.Type) -> str:
    kind, _ = _unwrap(kind)
    if isinstance(kind, inspect.LiteralType):
        return " | ".join(str(v) for v in kind.values)
    if isinstance(kind, inspect.UnionType):
        return " | ".join(_type_name(t) for t in kind.types)
    if isinstance(kind, inspect.StructType):
        return "{" + ", ".join(f.name for f in kind.fields) + "}"
    if isinstance(kind, inspect.VarTupleType | inspect.ListType):
        return f"list of {_type_name(kind.item_type)}"
    names = {"IntType": "whole number", "FloatType": "number", "StrType": "text", "BoolType": "true | false"}
    name = names.get(type(kind).__name__, type(kind).__name__.removesuffix("Type").lower())
    bounds = [
        f"{sign} {limit:g}"
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if (limit := getattr(kind, attribute, None)) is not None
    ]
    return " ".join([name, *bounds])
