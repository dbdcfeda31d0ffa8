"""The trial of agent programs: when it counts as passed, and what its tiny model is."""

from typing import Any

import jinja2
import pytest

from tests.agent_programs.puppet import Lines, template
from tests.agent_programs.trial import MOST_DIFFERENCE, unproven

TEXT = Lines(shown="Observation:\nN")


def row(*turns: str, sample: int = 0) -> dict[str, Any]:
    said = [turn.partition(":") for turn in turns]
    return {"group_id": 1, "sample": sample, "turns": [{"role": role, "text": text} for role, _, text in said]}


CALLED = row("user:go", "assistant:call", "tool:5", "assistant:5")
WRITTEN = [row("user:go", "assistant:call"), row("user:go. Observation:\n5", "assistant:5")]


@pytest.mark.parametrize(("lines", "rows"), [(Lines(), [CALLED]), (TEXT, WRITTEN)])
def test_a_trial_in_which_tools_were_called_is_passed(lines: Lines, rows: list[dict[str, Any]]) -> None:
    assert unproven(lines, rows, 0.0, 0) == []


@pytest.mark.parametrize(
    ("lines", "rows", "difference", "given_back"),
    [
        (Lines(), [], 0.0, 0),
        (Lines(), [row("user:go", "assistant:5")], 0.0, 0),
        (Lines(), [row("user:go", "assistant:call", "tool:5")], 0.0, 0),
        (Lines(), WRITTEN, 0.0, 0),
        (TEXT, WRITTEN[1:], 0.0, 0),
        (TEXT, [WRITTEN[0], WRITTEN[0]], 0.0, 0),
        (Lines(), [CALLED], MOST_DIFFERENCE, 0),
        (Lines(), [CALLED], float("nan"), 0),
        (Lines(), [CALLED], 0.0, 1),
    ],
)
def test_a_trial_that_shows_nothing_is_not(
    lines: Lines, rows: list[dict[str, Any]], difference: float, given_back: int
) -> None:
    assert unproven(lines, rows, difference, given_back)


def test_only_a_model_that_thinks_has_a_template_with_thoughts() -> None:
    assert "</think>" in template(Lines(thinks=True)) and "</think>" not in template(Lines())
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "5"}]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    for lines in (Lines(), Lines(thinks=True)):
        said = environment.from_string(template(lines)).render(messages=messages)
        assert said == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
