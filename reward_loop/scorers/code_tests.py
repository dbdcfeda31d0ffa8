"""Hidden tests of a program as ground truths write them, and the comparison of what came with what was expected."""

import ast
import json
import math
from typing import Any

import msgspec

from rl_async.errors import DataError
from rl_async.reward_loop.api import Conversation

MARK = "\x00rl-async: "  # before what CALL reports; whatever a program prints ahead of it does not matter

# Loads the program as the module `solution`, whose `main` part does not run; then calls a function or runs a test.
CALL = f"""
import json, sys, types
given = json.loads(sys.stdin.readline())
module = types.ModuleType("solution")
sys.modules["solution"] = module
exec(compile(given["program"], "solution.py", "exec"), module.__dict__)
if "code" in given:
    exec(compile(given["code"], "test.py", "exec"), module.__dict__)
    said = given["secret"]
else:
    name = given["name"]
    function = getattr(module, name) if hasattr(module, name) else getattr(module.Solution(), name)
    said = json.dumps(function(*given["arguments"]))
sys.stdout.write({MARK!r} + said)
sys.stdout.flush()
"""


class Pair(msgspec.Struct, frozen=True):
    """A program gets ``stdin`` and prints ``stdout``."""

    stdin: str
    stdout: str


class Call(msgspec.Struct, frozen=True):
    """A function, or method of a class Solution, gets ``arguments`` and returns ``expected``."""

    name: str
    arguments: list[Any]
    expected: Any


class Code(msgspec.Struct, frozen=True):
    """Code that raises nothing once the program is loaded."""

    text: str


Test = Pair | Call | Code


class _Cases(msgspec.Struct):
    """The form of PRIME's and verl's data sets."""

    inputs: list[Any]
    outputs: list[Any]
    fn_name: str | None = None


def parse_tests(conversation: Conversation) -> list[Test]:
    """Return the tests of a ground truth. Raises DataError, naming the row, for one that has none."""
    truth = conversation.ground_truth
    row = f"{conversation.data_source or 'data'}, row {conversation.extra_info.get('index', '?')}: ground_truth"
    if not truth.lstrip().startswith("{"):
        return _from_code(truth, row)
    try:
        cases = msgspec.json.decode(truth, type=_Cases)
    except msgspec.DecodeError as error:
        raise DataError(f'{row}: {error}; write {{"inputs": [...], "outputs": [...]}}, or tests as code') from error
    if not cases.inputs or len(cases.inputs) != len(cases.outputs):
        raise DataError(
            f"{row} has {len(cases.inputs)} inputs and {len(cases.outputs)} outputs; it needs as many, and one"
        )
    pairs = list(zip(cases.inputs, cases.outputs))
    if cases.fn_name is None:
        return [Pair(_lines(given, row), _lines(expected, row)) for given, expected in pairs]
    return [Call(cases.fn_name, _arguments(given, row), _value(expected)) for given, expected in pairs]


def _lines(value: Any, row: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise DataError(
            f"{row}: {value!r:.80} is neither a text nor a list of lines, as inputs and outputs without fn_name are"
        )
    return value


def _arguments(value: Any, row: str) -> list[Any]:
    """Return a call's arguments: a list, or a text with one JSON value per line."""
    if isinstance(value, list):
        return value
    try:
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    except (AttributeError, ValueError):
        raise DataError(f"{row}: {value!r:.80} is neither a list of arguments nor a JSON value per line") from None


def _value(expected: Any) -> Any:
    """Return an expected value, which may be written as JSON in a text; a text that is no JSON is itself expected."""
    if not isinstance(expected, str):
        return expected
    try:
        return json.loads(expected)
    except ValueError:
        return expected


def _from_code(text: str, row: str) -> list[Test]:
    """Make a test of each assert and each function `test...` at the top; the rest precedes each of them.

    Code with neither is one test.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise DataError(f"{row} is neither a JSON object nor Python: {error}") from error
    if not body:
        raise DataError(f"{row} is empty; the scorer code needs tests")
    asserts = [node for node in body if isinstance(node, ast.Assert)]
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    if not asserts and not functions:
        return [Code(text)]
    before = "\n".join(ast.unparse(node) for node in body if not isinstance(node, ast.Assert))
    checks = [*map(ast.unparse, asserts), *(f"{name}()" for name in functions)]
    return [Code(f"{before}\n{check}") for check in checks]


def same_text(found: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines; empty lines do not count, and numbers may be close."""
    one, other = ([line.split() for line in text.splitlines() if line.strip()] for text in (found, expected))
    return len(one) == len(other) and all(
        len(words) == len(others) and all(map(_same_word, words, others)) for words, others in zip(one, other)
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if "." not in expected and "e" not in expected.lower():  # whole numbers are equal or they are not
        return False
    try:
        return _close(float(found), float(expected))
    except ValueError:
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Whether a function returned what was expected; as in PRIME's data, that may stand in a list of one."""
    return _same(found, expected) or (isinstance(expected, list) and len(expected) == 1 and _same(found, expected[0]))


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[key], expected[key]) for key in found)
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return found == expected or (isinstance(expected, float) and _close(found, expected))
    return bool(found == expected)


def _close(found: float, expected: float) -> bool:
    """Compare as NumPy's allclose does, which PRIME's scorer uses; an integer beyond all floats is close to none."""
    try:
        return math.isfinite(found) and abs(found - expected) <= 1e-8 + 1e-5 * abs(expected)
    except OverflowError:
        return False
