"""``rl-async reward test`` scores as a run does, and says which rule found what."""

import json
from pathlib import Path

import pytest

from rl_async.launcher.cli.__main__ import main

TERM = "reward.functions=[{name: exact_answer, extract: [[boxed, answer_tag], last_number]}]"


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"prompt": f"{n}+1?", "reward_model": {"ground_truth": str(n + 1)}} for n in range(3)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def answers(folder: Path, *lines: object) -> str:
    file = folder / "answers.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_every_answer_gets_its_reward_and_its_reason(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = answers(
        tmp_path, {"answer": r"\boxed{x = 1}"}, "", {"answer": "it is 1", "row": 0}, {"answer": "\x1b", "row": 2}
    )
    assert main(["reward", "test", data, "--answers", file, TERM]) == 0
    out = capsys.readouterr().out
    blocks = out.split("row ")[1:]
    assert [block.splitlines()[0] for block in blocks] == ["0: reward 1", "0: reward 0", "2: reward 0"]
    assert 'boxed: "x = 1"' in blocks[0] and 'last_number: "1"' in blocks[0]
    assert "boxed or answer_tag: found nothing" in blocks[1]
    assert "mean reward 0.3333" in blocks[2]
    assert "\x1b" not in out


def test_the_configs_templates_apply_to_its_own_path(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.yaml"
    part = {"path": data, "ground_truth": "{prompt}", "ground_truth_extract": ["regex:^(.)"]}
    config.write_text(json.dumps({"model": {"path": "none"}, "data": {"path": [part]}}))
    file = answers(tmp_path, {"answer": "2", "row": 2})
    assert main(["reward", "test", data, "--answers", file, "--config", str(config)]) == 0
    assert 'ground truth "2"' in capsys.readouterr().out


def test_an_answer_that_no_scorer_could_score_fails_the_command(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = tmp_path / "mine.py"
    scorer.write_text("async def score(solution_str):\n    return 1 / float(solution_str)\n")
    file = answers(tmp_path, {"answer": "no"}, {"answer": "2"})
    assert main(["reward", "test", data, "--answers", file, f"reward.functions=[{{name: '{scorer}:score'}}]"]) == 1
    out = capsys.readouterr().out
    assert "not scored" in out and "2 answers, 1 scored, mean reward 0.5000" in out


@pytest.mark.parametrize(
    ("line", "named"),
    [('{"answer": 3}', "line 1"), ("yes", "line 1"), ('{"answer": "3", "row": 9}', "row 9"), ("", "is empty")],
)
def test_a_mistake_in_the_file_is_one_line(
    tmp_path: Path, data: str, line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reward", "test", data, "--answers", answers(tmp_path, line)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --answers") and named in captured.err and captured.err.count("\n") == 1
