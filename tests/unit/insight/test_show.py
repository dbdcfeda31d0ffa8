"""``rl-async show`` finds the step's rows and marks what did not train fully."""

import gzip
import io
import json
import zipfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from rl_async.configs.load import dump, load_config
from rl_async.errors import EXIT_USER, UserError
from rl_async.insight.recorded_evaluations import compare, read_evaluation, show_evaluations, write_lines
from rl_async.insight.show import ERRORS, read_step, render, reward_parts, show, turn_rewards
from rl_async.insight.view.trajectories import RecordedRow
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Explanation, Media, RuleRun, Sampling, Trajectory, Turn
from rl_async.process.role import say
from rl_async.recording import images_file, write_trajectories
from tests.conftest import make_rows
from tests.support.tiny_models import drawing


def words(ids: Sequence[int]) -> str:
    return "".join("abcdefghij"[i] for i in ids)


def row(
    sample: int = 0,
    weights: Sequence[float] = (1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 1.0),
    segment: int = 0,
    reward: float = 1.0,
    role: str = "",
) -> RecordedRow:
    """Three tokens of context, seven sampled."""
    rules = [RuleRun("band", 3, 4), RuleRun("seq_mean_k1", 4, 6)] if 0.0 in weights else []
    return RecordedRow(
        task_id="a",
        group_id=4,
        sample=sample,
        segment=segment,
        reward=reward,
        role=role,
        token_ids=list(range(10)),
        loss_mask=[False] * 3 + [True] * 7,
        logprobs=[0.0] * 10,
        versions=[],
        sampling=Sampling(temperature=1.0),
        correction=Explanation(weights=list(weights), rules=rules),
    )


def write(folder: Path, name: str, *rows: RecordedRow) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    with gzip.open(folder / name, "wb") as file:
        file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def test_tokens_are_marked_with_the_rule_or_the_weight() -> None:
    text = render(row(), words)
    assert text.plain == "abcd{ef}(x0.25){g}(band){hi}(seq_mean_k1)j"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"abc": "dim", "{ef}(x0.25)": "yellow", "{g}(band)": "magenta", "{hi}(seq_mean_k1)": "red"}


def test_turn_rewards_are_shown_with_their_reasons() -> None:
    turns = [Turn(role="user", text=""), Turn(role="assistant", text="", reward=-0.5, reason="wrong\x1b[2J guess")]
    shown = turn_rewards(msgspec.structs.replace(row(), turns=turns))
    assert shown == ["turn 1: reward -0.5 (wrong\\x1b[2J guess)"]


def test_parts_of_the_reward_are_shown_with_their_reasons(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, reasons = {"judge": 0.5, "judge/raw": 5.0}, {"judge": "polite \x1b[2J"}
    judged = msgspec.structs.replace(row(), reward_parts=parts, reward_reasons=reasons)
    write(run / "trajectories", "step-000009-lineage0-rank0.jsonl.gz", judged)
    assert main(["show", str(run), "--step", "9"]) == 0
    assert "judge: reward 0.5 (polite \\x1b[2J)" in capsys.readouterr().out


def test_the_most_frequent_errors_of_a_step_are_shown_with_their_counts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = ["bad answer \x1b[2J", *["reward mine.py:f: ValueError: 7"] * 2, "", "c", "d"]
    rows = [msgspec.structs.replace(row(n), error=error, scored=not error) for n, error in enumerate(errors)]
    write(run / "trajectories", "step-000009-lineage0-rank0.jsonl.gz", *rows)
    assert main(["show", str(run), "--step", "9"]) == 0
    out = capsys.readouterr().out
    shown = [line for line in out.splitlines() if "6 rows" in line]
    assert ", not scored" in out
    assert "2 of" in shown[0] and "mine.py:f: ValueError: 7" in shown[0] and "\\x1b[2J" in shown[1]
    assert len(shown) == ERRORS


def test_the_reason_for_the_whole_reward_of_an_agent_program_is_shown() -> None:
    graded = msgspec.structs.replace(row(), reward=0.25, reward_parts={}, reward_reasons={"reward": "a quarter"})
    assert reward_parts(graded) == ["reward: reward 0.25 (a quarter)"]


def test_escape_sequences_of_a_model_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(row(), correction=None)
    shown = render(plain, lambda ids: "a\x1b]0;owned\x07\x9b2J\r\u202e\n\tb").plain
    assert shown == "a\\x1b]0;owned\\x07\\x9b2J\\r\\u202e\n\tb" * 2


def test_a_row_without_explanation_is_shown_plainly() -> None:
    assert render(msgspec.structs.replace(row(), correction=None), words).plain == "abcdefghij"


def test_a_step_is_read_from_all_ranks_of_its_newest_lineage(tmp_path: Path) -> None:
    write(tmp_path, "step-000002-lineage0-rank0.jsonl.gz", row(9))
    write(tmp_path, "step-000002-lineage10-rank0.jsonl.gz", row(1))
    write(tmp_path, "step-000002-lineage10-rank1.jsonl.gz", row(0))
    write(tmp_path, "step-000003-lineage9-rank0.jsonl.gz", row(7))  # abandoned by a resume
    write(tmp_path, "step-000001-lineage0-rank0.jsonl.gz", row(5))
    step, rows = read_step(tmp_path, None)
    assert step == 2 and [r.sample for r in rows] == [0, 1]
    assert [r.sample for r in read_step(tmp_path, 1)[1]] == [5]
    with pytest.raises(UserError, match="steps 1 to 3, counted from 0"):
        read_step(tmp_path, 7)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    vocabulary = {letter: number for number, letter in enumerate("abcdefghij")}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.yaml").write_text(dump(load_config("calculator", [f"model.path={tmp_path}"])))
    write(
        tmp_path / "trajectories", "step-000003-lineage0-rank0.jsonl.gz", row(0, [1.0] * 7), row(1), row(2, [1.0] * 7)
    )
    return tmp_path


def test_images_are_shown_by_their_sizes_and_once_where_they_stand(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    media = [Media.of(drawing(1), "image/png", 1), Media.of(b"lost", "image/gif", 6)]
    shown = msgspec.structs.replace(row(), token_ids=[0, 1, 1, 1, 2, 3, 4, 4, 5, 6], media=media)
    write(run / "trajectories", "step-000009-lineage0-rank0.jsonl.gz", shown)
    file = images_file(run / "trajectories" / "step-000009-lineage0-rank0.jsonl.gz")
    with zipfile.ZipFile(file, "w") as images:
        images.writestr(media[0].sha256, drawing(1))
    assert main(["show", str(run), "--step", "9"]) == 0
    found = capsys.readouterr().out
    assert f"image at token 1: image/png, 40 x 24 pixels, {len(drawing(1)):,} bytes" in found
    assert "image at token 6: image/gif, not recorded" in found
    assert render(shown, words).plain == "ab{cd}(x0.25){e}(band){f}(seq_mean_k1)g"


def test_the_most_corrected_row_is_shown_below_the_table(run: Path) -> None:
    out = StringIO()
    show(run, None, None, None, Console(file=out, width=120))
    assert "step 3" in out.getvalue() and "band 1, seq_mean_k1 2" in out.getvalue()
    assert "group 4, sample 1, reward 1" in out.getvalue() and "{h i}(seq_mean_k1)" in out.getvalue()


def test_a_row_can_be_named_on_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--step", "3", "--group", "4", "--sample", "2"]) == 0
    assert "group 4, sample 2" in capsys.readouterr().out
    assert main(["show", str(run), "--group", "4"]) == 0
    assert "step 3, group 4" in (told := capsys.readouterr().out) and "group 4, sample 1" in told
    assert main(["show", str(run), "--group", "5"]) == 2
    assert "--group 5" in capsys.readouterr().err


def test_what_is_not_there_is_named_as_it_was_asked_for(run: Path) -> None:
    with pytest.raises(UserError, match=r"--group 99$"):
        show(run, None, 99, None)
    with pytest.raises(UserError, match=str(run / "elsewhere")):
        show(run / "elsewhere", None, None, None)
    (recorded,) = (run / "trajectories").iterdir()
    whole = recorded.read_bytes()
    for damaged in (whole[:-4], b"nothing", whole[:60] + b"?" + whole[61:], gzip.compress(b'{"role": "\xff"}')):
        recorded.write_bytes(damaged)
        with pytest.raises(UserError, match=recorded.name):
            show(run, None, None, None)
    recorded.write_bytes(whole)
    (run / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        show(run, None, None, None)


def test_rows_of_one_sample_are_told_apart(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean, marked = row(0, [1.0] * 7), row(0, segment=1)
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", marked, clean)
    assert [r.segment for r in read_step(run / "trajectories", 4)[1]] == [0, 1]
    assert main(["show", str(run), "--step", "4", "--group", "4", "--sample", "0"]) == 0
    assert "group 4, sample 0, segment 1, reward 1" in capsys.readouterr().out


def test_a_groups_reward_is_the_mean_over_its_episodes(run: Path) -> None:
    rows = [row(0, segment=number, reward=1.0) for number in range(3)] + [row(1, reward=0.0)]
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", *rows)
    out = StringIO()
    show(run, 4, None, None, Console(file=out, width=120))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [cell.strip() for cell in line.split("│")[1:5]] == ["4", "2", "4", "0.5"]


def test_what_was_not_scored_is_in_no_mean(run: Path) -> None:
    rows = [row(0, reward=1.0), row(1, reward=0.0), row(2, reward=0.0, segment=1)]
    rows[1].scored = False
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", *rows)
    rows[0].scored = rows[2].scored = False
    write(run / "trajectories", "step-000005-lineage0-rank0.jsonl.gz", *rows)
    for step, reward in ((4, "0.5"), (5, "not scored")):
        out = StringIO()
        show(run, step, None, None, Console(file=out, width=120))
        (line,) = [line for line in out.getvalue().splitlines() if line.startswith("│")]
        assert [cell.strip() for cell in line.split("│")[1:5]] == ["4", "3", "3", reward]


def test_roles_are_told_apart_and_an_episodes_reward_is_the_mean_of_theirs(run: Path) -> None:
    played = (("buyer", 1.0, 0), ("seller", 0.0, 1), ("seller", 0.0, 2))
    rows = [row(0, [1.0] * 7, segment=number, reward=reward, role=role) for role, reward, number in played]
    write(run / "trajectories", "step-000004-lineage0-rank0.jsonl.gz", *rows)
    out = StringIO()
    show(run, 4, None, None, Console(file=out, width=120))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [cell.strip() for cell in line.split("│")[1:5]] == ["4", "1", "3", "0.5"]
    assert "group 4, sample 0, role buyer, reward 1" in out.getvalue()


# Text of any origin does not steer the terminal.


def test_a_line_is_printed_as_it_is_but_for_control_characters() -> None:
    output = io.StringIO()
    say(Console(file=output, force_terminal=True, width=20), "[bold] 12 \x1b[2J\x9b1m and a line longer than that")
    assert output.getvalue() == "[bold] 12 \\x1b[2J\\x9b1m and a line longer than that\n"


# Recorded evaluations: reading, comparing and printing them.


def evaluation_row(task: int, sample: int, reward: float, source: str = "math", **changes: object) -> Trajectory:
    turns = [Turn(role="user", text=f"What is {task}?"), Turn(role="assistant", text=f"It is \x1b[31m{reward}")]
    named = {"task_id": f"{source}:{task}", "data_source": source, "group_id": task, "sample": sample}
    return msgspec.structs.replace(
        make_rows(0)[0], **(named | {"segment": 0, "reward": reward, "turns": turns} | changes)
    )


def record(run: Path, step: int, *rows: Trajectory) -> str:
    write_trajectories(run / "trajectories" / f"eval-{step:06d}.jsonl.gz", rows)
    return str(run)


def test_changes_by_source_and_the_worst_tasks_first(tmp_path: Path) -> None:
    old = [
        evaluation_row(0, 0, 1.0),
        evaluation_row(0, 1, 0.0),
        evaluation_row(1, 0, 1.0),
        evaluation_row(2, 0, 0.0, "code"),
        evaluation_row(9, 0, 1.0),
    ]
    new = [
        evaluation_row(0, 0, 1.0),
        evaluation_row(0, 1, 1.0),
        evaluation_row(1, 0, 0.0),
        evaluation_row(2, 0, 0.0, "code"),
    ]
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
    rows = [evaluation_row(0, 0, 1.0), evaluation_row(0, 0, 1.0, segment=1), evaluation_row(0, 1, 1.0, scored=False)]
    evaluation = read_evaluation(record(tmp_path / "run", 3, *rows))
    assert ([*evaluation.means.values()], evaluation.unscored) == ([0.5], 1)


def test_a_file_of_json_lines_is_an_evaluation_too(tmp_path: Path) -> None:
    old, new = (
        [evaluation_row(0, 0, 1.0), evaluation_row(0, 1, 0.0), evaluation_row(1, 0, 1.0)],
        [evaluation_row(0, 0, 1.0), evaluation_row(0, 1, 1.0), evaluation_row(1, 0, 0.0)],
    )
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
    first = record(tmp_path / "a", 0, evaluation_row(0, 0, 1.0), evaluation_row(1, 0, 1.0))
    system = [Turn(role="system", text="Be brief."), *evaluation_row(0, 0, 1.0).turns]
    other = record(tmp_path / "b", 0, evaluation_row(0, 0, 1.0, turns=system), evaluation_row(1, 0, 0.0, scored=False))
    found = compare(read_evaluation(first), read_evaluation(other))
    assert ([task.task for task in found.tasks], found.left_out, found.unscored) == (["math:1"], 1, (0, 1))
    strange = record(tmp_path / "c", 0, evaluation_row(7, 0, 1.0))
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
    before = evaluated("a", evaluation_row(0, 2, 0.5), evaluation_row(0, 1, 1.0), evaluation_row(1, 1, 1.0))
    after = evaluated("b", evaluation_row(0, 1, 0.0), evaluation_row(1, 1, 0.0, turns=changed))
    found = compare(read_evaluation(before), read_evaluation(after))
    assert ([task.task for task in found.tasks], found.left_out) == (["math:0"], 1)
    assert found.tasks[0].question == "What is 0?" and found.tasks[0].replied_before.endswith("1.0")


def test_what_others_said_later_does_not_make_another_task(tmp_path: Path) -> None:
    def played(*said: str) -> Trajectory:
        roles = ("user", "assistant", "user", "assistant")
        return evaluation_row(0, 0, 1.0, turns=[Turn(role=role, text=text) for role, text in zip(roles, said)])

    first = record(tmp_path / "a", 0, played("Q", "x", "wrong, try again", "y"))
    second = record(tmp_path / "b", 0, played("Q", "z", "right", "ok"))
    (task,) = compare(read_evaluation(first), read_evaluation(second)).tasks
    assert (task.question, task.replied_before, task.replied_after) == ("Q", "y", "ok")


def test_roles_are_compared_one_by_one(tmp_path: Path) -> None:
    def game(won: float) -> list[Trajectory]:
        return [evaluation_row(0, 0, won, role="first"), evaluation_row(0, 0, -won, role="second", segment=1)]

    runs = [record(tmp_path / name, 0, *game(won)) for name, won in (("a", -1.0), ("b", 1.0))]
    found = compare(*map(read_evaluation, runs))
    lines = {line.source: line.change.value for line in found.sources}
    assert lines == {"math as first": 2.0, "math as second": -2.0, "all": 0.0}


def test_a_task_counts_once_in_the_total_whatever_its_roles(tmp_path: Path) -> None:
    def games(won: float) -> list[Trajectory]:
        roles = ("first", "second")
        return [evaluation_row(task, 0, won, role=role, segment=n) for task in range(5) for n, role in enumerate(roles)]

    runs = [record(tmp_path / name, 0, *games(won)) for name, won in (("a", 0.0), ("b", 1.0))]
    found = {line.source: line for line in compare(*map(read_evaluation, runs)).sources}
    assert [(line.tasks, line.better, line.p) for line in found.values()] == [(5, 5, 2 / 2**5)] * 3


def test_what_rounding_explains_is_no_change(tmp_path: Path) -> None:
    """The same three parts of a reward, added in another order."""
    runs = [
        record(tmp_path / name, 0, *(evaluation_row(task, 0, reward) for task in range(20)))
        for name, reward in (("a", 0.7 + 0.2 + 0.1), ("b", 0.1 + 0.2 + 0.7))
    ]
    assert 0.7 + 0.2 + 0.1 != 0.1 + 0.2 + 0.7
    (line,) = compare(*map(read_evaluation, runs)).sources
    assert (line.better, line.worse, line.change.value, line.p) == (0, 0, 0.0, 1.0)


def test_the_order_of_samples_changes_nothing(tmp_path: Path) -> None:
    rewards = (0.1, 0.2, 0.3)
    runs = [
        record(
            tmp_path / name,
            0,
            *(evaluation_row(task, n, reward) for task in range(20) for n, reward in enumerate(order)),
        )
        for name, order in (("a", rewards), ("b", rewards[::-1]))
    ]
    (line,) = compare(*map(read_evaluation, runs)).sources
    assert (line.better, line.worse, line.change.value, line.p) == (0, 0, 0.0, 1.0)


@pytest.mark.parametrize(("where", "named"), [("missing", "missing"), ("run@5", "version 5"), ("empty", "eval_path")])
def test_what_is_not_there_is_named(tmp_path: Path, where: str, named: str) -> None:
    record(tmp_path / "run", 0, evaluation_row(0, 0, 1.0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=named):
        read_evaluation(str(tmp_path / where))


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", 0, evaluation_row(0, 0, 1.0), evaluation_row(1, 0, 0.0))
    record(tmp_path / "run", 4, evaluation_row(0, 0, 0.0), evaluation_row(1, 0, 1.0))
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
