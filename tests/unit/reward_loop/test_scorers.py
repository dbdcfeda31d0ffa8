"""The scorers `code` and `math`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rl_async.errors import DataError
from rl_async.extraction import extract
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.code import last_program
from rl_async.reward_loop.scorers.code_tests import (
    Asserts,
    Call,
    Pair,
    TestFunction,
    parse_tests,
    same_text,
    same_value,
    starter_imports,
)
from rl_async.reward_loop.scorers.math import score

# What ground truths mean as tests, which program of an answer counts, and when outputs are the same.


CHECK = "def check(candidate):\n    assert candidate(1) == 1"


def conversation(truth: Any, **extra: Any) -> Conversation:
    text = truth if isinstance(truth, str) else json.dumps(truth)
    return Conversation(data_source="apps", solution_str="", ground_truth=text, extra_info={"index": 7, **extra})


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
        ("  ```Python\n  a\n  ```", "a"),
        ("  ```python\n    a\nb\n  ```", "  a\nb"),
        ("````python\n```\na\n```\n````", "```\na\n```"),
        ("~~~python\na\n```\n~~~", "a\n```"),
        ("```python\na\n~~~\n```", "a\n~~~"),
        ("```python\na\n`````", "a"),
        ('```python title="x.py"\na\n```', "a"),
        ("``` {.python .numberLines}\na\n```", "a"),
        ("```python:main.py\na\n```", "a"),
        ("```python3\r\na\r\nb\r\n```\r\n", "a\nb"),
        ("1. this:\n\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("1. ```python\n   a\n   ```", "a"),
        ("- - ~~~py\n    a\n    ~~~", "a"),
        ("> ```python\n> a\n>\n> b\n> ```", "a\n\nb"),
        ('```python\ndef f():\n    """\n    ```\n    """\n```', 'def f():\n    """\n    ```\n    """'),
        ("```python\na = '\u2028\x85\x0b\x1c'\n```", "a = '\u2028\x85\x0b\x1c'"),
        ("``` `a` ```\n```python\nb\n```", "b"),
        ("Use ```python\na\n```", "a"),
        ("<code>\nb\n</code>```Py\na\n```", "a"),
        ("Use ```\na\n```", None),
        ("Use ```python a```\nb\n```", None),
        ("Use `x` or ```python\na\n```", None),
        ("```javascript\na\n```", None),
        ("```python\na\n``", None),
    ],
)
def test_which_program_counts(answer: str, program: str | None) -> None:
    assert last_program(answer) == program


@given(
    fence=st.tuples(st.sampled_from("`~"), st.integers(3, 6)).map(lambda pair: pair[0] * pair[1]),
    indent=st.integers(0, 3).map(lambda n: " " * n),
    lines=st.lists(
        st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=8), max_size=5
    ),
)
def test_what_is_fenced_is_found(fence: str, indent: str, lines: list[str]) -> None:
    text = "\n".join(f"{indent}{line}" for line in (f"{fence}python", *lines, fence))
    inside = [line for line in lines if set(line.strip(" \t")) == {fence[0]} and len(line.strip(" \t")) >= len(fence)]
    assume(not inside)
    assert last_program(f"So:\n\n{text}\n\nDone.") == "\n".join(lines)


def test_pairs() -> None:
    truth = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]], "fn_name": None}
    assert parse_tests(conversation(truth)) == [Pair("1 2\n", "3\n"), Pair("3\n4", "7")]
    asserted = {"inputs": ["1", "2"], "outputs": ["1", "2"], "assert_case": ["assert f(1)", "assert True"]}
    assert parse_tests(conversation(asserted)) == [Pair("1", "1", Asserts(["assert f(1)"], [0])), Pair("2", "2")]
    unnamed = {"inputs": ["1"], "outputs": [""], "fn_name": "", "assert_case": ["assert f(1)"]}
    assert parse_tests(conversation(unnamed)) == [Pair("1", "", Asserts(["assert f(1)"], [0]))]


def test_calls() -> None:
    truth = {"fn_name": "f", "inputs": [[1, [2]], '1\n"x"', "[1, 2]"], "outputs": [[3], "[3]", "yes"]}
    assert parse_tests(conversation(truth)) == [
        Call("f", [1, [2]], [3]),
        Call("f", [1, "x"], "[3]"),
        Call("f", [[1, 2]], "yes"),
    ]


def test_lists_of_cases() -> None:
    stdin = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": ["1"], "output": "2"}]
    assert parse_tests(conversation(stdin)) == [Pair("1\n", "2\n"), Pair("1", "2")]
    case = {"input": '[1]\n"a"', "output": "3", "testtype": "functional"}
    call = [Call("f", [[1], "a"], "3")]
    assert parse_tests(conversation([case | {"metadata": {"func_name": "f"}}])) == call
    assert parse_tests(conversation([case], metadata='{"func_name": "f"}')) == call
    assert parse_tests(conversation([case], metadata={"func_name": "f"})) == call
    starter = "from typing import List\n\nclass Solution:\n    def f(self, a: List[int], b: str) -> int:\n        "
    assert parse_tests(conversation([case], starter_code=starter)) == call
    assert starter_imports({"starter_code": starter}) == [{"module": "typing", "source": "from typing import List"}]
    prime = [{"type": "function_call", "fn_name": "f", "input": [[1], "a"], "output": [3]}]
    assert parse_tests(conversation(prime)) == [Call("f", [[1], "a"], [3])]


ORDERED = ["c = Counter()", "c.inc()", "assert c.value == 1", "c.inc()", "assert c.value == 2"]


@pytest.mark.parametrize(
    "truth",
    [
        "\n".join(ORDERED),
        ORDERED,
        str(ORDERED),
        {"test_list": ORDERED[2:], "test_setup_code": "\n".join(ORDERED[:2])},
        {"assert_case": ORDERED, "inputs": [""] * 5, "outputs": [None] * 5},
    ],
)
def test_statements_and_asserts_keep_their_order(truth: Any) -> None:
    assert parse_tests(conversation(truth)) == [Asserts(ORDERED, [2, 4])]


@pytest.mark.parametrize(
    ("text", "checked"),
    [
        ("for n in range(3):\n    assert f(n) == n", [0]),
        ("def check(f):\n    assert f(1)\ncheck(g)", [1]),
        ("def run(f):\n    check(f)\ndef check(f):\n    assert f(1)\nrun(g)", [2]),
        ("import numpy.testing as t\nt.assert_allclose(f(1), 1)", [1]),
        ("if f(1) != 2:\n    raise ValueError", [0]),
        ("async def main():\n    assert await f(1) == 1\nimport asyncio\nasyncio.run(main())", [2]),
        ("assert await f(1) == 1", [0]),
        ("if __name__ == '__main__':\n    assert f(1) == 1\n    print('ok')", [0]),
        ("assert sum([1, 2]) == 3", [0]),
        ("from solution import *\nassert f(1)", [1]),
        ("try:\n    assert f(1) == 1\nexcept AssertionError as e:\n    print(e)", [0]),
        ("assert True\nassert f(1) == 1\nassert f", [1]),
        ("assert [x for x in f(1) if x]", [0]),
        ("x = f(1)\nassert x", [1]),
    ],
)
def test_which_statements_are_tests(text: str, checked: list[int]) -> None:
    (test,) = parse_tests(conversation(text))
    assert isinstance(test, Asserts) and test.checked == checked


def test_repeated_names_are_tests_of_their_own() -> None:
    one = "def test_f():\n    assert f({}) == 1\n"
    group = "class TestF:\n    def test_f(self):\n        assert f({}) == 1\n"
    text = "".join(form.format(n) for form in (one, group) for n in range(2)) + group.format(2).partition("\n")[2]
    for truth in (text, [one.format(0), one.format(1), *(group.format(n) for n in range(2))]):
        tests = parse_tests(conversation(truth))
        names = [(test.group, test.name) for test in tests if isinstance(test, TestFunction)]
        assert len(set(names)) == len(names) == len(tests) == (5 if truth is text else 4)


@pytest.mark.parametrize(
    ("text", "entry_point", "required"),
    [
        ("assert sum([1, 2]) == 3", None, ["sum"]),
        ("for given, wanted in [([1], 1)]:\n    assert sum(given) == wanted", None, ["sum"]),
        ("assert abs(f(1) - 1) < 1e-6", None, []),
        ("assert abs(-1) == f(1)", None, ["abs"]),
        (CHECK, "sorted", ["sorted"]),
        (CHECK, "math.isqrt", ["math"]),
        (CHECK, "Solution().f", []),
    ],
)
def test_names_of_pythons_own_that_a_program_has_to_define(
    text: str, entry_point: str | None, required: list[str]
) -> None:
    (test,) = parse_tests(conversation(text, entry_point=entry_point))
    assert isinstance(test, Asserts) and test.required == required


def test_test_functions_and_classes_are_tests_of_their_own() -> None:
    text = """
import unittest, pytest
from solution import f

def test_one():
    assert f(1) == 1

async def test_two():
    assert await f(2) == 2

def test_nothing():
    f(3)

class TestMore:
    def setup_method(self): self.x = 1
    @pytest.mark.parametrize("a, b", [(1, 2), (3, 4)])
    def test_three(self, a, b): assert f(a) == b

class Base(unittest.TestCase):
    def test_four(self): self.assertEqual(f(4), 4)

class Sub(Base):
    async def test_five(self): self.assertTrue(f(5))

test_one()
if __name__ == "__main__":
    unittest.main()
"""
    tests = parse_tests(conversation(text))
    found = [(test.group, test.name, test.unittest) for test in tests if isinstance(test, TestFunction)]
    assert found == [
        ("", "test_one", False),
        ("", "test_two", False),
        ("TestMore", "test_three", False),
        ("Base", "test_four", True),
        ("Sub", "test_four", True),
        ("Sub", "test_five", True),
    ]
    assert len(found) == len(tests) and {
        tuple(test.modules) for test in tests if not isinstance(test, Pair | Call)
    } == {("pytest", "unittest")}


@pytest.mark.parametrize("truth", [CHECK, {"test": CHECK, "entry_point": "f"}, {"test": CHECK}, f"{CHECK}\ncheck(f)"])
def test_humanevals_check_is_called_with_the_entry_point(truth: Any) -> None:
    assert parse_tests(conversation(truth, entry_point="f")) == [Asserts([CHECK, "check(f)"], [1])]


@pytest.mark.parametrize(
    ("truth", "named"),
    [
        ("", "empty"),
        ("# nothing", "nothing of the program"),
        ("not (python", "Python"),
        ("{", "JSON"),
        ("42", "nothing"),
        ("x = 1", "nothing"),
        ("add(1, 2) == 3", "no test"),
        ("f(1)", "no test"),
        ("assert True", "nothing"),
        ("assert 1 + 1 == 2", "nothing"),
        ("x = 2\nassert x == 2", "nothing"),
        ("def f(x):\n    return x\nassert f(1) == 1", "nothing"),
        ("def test_f():\n    f(1)", "no test"),
        ("def test_f():\n    return f(1) == 1", "no test"),
        ("def test_f():\n    yield f(1)\n    assert f(1) == 1", "yields"),
        ("assert f", "no test"),
        ("assert (f(1) == 1, 'not 1')", "no test"),
        ("assert [f(1) == 1]", "no test"),
        ("assert [f(n) == n for n in range(3)]", "no test"),
        ("assert {'f': f(1) == 1}", "no test"),
        ("assert (f(n) == n for n in range(3))", "no test"),
        ("assert lambda: f(1) == 1", "no test"),
        ("assert f'{f(1)}'", "no test"),
        ("assert f(1) == 1 or True", "no test"),
        ("assert not False\nf(1)", "no test"),
        ("assert 1 == 1\nf(1)", "no test"),
        ("assert callable(f)", "no test"),
        ("assert f(1) == f(1)", "no test"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertTrue(True), f(1)", "no test"),
        ("def check(candidate):\n    assert candidate(1) == 1", "entry_point"),
        ("def test_f(tmp_path):\n    assert f(tmp_path)", "tmp_path"),
        ("import pytest\n@pytest.fixture\ndef x():\n    return 1\ndef test_f(x):\n    assert f(x)", r"pytest\.fixture"),
        ("from unittest.mock import patch\n@patch('os.x', new=1)\ndef test_f(m):\n    assert f(m)", "needs m"),
        ("import pytest\n@pytest.mark.skip\ndef test_f():\n    assert f(1)", r"pytest\.mark\.skip"),
        ("from pytest import monkeypatch\nassert f(1)", r"pytest\.monkeypatch"),
        ("import unittest as u\nfrom unittest import skip\nassert f(1)", r"unittest\.skip"),
        ("eJxVjsEKwjAMhl8l", "no test"),
        ([], "empty list"),
        ([1], r"\[0\]|\[\.\.\.\]"),
        (["x = 1"], "nothing"),
        (["assert f(1) ==", "assert f(2) == 2"], r"ground_truth\[0\]"),
        ([{"input": "1", "output": "1", "testtype": "interactive"}], r"ground_truth\[0\]\.testtype"),
        ([{"input": "1", "output": "1", "check": "x"}], "check"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "func_name"),
        ([{"input": 1, "output": "1"}], r"ground_truth\[0\]\.input"),
        ([{"input": "1"}], "output"),
        ('{"inputs": ["1"], "outputs": ["1"], "outputs": ["2"]}', "'outputs' twice"),
        ([{"input": "1", "output": "None", "testtype": "functional", "fn_name": "f"}], "null"),
        ({}, "no tests"),
        ({"inputs": ["1"], "outputs": ["1"], "more": 1}, "more"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["", "1"], "outputs": ["", " \n"]}, "blank"),
        ({"inputs": ["1"], "outputs": [[]]}, "blank"),
        ([{"input": "1", "output": "\n"}], "blank"),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [None, [None]]}, "null"),
        ([{"input": "1", "output": "null", "testtype": "functional", "fn_name": "f"}], "null"),
        ({"inputs": ["\ud800"], "outputs": ["1"]}, r"inputs\[0\]"),
        ({"inputs": ["1"], "outputs": [["1", "\ud800"]]}, r"outputs\[0\]"),
        ({"inputs": ["1"], "outputs": ["1"], "assert_case": ["def test_f():\n    assert f(1)"]}, r"assert_case\[0\]"),
        ({"fn_name": "None", "inputs": [[1]], "outputs": [1]}, "None"),
        ({"inputs": [1], "outputs": ["1"]}, r"inputs\[0\]"),
        ({"inputs": ["1"], "outputs": [None]}, r"outputs\[0\]"),
        ({"fn_name": "f", "inputs": ["not json"], "outputs": [1]}, r"inputs\[0\]"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, r"inputs\[0\]"),
        ({"assert_case": ["x = 1"]}, "nothing"),
        ({"test_list": []}, "nothing"),
    ],
)
def test_a_ground_truth_without_tests_names_its_row_and_why(truth: Any, named: str) -> None:
    with pytest.raises(DataError, match=r"^apps, row 7: ground_truth") as caught:
        parse_tests(conversation(truth))
    assert re.search(named, str(caught.value))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["inputs", "outputs", "input", "output", "fn_name", "test", "x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_ground_truth_is_tests_or_a_dataerror(truth: Any) -> None:
    try:
        tests = parse_tests(conversation(json.dumps(truth)))
    except DataError as error:
        assert "ground_truth" in str(error)
    else:
        assert sum(test.checks for test in tests) > 0


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
        ("a\u2028b", "a\nb", False),
        ("a\x1cb", "a b", False),
        ("1\r\n2\r\n", "1\n2", True),
        ("42", "Infinity", False),
        ("1e308", "1e999", False),
        ("9e999", "1e400", False),
        ("1e400", "1e400", True),
        ("1_0", "10.0", False),
        ("1.5", "nan", False),
        ("nan", "nan", True),
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
        ("134", "134", True),
        (134, "134", True),
        ([1, 2], "[1, 2]", True),
        ("[1, 2]", "[1, 2]", True),
        ("abc", '"abc"', True),
        ([1, 2], ["[1, 2]"], True),
        ("134", ["134"], True),
        (135, "134", False),
        (True, "true", True),
        (True, "True", True),
        (1, "True", False),
        ([1, None], "(1, None)", True),
        (["a", "b"], "['a', 'b']", True),
        (["a", "c"], "['a', 'b']", False),
        (42, "Infinity", False),
        (math.inf, "Infinity", True),
        (-math.inf, math.inf, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        (10**400, math.inf, False),
        (1.0, "NaN", False),
        ([math.inf], [[1.0]], False),
    ],
)
def test_when_values_are_the_same(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected) == same


# The scorer `math` on the pairs of docs/reference/math.md and of math_pairs.md.


PAGES = (
    Path(__file__).parents[3].joinpath("docs/reference/math.md").read_text()
    + Path(__file__).with_name("math_pairs.md").read_text()
)
PAIRS = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (0|1|unscored) \|$", PAGES, re.MULTILINE)


def verdict(truth: str, answer: str) -> str:
    conversation = Conversation(data_source="maths", solution_str=answer, ground_truth=truth, extra_info={"index": 3})
    try:
        return f"{score(conversation):g}"
    except DataError as error:
        assert "maths, row 3: ground_truth" in str(error)
        return "unscored"


def test_the_pages_have_two_hundred_pairs() -> None:
    assert len(PAIRS) >= 200 and PAGES.count("\n| `") == len(PAIRS)


@pytest.mark.parametrize(("truth", "answer", "reward"), PAIRS)
def test_pairs_of_the_pages(truth: str, answer: str, reward: str) -> None:
    said = f"First \\boxed{{no}}. So it is \\boxed{{{answer}}}."
    found = extract(said, ("boxed",))
    assert found == answer
    ways = {"bare": answer, "boxed": said, "in dollars": f"${answer}$"}
    assert {way: verdict(truth, text) for way, text in ways.items()} == dict.fromkeys(ways, reward)
    if reward != "unscored":
        assert verdict(f"\\boxed{{{truth}}}", answer) == reward


@pytest.mark.parametrize(
    ("truth", "answer", "reward"),
    [
        ("\\$5", "It costs 5 dollars: $5$.", "1"),
        ("18", "He makes 9 * 2 = 18 dollars every day.", "1"),
        ("18", "He makes 18 dollars, not 9 of them", "0"),
        ("18", "", "0"),
        ("18", "I do not know the answer", "0"),
        ("", "5", "unscored"),
        (" \n", "5", "unscored"),
        ("$5$", "\\boxed{5}", "1"),
        ("\\boxed{5}", "It is $5$", "1"),
        ("5", "\\boxed{\\boxed{5}}", "1"),
        ("5", "\\boxed{4} or rather \\boxed{5}", "1"),
        ("5", "\\fbox{5}", "1"),
        ("5", "So \\boxed 5.", "1"),
        ("5", "\\boxed{5", "0"),
        ("5", "<answer>5</answer>", "1"),
        ("5", "3 + 2\n#### 5", "1"),
        ("3 + 2\n#### 5", "5", "1"),
        ("The answer is 5", "5", "1"),
        ("2", "The answer is \\sqrt{2}", "0"),
        ("2", "The answer is clearly \\sqrt{2}", "0"),
        ("\\sqrt{2}", "The answer is \\sqrt{2}", "1"),
        ("\\frac12", "The probability is \\frac{1}{2}.", "1"),
        ("50%", "So the answer is then 50%", "1"),
        ("5", "**5**", "1"),
        ("8", "2**3", "1"),
        ("72", "She earns \\$72.", "1"),
        ("72", "She earns \\$72, and then \\$10.", "0"),
        ("18", "She makes $9*2 = $18 every day.", "1"),
        ("18", "It costs $9 each, so the total is $18.", "1"),
        ("A", "The answer is (A)", "1"),
        ("A", "The answer is (B).", "0"),
        ("yes", "The answer is yes.", "1"),
        ("5", "The answer is not 5", "0"),
        ("5", "The answer must be minus 5", "0"),
        ("5", "It is the square root of 5", "0"),
        ("5", "That leaves us with 5 squared", "0"),
        ("5", "Log 5", "0"),
        ("5", "So x = 5", "1"),
        ("3", "We get $x=2$ and $y=3$.", "1"),
        ("(1,2)", "The point is at (1, 2).", "1"),
        ("1,2", "The solutions are 1 and 2", "1"),
        ("5", "5\nDone.", "1"),
        ("5", "I leave 5 apples in the box.", "1"),
        ("5", "\\boxed{\\ 5\\ }", "1"),
        ("$5$ or $6$", "\\boxed{5 \\text{ or } 6}", "1"),
        ("6", "$5$ or $6$", "0"),
        ("5, 6", "The answer is $5$, $6$.", "1"),
        ("C", "So the correct option is (C).", "1"),
        ("C", "The correct answer is option C.", "1"),
        ("C", "The correct answer is Option (C).", "1"),
        ("C", "The correct answer is option D.", "0"),
        ("34", "Therefore, x = 34.", "1"),
        ("x = 34", "So x = 34.", "1"),
        ("34", "Thus, 35", "0"),
        ("C", "The best choice is B.", "0"),
        ("|x|", "\\sqrt{x^2}", "1"),
        ("|ab|", "ab", "0"),
        ("5", "|S| = 5", "1"),
        ("5", "|x| = 5", "0"),
        ("The proof takes 3 steps in all.", "3", "unscored"),
        ("She has $5$ apples left over", "5", "unscored"),
    ],
)
def test_what_a_text_states(truth: str, answer: str, reward: str) -> None:
    assert verdict(truth, answer) == reward


@pytest.mark.parametrize(
    "answer",
    [
        "3^{3^{3^{3^3}}}",
        "((10!)!)!",
        "\\binom{10^{12}}{10^6}",
        "\\sin(10^{10^4})",
        "e^{e^{e^{e^e}}}",
        "9" * 9999,
        "(" * 5000,
        "\\sqrt{" * 200 + "5" + "}" * 200,
        "1," * 5000,
        "\\(" * 10000,
        "$a" * 10000,
        "**a" * 6000,
        "+".join(["x!"] * 300),
    ],
)
def test_what_is_too_large_is_wrong_in_an_answer_and_unscored_in_a_ground_truth(answer: str) -> None:
    """None of these ends in a second unless it is refused, or found wrong, before it is worked out."""
    assert verdict("5", f"\\boxed{{{answer}}}") == "0" == verdict("5", answer)


PIECES = st.sampled_from(
    [
        *"0123456789.,-+/%()[]{}^_!|= xyei$",
        *("\\frac{", "\\sqrt{", "\\binom{", "}{", "\\pi", "\\infty", "\\text{ cm}", "\\pm", "10^", "\\cdot ", "\\cup"),
        *("\\{", "\\}", "\\sin ", "\\log_", "\\boxed{", " and ", "\\degree", "99999", "answer is "),
    ]
)


@example("\\log_.0", "")
@given(st.lists(PIECES, max_size=14).map("".join), st.lists(PIECES, max_size=14).map("".join))
def test_any_two_texts_have_a_verdict_and_one_that_is_understood_equals_itself(truth: str, answer: str) -> None:
    assert verdict(truth, answer) in ("0", "1", "unscored")
    assert verdict(truth, truth) in ("1", "unscored")


@given(st.lists(PIECES, max_size=10).map("".join))
def test_extracting_the_box_changes_no_verdict(answer: str) -> None:
    said = f"So it is \\boxed{{{answer}}}"
    if (found := extract(said, ("boxed",))) is not None:
        assert verdict("5", said) == verdict("5", found)


@given(st.integers(), st.integers(), st.integers(1, 10**6))
def test_fractions_are_equal_where_they_cross_multiply(one: int, other: int, under: int) -> None:
    assert verdict(f"\\frac{{{one}}}{{{under}}}", f"{2 * one}/{2 * under}") == "1"
    assert verdict(str(one), str(other)) == str(int(one == other))
