"""Answers are found where people write them, and a chain says which step found what."""

from typing import Any

import pytest

from rl_async.configs.checks import check
from rl_async.configs.load import load_config
from rl_async.errors import ConfigError
from rl_async.extraction import Found, behind_reasoning, boxed, extract, trace


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7", "7"),
        ("The answer is 7.", "7"),
        ("it costs $1,234.50, sir", "1234.5"),
        ("12,34", "34"),
        ("x = -3", "-3"),
        ("-3", "-3"),
        ("10-3", "3"),
        ("(2)-5", "5"),
        ("72.00", "72"),
        ("007", "7"),
        ("0.5", "0.5"),
        ("1000000000000000000000000000001", "1000000000000000000000000000001"),
        ("100", "100"),
        ("it is .5", "0.5"),
        ("-.50", "-0.5"),
        ("see sec.5", "5"),
        ("x = \u22125", "-5"),
        ("10\u22123", "3"),
        ("1.5e-3", "0.0015"),
        ("1.5E+3", "1500"),
        ("1e999999999", "999999999"),
        ("-0.0", "0"),
        ("1/2", "2"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_found_and_written_plainly(text: str, expected: str | None) -> None:
    assert extract(text, ("last_number",)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{1} then \fbox{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        ("boxed{3}", None),
        (r"\boxed{\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"} \boxed{1} }", "1"),
        (r"so \boxed 34.", "34"),
        (r"$\fbox -3$", "-3"),
        (r"\boxed{1} or \boxed 2", "1"),
    ],
)
def test_the_last_closed_box_is_found(text: str, expected: str | None) -> None:
    assert extract(text, ("boxed",)) == expected


def test_boxes_that_are_never_closed_are_read_once() -> None:
    read: list[str] = []

    class Noting(str):
        def __getitem__(self, place: Any) -> str:
            read.append("")
            return super().__getitem__(place)

    assert boxed(Noting("\\boxed{" * 2800)) is None
    assert len(read) < 10_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>a</answer> no, <ANSWER>\n b \n</ANSWER>", "b"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1", None),
    ],
)
def test_the_last_pair_of_tags_is_found(text: str, expected: str | None) -> None:
    assert extract(text, ("answer_tag",)) == expected


def test_a_pattern_gives_its_group_of_the_last_match() -> None:
    assert extract("A: 1\nA: 2\n", (r"regex:^A: (\d)$",)) == "2"
    assert extract("yes or no", ("regex:yes|no",)) == "no"
    assert extract("left", (r"regex:(right)|(left)",)) == "left"
    assert extract("nothing", ("regex:x(y)",)) is None


def test_a_chain_narrows_down_and_a_list_takes_the_first_that_finds_something() -> None:
    chain = (("boxed", "answer_tag"), "last_number")
    assert extract(r"5 steps: \boxed{x = 12} <answer>3</answer>", chain) == "12"
    assert trace("<answer>3 apples</answer>, 4", chain) == [Found("answer_tag", "3 apples"), Found("last_number", "3")]
    assert trace("just 4", chain) == [Found("boxed or answer_tag", None)]
    assert extract("all of it", ()) == "all of it"


@pytest.mark.parametrize(
    ("extract", "named"),
    [("[last_numbr]", "last_number"), ("['regex:(']", "regular expression"), ("[[boxd]]", "boxed")],
)
def test_a_mistake_in_the_config_is_named(extract: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.functions: .*{named}"):
        check(load_config("sort", [f"reward.functions=[{{name: exact_answer, extract: {extract}}}]"]))


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("7", "", "7"),
        ("<think>a</think>7", "a", "7"),
        ("a\n</think>\n\n7", "a", "7"),
        ("<think>a</think>b<think>c</think>7", "a</think>b<think>c", "7"),
        ("<think> maybe 7", "<think> maybe 7", ""),
        ("<think>a</think> so <think> 7", "<think>a</think> so <think> 7", ""),
        ("<seed:think>maybe 7", "<seed:think>maybe 7", ""),
        ("maybe 6</seed:think>7", "maybe 6", "7"),
        ("[THINK]maybe 6[/THINK]7", "maybe 6", "7"),
        ("◁think▷maybe 7", "◁think▷maybe 7", ""),
        ("Here is my thought process: 6. Here is my response: 7", "6.", "7"),
        ("Here are my reasoning steps: \\boxed{7}", "Here are my reasoning steps: \\boxed{7}", ""),
        ("<thought>6</thought>7", "6", "7"),
        ("7 as in `<thinking>`", "", "7 as in `<thinking>`"),
    ],
)
def test_the_answer_stands_behind_the_reasoning(text: str, reasoning: str, answer: str) -> None:
    assert behind_reasoning(text) == (reasoning, answer)
