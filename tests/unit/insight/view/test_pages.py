"""What pages show is computed: metrics as columns, a token's story, evaluations with intervals."""

import json
import os
import threading
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rl_async.errors import RequestRefused
from rl_async.evaluation import wilson
from rl_async.insight.recorded_evaluations import compare as by_files
from rl_async.insight.recorded_evaluations import read_evaluation
from rl_async.insight.view.index import TrajectoryIndex
from rl_async.insight.view.queries import compared, recorded, table
from rl_async.insight.view.runs import MetricColumns, ViewedRun
from rl_async.insight.view.trajectories import RecordedRow, lines, story, token_texts, tokenizer_of
from rl_async.messages import Trajectory, Version, VersionRun
from rl_async.recording import write_trajectories
from tests.conftest import make_rows
from tests.support.recordings import conversation, make_run, write_evaluation, write_step


def append(path: Path, *records: dict[str, float | None]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_columns_follow_a_run_through_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    columns = MetricColumns(path)
    columns.refresh()
    assert columns.since(["a"], -1, 0)["steps"] == []
    append(path, {"step": 0, "a": 1.0}, {"step": 1, "a": 2.0, "b": 5.0}, {"step": 2, "b": None})
    columns.refresh()
    first = columns.since(["a", "b", "none"], -1, 0)
    assert first["steps"] == [0, 1, 2] and first["columns"] == {"a": [1.0, 2.0, None], "b": [None, 5.0, None]}
    append(path, {"step": 3, "a": 4.0})
    columns.refresh()
    more = columns.since(["a", "b"], first["epoch"], 3)
    assert (more["begin"], more["steps"], more["columns"]) == (3, [3], {"a": [4.0], "b": [None]})
    append(path, {"step": 1, "a": 9.0})
    columns.refresh()
    again = columns.since(["a"], more["epoch"], 4)
    assert (again["begin"], again["steps"], again["columns"]) == (0, [0, 1], {"a": [1.0, 9.0]})
    assert again["epoch"] != more["epoch"] and columns.last("a") == 9.0 and columns.last("c") is None


def test_a_run_says_what_it_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text(
        "data: {path: [{path: a.jsonl}, {path: b.jsonl, weight: 2}]}\nalgorithm: {advantage: grpo, loss: ppo}\n"
    )
    (folder / "machine.json").write_text('{"commit": "abc"}')
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    append(folder / "metrics.jsonl", {"step": 0, "time": 1000.0, "time/step_s": 8.0}, {"step": 1, "time": 1010.0})
    run = ViewedRun("run", folder)
    run.refresh()
    told = run.summary()
    assert (told["data"], told["algorithm"], told["commit"]) == ("a.jsonl, b.jsonl", "grpo, ppo", "abc")
    assert (told["started"], told["ended"], told["running"]) == (992.0, 1010.0, False)


def test_columns_of_a_file_that_is_replaced_by_a_shorter_one(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    append(path, *({"step": step, "a": 1.0} for step in range(5)))
    columns = MetricColumns(path)
    columns.refresh()
    append(other, {"step": 0, "a": 7.0})
    other.rename(path)
    columns.refresh()
    assert columns.since(["a"], -1, 0)["columns"] == {"a": [7.0]}


def test_the_newest_evaluation_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    run = ViewedRun("run", tmp_path)
    append(path, {"eval/step": 4, "eval/reward": 0.1}, {"eval/step": 0, "eval/reward": 0.0})
    append(path, {"eval/step": 4, "eval/reward": 0.2})
    run.refresh()
    assert [record["eval/reward"] for record in run.evaluations()] == [0.0, 0.2]


def test_a_line_that_is_no_record_hides_none_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, {"step": 0, "a": 1.0})
    with path.open("a") as file:
        file.write('{"step": 1, "a"\n{"a": 1}\n{"step": -1e30, "a": 1}\n{"step": 1e30, "a": 1}\n')
    append(path, {"step": 2, "a": 3.0})
    columns = MetricColumns(path)
    columns.refresh()
    assert columns.since(["a"], -1, 0)["columns"] == {"a": [1.0, 3.0]} and "line 5" in columns.records.problem


def first_row(file: Path) -> RecordedRow:
    _, line = next(lines(file))
    return msgspec.json.decode(line, type=RecordedRow)


def test_the_story_of_each_token(tmp_path: Path) -> None:
    (row,) = make_rows(5, groups=1, samples=1)
    sampled = int(row.loss_mask.sum())
    row.versions = [VersionRun(Version(0, 3), 0, 2), VersionRun(Version(1, 5), 2, sampled)]
    row.constrained = [(1, 3)]
    row.turns = conversation("a", "b")
    read = first_row(write_step(tmp_path, 5, [row], masked=1))
    told = story(read, 5, None)
    tokens = told["tokens"]
    first = 4  # of the sampled tokens
    assert {len(values) for values in tokens.values()} == {len(row.token_ids)}
    assert tokens["version"][first - 1 : first + 3] == [None, [0, 3], [0, 3], [1, 5]]
    assert tokens["staleness"][first - 1 : first + 3] == [None, 2, 2, 0]
    assert tokens["weight"][first - 1 : first + 2] == [None, 0.0, 0.5]
    assert [place for place, one in enumerate(tokens["constrained"]) if one] == [first + 1, first + 2]
    assert tokens["rule"][first - 1 : first + 2] == [None, "token_k3", None]
    assert tokens["advantage"][first - 1 :] == [None, *[1.5] * sampled]
    assert tokens["trained_logprob"][first] == pytest.approx(float(row.logprobs[first]) + 0.25)
    assert tokens["logprob"][first - 1 : first + 1] == [None, pytest.approx(float(row.logprobs[first]))]
    assert tokens["turn"][:first] == [0] * first and tokens["turn"][first] == 1
    assert told["turns"][1]["reason"] == "on time"


def test_a_row_of_an_older_run_has_weights_alone(tmp_path: Path) -> None:
    (row,) = make_rows(0, groups=1, samples=1)
    read = first_row(write_step(tmp_path, 0, [row]))
    assert read.correction is not None
    read.correction = msgspec.structs.replace(read.correction, logprobs=[], advantages=[])
    tokens = story(read, 0, None)["tokens"]
    assert set(tokens["advantage"]) == set(tokens["trained_logprob"]) == {None} and tokens["weight"][4] == 0.5


def byte_tokenizer() -> Tokenizer:
    """One token per byte, as byte-level BPE has it before any merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["plain words", "né 日本 🙂 x", "a\x1b[31m\u202e<script>\n\n ", "🙂" * 30])
def test_token_texts_make_up_the_whole_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    texts = token_texts(ids, lambda part: tokenizer.decode(list(part), skip_special_tokens=False))
    assert len(texts) == len(ids) == len(text.encode()) and "".join(texts) == text
    if text.startswith("né"):
        assert texts[:4] == ["n", "", "é", " "]


def test_a_tokenizer_is_found_in_the_run_or_beside_it_once_it_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "run", steps=1)
    missing = tokenizer_of(run, "models/small")
    assert missing.decode is None and "models/small" in missing.problem
    for folder in (tmp_path / "models" / "small", run / "checkpoints" / "step-000001" / "model"):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{")
        assert str(folder) in tokenizer_of(run, "models/small").problem
        tokenizer = byte_tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        os.utime(folder / "tokenizer.json", (1, 1))
        found = tokenizer_of(run, "models/small")
        assert found.decode is not None and found.decode(tokenizer.encode("né").ids) == "né" and not found.problem
    # A copy keeps the time of the original, but hardly its size, too.
    tokenizer.add_tokens(["<added>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    os.utime(folder / "tokenizer.json", (1, 1))
    replaced = tokenizer_of(run, "models/small")
    assert replaced.decode is not None and replaced.decode(tokenizer.encode("<added>").ids) == "<added>"


def test_bytes_that_are_no_text_are_shown_as_far_as_they_go() -> None:
    tokenizer = byte_tokenizer()
    lead = tokenizer.token_to_id("ð")  # the byte f0, which begins a character that never ends
    texts = token_texts([lead] * 40, lambda part: tokenizer.decode(list(part), skip_special_tokens=False))
    assert len(texts) == 40 and sum(bool(text) for text in texts) >= 5


def test_evaluations_by_source_and_regressions_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    sources = ["math", "math", "code"]
    write_evaluation(run, 0, [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], sources)
    write_evaluation(run, 4, [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]], sources)
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    with index.connect() as connection:
        lines_of = table(connection, 1.0)
        found = compared(recorded(connection, "run", 0), recorded(connection, "run", 4))
    code, math_line = lines_of[2:] if lines_of[0]["step"] == 4 else lines_of[:2]
    assert (code["source"], code["step"], code["average"][0], code["passed"][2][0]) == ("code", 0, 0.0, 0.0)
    assert (math_line["tasks"], math_line["episodes"], math_line["k"]) == (2, 4, 2)
    assert math_line["average"][0] == 0.75 and math_line["passed"][1][0] == 0.75
    assert math_line["passed"][2] == pytest.approx([1.0, *wilson(1.0, 2)])
    assert [task["task"] for task in found["tasks"]] == ["test:1", "test:2", "test:0"]
    everything = found["sources"][-1]
    assert (found["count"], everything.tasks, everything.better, everything.worse) == (3, 3, 2, 1)
    assert everything.change.value == pytest.approx(0.0) and everything.p == 1.0
    worst = found["tasks"][0]
    assert (worst["replied_after"], worst["keys"]) == ("answer 0 of 4", ["eval-0-1001-0-0", "eval-4-1001-0-0"])
    terminal = by_files(read_evaluation(f"{run}@0"), read_evaluation(f"{run}@4"))
    assert found["sources"] == terminal.sources, "the page says what `rl-async compare` says"
    assert [(task["task"], task["before"], task["after"]) for task in found["tasks"]] == [
        (task.task, task.before, task.after) for task in terminal.tasks
    ]


def test_memory_grows_with_the_tasks_of_an_evaluation_and_not_with_its_episodes(tmp_path: Path) -> None:
    index = TrajectoryIndex(make_run(tmp_path / "run", steps=1))
    tasks, found = 500, []
    with index.connect() as connection:
        for samples in (4, 80):
            add = (
                "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?) "
                "INSERT INTO rows (partition, step, source, role, task, grp, sample, segment, reward, turn_reward, "
                "scored, asked, prompt, answer) SELECT 'eval', ?, 'math', '', i % 500, i % 500, i / 500, 0, i % 2, "
                "0.0, 1, 0, 'q', printf('%.200c', 'a') FROM n"
            )
            with connection:
                connection.execute("DELETE FROM rows")
                for step in range(2):
                    connection.execute(add, (tasks * samples, step))
            tracemalloc.start()
            (line, _), both = table(connection, 1.0), [recorded(connection, "run", step) for step in range(2)]
            assert (line["episodes"], compared(*both)["count"]) == (tasks * samples, tasks)
            found.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert found[1] < 1.2 * found[0], "twenty times the episodes"


def test_roles_sources_and_rows_of_an_episode_are_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    template = make_rows(0)[0]

    def row(
        source: str, role: str, reward: float, segment: int, *, scored: bool = True, asked: str = "?"
    ) -> Trajectory:
        made = msgspec.structs.replace(template, task_id="1", group_id=len(source), data_source=source, role=role)
        turns = conversation(asked, f"{role} {segment}")  # earns 0.25
        return msgspec.structs.replace(made, reward=reward, segment=segment, scored=scored, turns=turns)

    for step, change in ((0, 0.0), (1, 1.0)):
        rows = [
            row("chess", "white", 1.0 - change, 0),
            row("chess", "white", 1.0 - change, 1),
            row("chess", "black", 0.0 + change, 2),
            row("go", "", 5.0, 0, scored=False),
            row("draughts", "", 1.0, 0, asked=f"asked in {step}"),
        ]
        write_trajectories(run / "trajectories" / f"eval-{step:06d}.jsonl.gz", rows)
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    with index.connect() as connection:
        lines_of = {line["source"]: line["average"][0] for line in table(connection, 1.0) if not line["step"]}
        found = compared(recorded(connection, "run", 0), recorded(connection, "run", 1))
    assert lines_of == {"chess as black": 0.25, "chess as white": 1.5, "draughts": 1.25, "go": 0.0}
    shown = [(task["source"], task["before"], task["after"]) for task in found["tasks"]]
    assert shown == [("chess as white", 1.5, 0.5), ("go", 0.0, 0.0), ("chess as black", 0.25, 1.25)]
    assert (found["count"], found["left_out"], found["unscored"]) == (3, 1, (1, 1))
    assert found["tasks"][0]["replied_before"] == "white 1" and found["tasks"][0]["keys"][0].endswith("-0")


def test_evaluations_with_nothing_in_common_are_not_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    write_evaluation(run, 0, [[1.0]], ["math"])
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    with index.connect() as connection, pytest.raises(RequestRefused) as refused:
        compared(recorded(connection, "run", 0), recorded(connection, "run", 7))
    assert refused.value.status == 409
