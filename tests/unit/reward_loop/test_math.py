"""The scorer `math` on the pairs of docs/reference/math.md, which is where they are decided."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_async.errors import DataError
from rl_async.extraction import extract
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.math import equal, score

pytest.importorskip("math_verify", reason="install it with pip install 'rl-async[math]'")

PAGE = Path(__file__).parents[3] / "docs/reference/math.md"
PAIRS = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (0|1|unscored) \|$", PAGE.read_text(), re.MULTILINE)


def verdict(truth: str, answer: str) -> str:
    conversation = Conversation(data_source="maths", solution_str=answer, ground_truth=truth, extra_info={"index": 3})
    try:
        return f"{score(conversation):g}"
    except DataError as error:
        assert "maths, row 3: ground_truth" in str(error)
        return "unscored"


def test_the_page_has_sixty_pairs_and_more() -> None:
    assert len(PAIRS) >= 60 and PAGE.read_text().count("\n| `") == len(PAIRS)


@pytest.mark.parametrize(("truth", "answer", "reward"), PAIRS)
def test_pairs_of_the_page(truth: str, answer: str, reward: str) -> None:
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
    ],
)
def test_what_a_text_states(truth: str, answer: str, reward: str) -> None:
    assert verdict(truth, answer) == reward


@given(st.text("0123456789.,-+/\\$%{}()[]^ eExπ ", max_size=12), st.text("0123456789.,-+/\\$%{}()[] e", max_size=12))
def test_any_two_texts_have_a_verdict_and_a_number_equals_itself(truth: str, answer: str) -> None:
    assert verdict(truth, answer) in ("0", "1", "unscored")


@given(st.integers(), st.integers(), st.integers(1, 10**6))
def test_fractions_are_equal_where_they_cross_multiply(one: int, other: int, under: int) -> None:
    assert equal(f"\\frac{{{one}}}{{{under}}}", f"{2 * one}/{2 * under}" if one >= 0 else f"-{-2 * one}/{2 * under}")
    assert equal(str(one), str(other)) == (one == other)
