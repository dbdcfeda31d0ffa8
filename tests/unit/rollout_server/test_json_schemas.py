"""How large a client's schema may be. What crashes a grammar library runs in a process of its own."""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from rl_async.rollout_server import json_schemas
from rl_async.rollout_server.json_schemas import beyond_bounds, problem, without_unknown_formats

PYDANTIC_LIKE = {
    "$defs": {
        f"M{i}": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": f"#/$defs/M{(i + 1) % 60}"}, {"type": "null"}]}},
            "required": ["next"],
        }
        for i in range(60)
    },
    "$ref": "#/$defs/M0",
}


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = {"items": inner}
    return inner


def chain(definitions: int, levels: int = 0) -> dict[str, Any]:
    steps = {f"d{i}": nested(levels, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(definitions)}
    return {"$defs": {**steps, f"d{definitions}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def through_properties(steps: int) -> dict[str, Any]:
    """A chain without definitions."""
    steps_ = {f"p{i}": nested(20, {"$ref": f"#/properties/p{i + 1}"}) for i in range(steps)}
    return {"properties": steps_, "$ref": "#/properties/p0"}


TOO_LARGE = {
    "chain of definitions": (chain(3000), "bytes"),
    "long chain of definitions": (chain(20_000), "bytes"),
    "many definitions": (chain(400), "#/$defs"),
    "short chain of deep definitions": (chain(100, 20), "levels"),
    "chain without definitions": (through_properties(100), "levels"),
    "names that are no paths": ({"items": nested(15, {}), "allOf": [{"$ref": f"#{i}"} for i in range(100)]}, "levels"),
    "groups": ({"type": "string", "pattern": "(" * 400 + "a" + ")" * 400}, "#/pattern"),
    "many groups": ({"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}, "#/pattern"),
    "pattern": ({"properties": {"a": {"pattern": "a" * 1001}}}, "#/properties/a/pattern"),
    "pattern of names": ({"patternProperties": {"|".join("ab" * 400): {}}}, "#/patternProperties"),
    "nesting": (nested(60, {}), "#/items/items"),
    "enum": ({"properties": {"a": {"enum": list(range(1001))}}}, "#/properties/a/enum"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_named(name: str) -> None:
    schema, place = TOO_LARGE[name]
    said = beyond_bounds(json.dumps(schema))
    assert place in said and "at most" in said and len(said) < 400


def test_what_programs_ask_for_is_within_the_bounds() -> None:
    fine = [
        PYDANTIC_LIKE,
        {"enum": [f"v{i}" for i in range(1000)]},
        {"type": "string", "pattern": r"^(([(]|\)){1,3}[a-z]{1,200}\()*$"},
        {"properties": {"pattern": {"type": "string"}, "enum": {"type": "string"}, "$ref": {"type": "string"}}},
        nested(49, {}),
        chain(200),
    ]
    assert [beyond_bounds(json.dumps(schema)) for schema in fine] == [""] * len(fine)
    assert beyond_bounds("{") and beyond_bounds('{"a": ' * 5000 + "1" + "}" * 5000)


def test_a_name_of_a_part_counts_that_part_only() -> None:
    parts = {f"a/{i}": nested(2, {}) for i in range(100)}
    named = [{"$ref": f"#/properties/a~1{i}"} for i in range(100)]
    assert beyond_bounds(json.dumps({"properties": parts, "not": nested(30, {}), "anyOf": named})) == ""


def test_annotations_are_dropped_and_data_is_kept() -> None:
    schema = {
        "format": "password",
        "properties": {"format": {"type": "string", "format": "date"}, "const": {"format": "binary"}},
        "anyOf": [{"format": "path"}, {"const": {"format": "path"}}, {"enum": [{"format": "path"}]}],
        "default": {"format": "path"},
    }
    assert without_unknown_formats(schema) == {
        "properties": {"format": {"type": "string", "format": "date"}, "const": {}},
        "anyOf": [{}, {"const": {"format": "path"}}, {"enum": [{"format": "path"}]}],
        "default": {"format": "path"},
    }


@pytest.mark.skipif(find_spec("llguidance") is None, reason=f"install llguidance: {json_schemas.INSTALL}")
@pytest.mark.parametrize("name", [*TOO_LARGE, "fine"])
def test_no_schema_ends_the_process(name: str) -> None:
    schema = PYDANTIC_LIKE if name == "fine" else TOO_LARGE[name][0]
    program = "import sys; from rl_async.rollout_server.json_schemas import problem; print(problem(sys.stdin.read()))"
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(schema), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout.strip()) == (name != "fine")


@pytest.mark.skipif(find_spec("llguidance") is None, reason=f"install llguidance: {json_schemas.INSTALL}")
def test_llguidance_knows_the_formats_that_are_kept_and_its_messages_are_short() -> None:
    kept = sorted(json_schemas._FORMATS)
    assert [problem(json.dumps({"type": "string", "format": name})) for name in kept] == [""] * len(kept)
    assert "password" in problem('{"type": "string", "format": "password"}')
    assert 0 < len(problem(json.dumps({"type": "wat" * 1000}))) <= json_schemas.SHOWN
    before = problem.cache_info().hits
    assert problem('{"type": "wat"}') == problem('{"type": "wat"}') and problem.cache_info().hits == before + 1
