"""Checks JSON schemas for answers: their size, and whether llguidance (the extra ``json``) can follow them.

It does not import torch, so that a gateway can refuse a schema before any engine sees it. Grammar libraries recurse
into a schema, its definitions and its patterns on the C stack, and crash the process when it overflows: llguidance 1.9
at about 1,600 levels of JSON. The bounds are well below.
"""

import re
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeAlias
from urllib.parse import unquote

import msgspec

from rl_async.files import UNDECODABLE

INSTALL = "pip install 'rl-async[json]'"
PACKAGE = "llguidance"

MAX_BYTES = 100_000
# How deeply objects and lists may be nested.
MAX_NESTING = 50
# The nesting of the schema plus that of every target of a $ref, since references may form a chain.
MAX_LEVELS = 600
MAX_DEFINITIONS = 300
MAX_ENUM = 1_000
# The characters of a regular expression, and the depth of its groups.
MAX_PATTERN = 1_000
MAX_GROUPS = 20
# The number of schemas whose check is cached.
REMEMBERED = 256
# At most this many characters of a library's message, which repeats the schema, are shown.
SHOWN = 300

_Place: TypeAlias = tuple[str | int, ...]
# llguidance refuses other formats of strings, although they are mere annotations.
_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
# The values of these keys map names to schemas.
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# The values of these keys are data and contain no schemas.
_DATA = ("const", "enum", "default", "examples")
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)


@lru_cache(REMEMBERED)
def problem(schema: str) -> str:
    """Say why answers cannot be restricted to a schema, JSON text; empty if they can be.

    Without llguidance only the bounds are checked. Blocks while the schema is compiled: for milliseconds, and for about
    a second at the library's limits.
    """
    if (found := beyond_bounds(schema)) or find_spec(PACKAGE) is None:
        return found
    from llguidance import LLMatcher

    try:
        compiled = LLMatcher.grammar_from_json_schema(_one_line(schema))
    except ValueError as error:
        return str(error)[:SHOWN]
    return LLMatcher.validate_grammar(compiled)[:SHOWN]


def beyond_bounds(schema: str) -> str:
    """Name the bound that a schema exceeds, with the place, or describe invalid JSON; empty if it is within all."""
    if (size := len(schema.encode())) > MAX_BYTES:
        return f"the schema has {size} bytes; at most {MAX_BYTES} are accepted"
    try:
        _Measured(msgspec.json.decode(schema))
    except RecursionError:
        return f"the schema is nested too deeply; at most {MAX_NESTING} levels are accepted"
    except (*UNDECODABLE, ValueError) as error:
        return str(error)
    return ""


def grammar(schema: str) -> str:
    """Return a schema within the bounds as a grammar of llguidance.

    With ``no_forcing``, text without alternatives may still be spelled with any of its tokenizations.
    """
    return f'%llguidance {{"no_forcing": true}}\nstart: %json {_one_line(schema)}'


def without_unknown_formats(schema: Any) -> Any:
    """Return a schema without those formats of strings that are mere annotations, such as pydantic's ``password``."""
    if isinstance(schema, list):
        return [without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in _OF_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: without_unknown_formats(inner) for name, inner in value.items()}
        else:
            kept[key] = value if key in _DATA else without_unknown_formats(value)
    return kept


def _one_line(schema: str) -> str:
    return msgspec.json.encode(msgspec.json.decode(schema)).decode()


class _Measured:
    """Measures a schema as it is constructed. Raises ValueError, which names the place, if it exceeds a bound."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        # The depth of each object and list, by identity.
        self._nesting: dict[int, int] = {}
        self._refs: set[str] = set()
        whole = self._measure(schema, ())
        levels = whole + sum(self._nesting.get(id(self._named(ref)), whole) for ref in self._refs)
        if levels > MAX_LEVELS:
            raise ValueError(
                f"the schema and what its {len(self._refs)} different $ref name have {levels} levels of nesting; "
                f"at most {MAX_LEVELS} are accepted"
            )

    def _measure(self, value: Any, place: _Place) -> int:
        """Return the depth of nested objects and lists in a value, including itself."""
        if not isinstance(value, (dict, list)):
            return 0
        if len(place) >= MAX_NESTING:
            raise _exceeded(place, len(place) + 1, "levels of nesting", MAX_NESTING)
        if isinstance(value, dict):
            self._examine(value, place)
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        nesting = 1 + max((self._measure(inner, (*place, key)) for key, inner in entries), default=0)
        self._nesting[id(value)] = nesting
        return nesting

    def _examine(self, value: dict[str, Any], place: _Place) -> None:
        for key, inner in value.items():
            match key, inner:
                case "$ref" | "$dynamicRef", str():
                    self._refs.add(inner)
                case "enum", list() if len(inner) > MAX_ENUM:
                    raise _exceeded((*place, key), len(inner), "values", MAX_ENUM)
                case "$defs" | "definitions", dict() if len(inner) > MAX_DEFINITIONS:
                    raise _exceeded((*place, key), len(inner), "definitions", MAX_DEFINITIONS)
                case "pattern", str():
                    _examine_pattern(inner, (*place, key))
                case "patternProperties", dict():
                    for pattern in inner:
                        _examine_pattern(pattern, (*place, key, pattern))

    def _named(self, ref: str) -> Any:
        """Return the target of a $ref that is a path; None for another kind of reference."""
        found = self._schema
        for step in unquote(ref.removeprefix("#")).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found if ref.startswith("#/") or ref == "#" else None


def _examine_pattern(pattern: str, place: _Place) -> None:
    if len(pattern) > MAX_PATTERN:
        raise _exceeded(place, len(pattern), "characters", MAX_PATTERN)
    depth = 0
    for character in _ESCAPE_OR_CLASS.sub("", pattern):
        depth += (character == "(") - (character == ")")
        if depth > MAX_GROUPS:
            raise _exceeded(place, depth, "groups within each other", MAX_GROUPS)


def _exceeded(place: _Place, number: int, what: str, most: int) -> ValueError:
    names = [str(step)[:40] for step in (place if len(place) < 8 else (*place[:6], "..."))]
    return ValueError(f"{'/'.join(['#', *names])} has {number} {what}; at most {most} are accepted")
