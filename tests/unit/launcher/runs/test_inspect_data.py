"""``rl-async data inspect``: columns, tasks, and templates that make tasks of the rows that it refuses."""

import json
import shlex
from pathlib import Path

import pytest

from rl_async.errors import EXIT_USER
from rl_async.launcher.cli.__main__ import main
from tests.unit.launcher.runs.test_replay_episode import renderer_in


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.csv"
    file.write_text('question,answer,level\n"what is 1+1?",2,easy\n"a ""quoted"" one\nover lines",007,hard\n')
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["data", "inspect", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_suggested_templates_make_tasks_of_the_rows(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, questions)
    assert code == EXIT_USER and "level" in out and "row 0" in error
    (given,) = (word for word in shlex.split(error.replace("error: ", "")) if word.startswith("data.path="))
    given = given.replace("FILE", str(questions))
    code, out, _ = run(capsys, "--config", model_config(questions.parent), given)
    assert code == 0 and 'user: a "quoted" one\nover lines\nground_truth: 007' in out


def model_config(folder: Path) -> Path:
    config = folder / "mine.yaml"
    config.write_text(f"model: {{path: {folder}/model}}\ndata: {{path: none, max_prompt_tokens: 12}}\n")
    return config


def test_a_prompt_is_shown_as_the_model_reads_it(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renderer_in(questions.parent / "model")
    templates = f"data.path=[{{path: {questions}, prompt: '{{question}}', ground_truth: '{{answer}}'}}]"
    code, out, _ = run(capsys, "--config", model_config(questions.parent), templates)
    assert code == 0 and "<|im_start|>user\nwhat is 1+1?<|im_end|>" in out
    assert "data.max_prompt_tokens=12 tokens: 2" in out


def test_rows_of_other_commands_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": said}))
    code, out, _ = run(capsys, tmp_path / "talks.jsonl")
    assert code == 0 and "rl-async sft" in out


def test_a_missing_value_is_counted_and_its_row_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "1+1?", "reward_model": {"ground_truth": "2"}}, {"prompt": "2+2?", "reward_model": None}]
    (tmp_path / "gap.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, error = run(capsys, tmp_path / "gap.jsonl")
    assert code == EXIT_USER and "missing in 1" in out and "row 1" in error and "template" not in error


@pytest.mark.parametrize("arguments", [[], ["x.csv", "data.shuffle=false"], ["none.csv"]])
def test_what_cannot_be_inspected_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *arguments)[0] == EXIT_USER
