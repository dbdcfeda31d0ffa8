"""The scorer `math` on the pairs of docs/reference/math.md and of math_pairs.md."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rl_async.errors import DataError
from rl_async.extraction import extract
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.math import score

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
