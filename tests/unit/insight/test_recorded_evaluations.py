"""Recorded evaluations: reading, comparing and printing them."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rl_async.configs.load import dump, load_config
from rl_async.errors import EXIT_USER, UserError
from rl_async.insight.recorded_evaluations import compare, read_evaluation, show_evaluations, write_lines
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Trajectory, Turn
from rl_async.recording import write_trajectories
from tests.conftest import make_rows


def row(task: int, sample: int, reward: float, source: str = "math", **changes: object) -> Trajectory:
    turns = [Turn(role="user", text=f"What is {task}?"), Turn(role="assistant", text=f"It is \x1b[31m{reward}")]
    named = {"task_id": f"{source}:{task}", "data_source": source, "group_id": task, "sample": sample}
    return msgspec.structs.replace(
        make_rows(0)[0], **(named | {"segment": 0, "reward": reward, "turns": turns} | changes)
    )


def record(run: Path, step: int, *rows: Trajectory) -> str:
    write_trajectories(run / "trajectories" / f"eval-{step:06d}.jsonl.gz", rows)
    return str(run)


def test_changes_by_source_and_the_worst_tasks_first(tmp_path: Path) -> None:
    old = [row(0, 0, 1.0), row(0, 1, 0.0), row(1, 0, 1.0), row(2, 0, 0.0, "code"), row(9, 0, 1.0)]
    new = [row(0, 0, 1.0), row(0, 1, 1.0), row(1, 0, 0.0), row(2, 0, 0.0, "code")]
    run = record(tmp_path / "run", 0, *old)
    record(tmp_path / "run", 20, *new)
    found = compare(read_evaluation(f"{run}@0"), read_evaluation(run))
    assert (found.before, found.after, found.left_out) == ("run@0", "run@20", 1)
    code, math, everything = found.sources
    assert (code.source, code.tasks, code.change.value, code.p) == ("code", 1, 0.0, 1.0)
    assert (math.tasks, math.before.value, math.after.value, math.better, math.worse) == (2, 0.75, 0.5, 1, 1)
    assert math.change.value == pytest.approx(-0.25) and math.p == 1.0
    assert (everything.source, everything.tasks) == ("all", 3)
    assert [task.task for task in found.tasks] == ["math:1", "code:2", "math:0"]
    assert (found.tasks[0].before, found.tasks[0].after, found.tasks[0].question) == (1.0, 0.0, "What is 1?")


def test_episodes_that_were_not_scored_count_as_zero_and_rows_of_one_once(tmp_path: Path) -> None:
    rows = [row(0, 0, 1.0), row(0, 0, 1.0, segment=1), row(0, 1, 1.0, scored=False)]
    evaluation = read_evaluation(record(tmp_path / "run", 3, *rows))
    assert ([*evaluation.means.values()], evaluation.unscored) == ([0.5], 1)


def test_a_file_of_json_lines_is_an_evaluation_too(tmp_path: Path) -> None:
    old, new = [row(0, 0, 1.0), row(0, 1, 0.0), row(1, 0, 1.0)], [row(0, 0, 1.0), row(0, 1, 1.0), row(1, 0, 0.0)]
    run, file = record(tmp_path / "run", 0, *old), tmp_path / "endpoint.jsonl"
    write_lines(file, new)
    found = compare(read_evaluation(run), read_evaluation(str(file)))
    recorded = compare(read_evaluation(run), read_evaluation(record(tmp_path / "other", 0, *new)))
    assert (found.sources, found.tasks, found.left_out) == (recorded.sources, recorded.tasks, 0)
    assert (found.after, found.tasks[0].task) == ("endpoint.jsonl", "math:1")
    file.write_text(file.read_text() + '{"task": 1}\n')
    with pytest.raises(UserError, match="line 4"):
        read_evaluation(str(file))


def test_a_task_that_asks_something_else_is_left_out(tmp_path: Path) -> None:
    first = record(tmp_path / "a", 0, row(0, 0, 1.0), row(1, 0, 1.0))
    system = [Turn(role="system", text="Be brief."), *row(0, 0, 1.0).turns]
    other = record(tmp_path / "b", 0, row(0, 0, 1.0, turns=system), row(1, 0, 0.0, scored=False))
    found = compare(read_evaluation(first), read_evaluation(other))
    assert ([task.task for task in found.tasks], found.left_out, found.unscored) == (["math:1"], 1, (0, 1))
    strange = record(tmp_path / "c", 0, row(7, 0, 1.0))
    with pytest.raises(UserError, match="a@0 and c@0"):
        compare(read_evaluation(first), read_evaluation(strange))


@pytest.mark.parametrize("as_lines", [False, True])
def test_a_task_without_its_first_sample_is_told_apart_by_the_next(tmp_path: Path, as_lines: bool) -> None:
    def evaluated(name: str, *rows: Trajectory) -> str:
        if not as_lines:
            return record(tmp_path / name, 0, *rows)
        write_lines(tmp_path / f"{name}.jsonl", rows)
        return str(tmp_path / f"{name}.jsonl")

    changed = [Turn(role="user", text="Something else"), Turn(role="assistant", text="?")]
    before = evaluated("a", row(0, 2, 0.5), row(0, 1, 1.0), row(1, 1, 1.0))
    after = evaluated("b", row(0, 1, 0.0), row(1, 1, 0.0, turns=changed))
    found = compare(read_evaluation(before), read_evaluation(after))
    assert ([task.task for task in found.tasks], found.left_out) == (["math:0"], 1)
    assert found.tasks[0].question == "What is 0?" and found.tasks[0].replied_before.endswith("1.0")


def test_what_others_said_later_does_not_make_another_task(tmp_path: Path) -> None:
    def played(*said: str) -> Trajectory:
        roles = ("user", "assistant", "user", "assistant")
        return row(0, 0, 1.0, turns=[Turn(role=role, text=text) for role, text in zip(roles, said)])

    first = record(tmp_path / "a", 0, played("Q", "x", "wrong, try again", "y"))
    second = record(tmp_path / "b", 0, played("Q", "z", "right", "ok"))
    (task,) = compare(read_evaluation(first), read_evaluation(second)).tasks
    assert (task.question, task.replied_before, task.replied_after) == ("Q", "y", "ok")


def test_roles_are_compared_one_by_one(tmp_path: Path) -> None:
    def game(won: float) -> list[Trajectory]:
        return [row(0, 0, won, role="first"), row(0, 0, -won, role="second", segment=1)]

    runs = [record(tmp_path / name, 0, *game(won)) for name, won in (("a", -1.0), ("b", 1.0))]
    found = compare(*map(read_evaluation, runs))
    lines = {line.source: line.change.value for line in found.sources}
    assert lines == {"math as first": 2.0, "math as second": -2.0, "all": 0.0}


def test_a_task_counts_once_in_the_total_whatever_its_roles(tmp_path: Path) -> None:
    def games(won: float) -> list[Trajectory]:
        roles = ("first", "second")
        return [row(task, 0, won, role=role, segment=n) for task in range(5) for n, role in enumerate(roles)]

    runs = [record(tmp_path / name, 0, *games(won)) for name, won in (("a", 0.0), ("b", 1.0))]
    found = {line.source: line for line in compare(*map(read_evaluation, runs)).sources}
    assert [(line.tasks, line.better, line.p) for line in found.values()] == [(5, 5, 2 / 2**5)] * 3


def test_what_rounding_explains_is_no_change(tmp_path: Path) -> None:
    """The same three parts of a reward, added in another order."""
    runs = [
        record(tmp_path / name, 0, *(row(task, 0, reward) for task in range(20)))
        for name, reward in (("a", 0.7 + 0.2 + 0.1), ("b", 0.1 + 0.2 + 0.7))
    ]
    assert 0.7 + 0.2 + 0.1 != 0.1 + 0.2 + 0.7
    (line,) = compare(*map(read_evaluation, runs)).sources
    assert (line.better, line.worse, line.change.value, line.p) == (0, 0, 0.0, 1.0)


def test_the_order_of_samples_changes_nothing(tmp_path: Path) -> None:
    rewards = (0.1, 0.2, 0.3)
    runs = [
        record(tmp_path / name, 0, *(row(task, n, reward) for task in range(20) for n, reward in enumerate(order)))
        for name, order in (("a", rewards), ("b", rewards[::-1]))
    ]
    (line,) = compare(*map(read_evaluation, runs)).sources
    assert (line.better, line.worse, line.change.value, line.p) == (0, 0, 0.0, 1.0)


@pytest.mark.parametrize(("where", "named"), [("missing", "missing"), ("run@5", "version 5"), ("empty", "eval_path")])
def test_what_is_not_there_is_named(tmp_path: Path, where: str, named: str) -> None:
    record(tmp_path / "run", 0, row(0, 0, 1.0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=named):
        read_evaluation(str(tmp_path / where))


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", 0, row(0, 0, 1.0), row(1, 0, 0.0))
    record(tmp_path / "run", 4, row(0, 0, 0.0), row(1, 0, 1.0))
    assert main(["compare", f"{run}@0", f"{run}@4"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b[31m" not in printed and "What is 0?" in printed
    assert printed.index("What is 0?") < printed.index("What is 1?")
    assert main(["compare", f"{run}@0", f"{run}@4", "--json"]) == 0
    assert [task["task"] for task in json.loads(capsys.readouterr().out)["tasks"]] == ["math:0", "math:1"]
    assert main(["compare", f"{run}@1", run]) == EXIT_USER
    assert main(["compare", f"{run}@4", f"{run}@4"]) == EXIT_USER


def answered(task: str, question: str, answer: str, reward: float) -> Trajectory:
    turns = [Turn(role="user", text=question), Turn(role="assistant", text=answer)]
    return msgspec.structs.replace(make_rows(0)[0], task_id=task, sample=0, segment=0, reward=reward, turns=turns)


def test_the_first_and_the_last_evaluation_stand_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    first = [
        answered("t:0", "What is 1 + 1?", "It is [bold]3[/bold]\x1b[2J", 0.0),
        answered("t:1", "What is 2 + 2?", "4", 1.0),
    ]
    last = [
        answered("t:1", "What is 2 + 2?", "four", 0.0),
        answered("t:0", "What is 1 + 1?", "2", 1.0),
        answered("t:9", "?", "9", 1.0),
    ]
    for step, rows in ((0, first), (5, first), (10, last)):
        write_trajectories(folder / f"eval-{step:06d}.jsonl.gz", rows)
    console = Console(width=200, record=True, file=io.StringIO())
    show_evaluations(tmp_path, console)
    text = console.export_text()
    improved, worse = (next(line for line in text.splitlines() if question in line) for question in ("1 + 1", "2 + 2"))
    assert "[bold]3[/bold]" in improved and "2" in improved and "\x1b" not in text
    assert text.index(improved) < text.index(worse)
    assert "version 0" in text and "version 10" in text and "mean reward of 2" in text and text.count("0.500") == 2


def test_each_source_has_a_line_before_and_after_with_the_rewards_that_pass_in_this_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(load_config("calculator", ["eval.solved=0.5"])))
    rows = [answered("t:0", "?", "a", 0.5), answered("t:1", "?", "b", 0.0)]
    sources = [msgspec.structs.replace(one, data_source=one.task_id, group_id=at) for at, one in enumerate(rows)]
    for step in (0, 5):
        write_trajectories(tmp_path / "trajectories" / f"eval-{step:06d}.jsonl.gz", sources)
    console = Console(width=200, record=True, file=io.StringIO())
    show_evaluations(tmp_path, console)
    lines = [words for words in map(str.split, console.export_text().splitlines()) if "[" in "".join(words)]
    assert [(words[0], words[1], words[3], words[6]) for words in lines] == 2 * [
        ("t:0", "1", "0.500", "1.000"),
        ("t:1", "1", "0.000", "0.000"),
        ("all", "2", "0.250", "0.500"),
    ]


def test_one_evaluation_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.before"):
        show_evaluations(tmp_path)


def test_a_run_that_is_not_there_is_told_from_one_without_evaluations(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        show_evaluations(tmp_path / "missing")
