"""Looks config keys up by dotted name, for error messages and `rl-async config explain`: type, default, meaning."""

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from rl_async.configs.load import correction_text
from rl_async.configs.load.renamed import replacement
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError


@dataclass(frozen=True)
class KeyText:
    """What a key means, its type with its bounds, and its default, as a reader sees them."""

    meaning: str
    type: str
    default: str


# keys whose explanation goes on below type and default
MORE: dict[str, Callable[[], str]] = {"algorithm.correction": correction_text.explanation}


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
    """Return the struct at a dotted key ('' is the whole config), or None if there is no such section."""
    current = _root()
    for part in key.split(".") if key else ():
        field = next((f for f in current.fields if f.name == part), None) if current else None
        current = _struct(field.type) if field else None
    return current


def field_at(key: str) -> inspect.Field | None:
    """Return the field of a dotted key, or None if there is none."""
    parent, _, leaf = key.rpartition(".")
    struct = struct_at(parent)
    return next((f for f in struct.fields if f.name == leaf), None) if struct else None


def field_names(section: str) -> list[str]:
    """List the keys of a section; empty if there is none of that name."""
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

    Raises ConfigError, naming the nearest keys, if there is none.
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
