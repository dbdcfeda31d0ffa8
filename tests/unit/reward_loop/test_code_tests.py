"""What ground truths mean as tests, which program of an answer counts, and when outputs are the same."""

import json
from typing import Any

import pytest

from rl_async.errors import DataError
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.code import last_program
from rl_async.reward_loop.scorers.code_tests import Call, Code, Pair, parse_tests, same_text, same_value


def conversation(truth: Any) -> Conversation:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    return Conversation(data_source="apps", solution_str="", ground_truth=text, extra_info={"index": 7})


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("no code", None),
        ("```python\nprint(1)\n```", "print(1)"),
        ("first\n```python\na\n```\nthen\n```py\nb\n\nc\n```", "b\n\nc"),
        ("```python\na\n```\n```text\nb\n```\n```\nc\n```", "a"),
        ("```text\na\n```\n```\nb\n```", "b"),
        ("```bash\nls\n```", None),
        ("```python\ncut off", None),
        ("```python\na\n```\n```python\ncut off", "a"),
        ("  ```Python\n  a\n  ```", "  a"),
    ],
)
def test_which_program_counts(answer: str, program: str | None) -> None:
    assert last_program(answer) == program


def test_pairs() -> None:
    truth = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]], "more": 1}
    assert parse_tests(conversation(truth)) == [Pair("1 2\n", "3\n"), Pair("3\n4", "7")]


def test_calls() -> None:
    truth = {"fn_name": "f", "inputs": [[1, [2]], '1\n"x"', "[1, 2]"], "outputs": [[3], "[3]", "yes"]}
    assert parse_tests(conversation(truth)) == [
        Call("f", [1, [2]], [3]),
        Call("f", [1, "x"], [3]),
        Call("f", [[1, 2]], "yes"),
    ]


def test_asserts_and_test_functions_are_tests_of_their_own() -> None:
    text = "import math\nassert f(1) == 2\ndef test_two():\n    assert f(2) == 3\nassert f(3) == math.inf\n"
    tests = parse_tests(conversation(text))
    before = "import math\ndef test_two():\n    assert f(2) == 3"
    assert tests == [
        Code(f"{before}\n{check}") for check in ("assert f(1) == 2", "assert f(3) == math.inf", "test_two()")
    ]
    whole = "def check(f):\n    assert f(1)\ncheck(f)"
    assert parse_tests(conversation(whole)) == [Code(whole)]


@pytest.mark.parametrize(
    "truth",
    [
        "",
        "# nothing",
        "not (python",
        "{",
        {},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [1], "outputs": ["1"]},
        {"fn_name": "f", "inputs": ["not json"], "outputs": [1]},
        {"fn_name": "f", "inputs": [1], "outputs": [1]},
    ],
)
def test_a_ground_truth_without_tests_names_its_row(truth: Any) -> None:
    with pytest.raises(DataError, match=r"apps, row 7: ground_truth"):
        parse_tests(conversation(truth))


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n", "1  2 \n\n3", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.333333", True),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("1000001", "1000000", False),
        ("nan", "0.5", False),
        ("YES", "yes", False),
        ("", "1", False),
    ],
)
def test_when_outputs_are_the_same(found: str, expected: str, same: bool) -> None:
    assert same_text(found, expected) == same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (3, 3, True),
        (3, [3], True),
        (10**400, 3.0, False),
        ([3], [3], True),
        ([3], 3, False),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        ({"a": [1.0]}, {"a": [1.0000001]}, True),
        ({"a": 1}, {"b": 1}, False),
        (float("nan"), 1.5, False),
        ("1", 1, False),
        (None, [None], True),
    ],
)
def test_when_values_are_the_same(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected) == same
