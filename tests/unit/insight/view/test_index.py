"""The index of a run's trajectories: what is found, what a resume voids, and files that change or are damaged."""

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import RequestRefused
from rl_async.insight.view import index as module
from rl_async.insight.view import trajectories
from rl_async.insight.view.index import (
    Indexer,
    Progress,
    TrajectoryIndex,
    choices,
    find,
    row_of_key,
    rows_of_group,
    words,
)
from rl_async.messages import Activity, Turn
from rl_async.recording import evaluation_file, write_trajectories
from tests.conftest import make_rows
from tests.support.recordings import conversation, explained, make_run, write_evaluation, write_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


@pytest.fixture
def index(run: Path) -> TrajectoryIndex:
    made = TrajectoryIndex(run)
    made.update(threading.Event())
    return made


def found(index: TrajectoryIndex, **filters: Any) -> list[tuple[int, int, int]]:
    """Step, group and sample of what matches."""
    with index.connect() as connection:
        rows = find(connection, {name: str(value) for name, value in filters.items()})["rows"]
    return [(row["step"], row["grp"], row["sample"]) for row in rows]


def count(index: TrajectoryIndex, **filters: Any) -> int:
    with index.connect() as connection:
        return int(find(connection, {name: str(value) for name, value in filters.items()})["count"])


HOSTILE_ROW = [(1, 4, 0)]


@pytest.mark.parametrize(
    "filters",
    [
        {"error": 1},
        {"tool": "browser"},
        {"failed_tool": "browser"},
        {"failed_call": 1},
        {"text": "owned"},
        {"text": "<script>"},
        {"text": '"too slow"'},
        {"text": "no_such_page"},
        {"text": "timeout"},
        {"text": "OPEN script gnp.e"},
        {"step": 1, "group": 4, "sample": 0},
    ],
)
def test_each_filter_finds_the_one_row_that_it_should(index: TrajectoryIndex, filters: dict[str, Any]) -> None:
    assert found(index, **filters) == HOSTILE_ROW


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        ({}, 48),
        ({"text": "slow too", "tool": "shell"}, 0),
        ({"text": '"slow too"'}, 0),
        ({"text": "shell"}, 47),
        ({"text": "ok"}, 47),
        ({"tool": "shell"}, 47),
        ({"step_from": 1, "step_to": 1}, 16),
        ({"masked": 1}, 16),
        ({"rule": "token_k3"}, 16),
        ({"rule": "band"}, 0),
        ({"source": "math"}, 48),
        ({"reward_from": 1.25}, sum(row.reward == 1 for step in range(3) for row in make_rows(step))),
        ({"reward_to": 0.25}, sum(row.reward == 0 for step in range(3) for row in make_rows(step))),
        ({"task": "t4"}, 4),
        ({"where": "step = 1"}, 16),
        ({"where": "step >= 1 and step<2"}, 16),
        ({"where": 'reward>=1.25 answer ~ "ANSWER 0"', "task": "t8"}, 1),
        ({"where": "tool = shell"}, 47),
        ({"where": "tool != shell and rule != token_k3"}, 1),
        ({"where": 'task = "t4" end != nothing'}, 4),
        ({"where": "group by step"}, 3),
        ({"where": "step > 0 group by source"}, 1),
        ({"partition": "eval"}, 0),
    ],
)
def test_filters_count(index: TrajectoryIndex, filters: dict[str, Any], rows: int) -> None:
    assert count(index, **filters) == rows


def test_pages_cover_everything_once_in_order(index: TrajectoryIndex) -> None:
    pages = [found(index, order="oldest", offset=offset, limit=7) for offset in range(0, 48, 7)]
    rows = [row for page in pages for row in page]
    assert rows == sorted(rows) and len(set(rows)) == 48
    assert found(index, limit=1) == [(2, 8, 0)], "the newest step comes first"


def test_groups_have_the_statistics_of_their_rows(index: TrajectoryIndex) -> None:
    with index.connect() as connection:
        page = find(connection, {"where": "step > 0 group by step"})
        rewards = [row["reward"] + row["turn_reward"] for row in find(connection, {"where": "step = 1"})["rows"]]
    first = page["groups"][0]
    assert [one["value"] for one in page["groups"]] == [1, 2] and (page["count"], page["rows"]) == (2, [])
    assert (first["rows"], first["lowest"], first["highest"]) == (16, min(rewards), max(rewards))
    assert first["reward"] == pytest.approx(sum(rewards) / 16)


@pytest.mark.parametrize("column", ["tokens", "staleness", "answer", "masked", "group"])
def test_any_column_sorts_either_way(index: TrajectoryIndex, column: str) -> None:
    key = {"group": "grp"}.get(column, column)
    with index.connect() as connection:
        up, down = (
            [row[key] for row in find(connection, {"order": f"{column}_{way}"})["rows"]] for way in ("up", "down")
        )
    known = [value for value in up if value is not None]
    assert known == sorted(known) and up[len(known) :] == [None] * (len(up) - len(known))
    assert [value for value in down if value is not None] == sorted(known, reverse=True)


def test_a_row_has_what_lists_show(index: TrajectoryIndex) -> None:
    with index.connect() as connection:
        row = dict(row_of_key(connection, "train-2-8-0-0"))
    made = make_rows(2)[0]
    assert (row["masked"], row["min_weight"], row["advantage"]) == (2, 0.0, 1.5)
    assert row["difference"] == pytest.approx(0.25, abs=1e-6)
    assert (row["tokens"], row["sampled"], row["staleness"]) == (len(made.token_ids), made.loss_mask.sum(), 0)
    assert (row["prompt"], row["answer"], row["source"]) == ("question t8", "answer 0", "math")


def test_tokens_that_a_grammar_restricted_are_no_difference_between_engine_and_trainer(run: Path) -> None:
    rows = make_rows(5, groups=1, samples=3)
    told = [explained(row) for row in rows]
    for row, explanation, spared in zip(rows, told, (None, 1, 0), strict=True):
        explanation.logprobs[0] += 9.0
        row.constrained = [] if spared is None else [(0, int(row.loss_mask.sum()) - spared)]
    write_trajectories(run / "trajectories" / "step-000005-lineage0-rank0.jsonl.gz", rows, told)
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    with index.connect() as connection:
        query = "SELECT difference FROM rows WHERE step = 5 ORDER BY sample"
        (free,), (mixed,), (none,) = connection.execute(query).fetchall()
    assert (free, mixed, none) == (pytest.approx(9.25, abs=1e-5), pytest.approx(0.25, abs=1e-5), None)


def test_what_was_trained_again_replaces_what_it_voids(run: Path, index: TrajectoryIndex) -> None:
    again = make_rows(1, seed=7)
    for row in again:
        row.turns = conversation("again", "anew")
    write_step(run, 1, again, lineage=1)
    index.update(threading.Event())
    assert count(index) == 32, "step 1 of lineage 0 counts no more, and nor does step 2"
    assert count(index, step=1, text="anew") == 16 and count(index, step=2) == 0
    assert found(index, text="owned") == []
    with index.connect() as connection:
        given = choices(connection)
    assert given["rule"] == [] and [tool["value"] for tool in given["tool"]] == ["shell"] and given["steps"] == [0, 1]
    with index.connect() as connection:
        assert len(rows_of_group(connection, "train", 1, 4)) == 4
        assert row_of_key(connection, "train-1-4-0-0")["lineage"] == 1


def test_what_is_trained_again_voids_no_evaluation(run: Path, index: TrajectoryIndex) -> None:
    write_step(run, 1, make_rows(1, seed=7), lineage=1)
    write_evaluation(run, 1, [[1.0], [0.0]], ["math", "math"])
    write_evaluation(run, 2, [[1.0]], ["math"])
    index.update(threading.Event())
    assert count(index, partition="eval") == 3 and count(index, partition="train") == 32
    with index.connect() as connection:
        assert {"value": "eval", "rows": 3} in choices(connection)["partition"]
        assert len(rows_of_group(connection, "eval", 1, 1001)) == 1


def test_new_and_replaced_files_are_read_and_others_are_not(
    run: Path, index: TrajectoryIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    real = module.lines
    monkeypatch.setattr(module, "lines", lambda file: read.append(file.name) or real(file))
    index.update(threading.Event())
    assert read == []
    write_evaluation(run, 3, [[1.0]], ["math"])
    changed = write_step(run, 2, make_rows(2, samples=2))
    index.update(threading.Event())
    assert sorted(read) == ["eval-000003.jsonl.gz", changed.name]
    assert count(index, step=2) == 8 and count(index, partition="eval") == 1
    changed.unlink()
    index.update(threading.Event())
    assert count(index, step=2) == 0
    assert TrajectoryIndex(run).path == index.path and count(TrajectoryIndex(run)) == 33, "it is kept"


def test_an_evaluation_that_ended_early_is_read_like_others(run: Path) -> None:
    write_evaluation(run, 3, [[1.0]], ["math"])
    evaluation_file(run, 3).rename(evaluation_file(run, 3, whole=False))
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert count(index, partition="eval", step=3) == 1 and not index.damaged


def test_a_damaged_file_is_named_and_others_are_read(run: Path) -> None:
    file = run / "trajectories" / "step-000001-lineage0-rank0.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-40])
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert list(index.damaged) == [file.name] and count(index) == 32


def test_a_row_whose_numbers_do_not_fit_its_tokens_spoils_its_file_alone(run: Path) -> None:
    (row,) = make_rows(5, groups=1, samples=1)
    told = explained(row)
    told.logprobs.append(0.0)
    file = run / "trajectories" / "step-000005-lineage0-rank0.jsonl.gz"
    write_trajectories(file, [row], [told])
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert list(index.damaged) == [file.name] and count(index) == 48


def test_a_damaged_file_is_read_again_once_it_changes(run: Path, index: TrajectoryIndex) -> None:
    file = run / "trajectories" / "step-000001-lineage0-rank0.jsonl.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    index.update(threading.Event())
    assert list(index.damaged) == [file.name] and count(index, step=1) == 0, "its old rows have places of another file"
    file.write_bytes(whole)
    index.update(threading.Event())
    assert not index.damaged and count(index) == 48


def test_a_line_that_is_too_long_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MOST_LINE", 100)
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert len(index.damaged) == 3 and count(index) == 0


def group_too_large(row: dict[str, Any]) -> None:
    row["group_id"] = 1 << 70


def too_few_logprobs(row: dict[str, Any]) -> None:
    row["logprobs"] = row["logprobs"][:1]


@pytest.mark.parametrize("spoil", [group_too_large, too_few_logprobs])
def test_any_row_that_cannot_be_indexed_spoils_its_file_alone(run: Path, spoil: Callable[[Any], None]) -> None:
    file = run / "trajectories" / "step-000002-lineage0-rank0.jsonl.gz"
    row = json.loads(gzip.decompress(file.read_bytes()).splitlines()[0])
    spoil(row)
    file.write_bytes(gzip.compress(json.dumps(row).encode()))
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert list(index.damaged) == [file.name] and count(index) == 32


def test_what_is_no_database_is_made_anew(run: Path, index: TrajectoryIndex) -> None:
    index.path.write_bytes(b"no database" * 1000)
    again = TrajectoryIndex(run)
    again.update(threading.Event())
    assert count(again) == 48


def test_an_index_of_another_format_is_made_anew(run: Path, index: TrajectoryIndex) -> None:
    with index.connect() as connection:
        connection.execute("PRAGMA user_version = 999")
    again = TrajectoryIndex(run)
    assert count(again) == 0
    again.update(threading.Event())
    assert count(again) == 48


def test_a_run_that_may_not_be_written_has_a_temporary_index(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert count(index) == 48 and run not in index.path.parents
    index.close()
    assert not index.path.exists()


def test_calls_that_could_not_be_parsed_are_found(run: Path) -> None:
    rows = make_rows(3, groups=1, samples=2)
    for row, tool in zip(rows, ("shell", ""), strict=True):
        row.turns = conversation("run it", "yes", tool=tool, error="invalid_json")
    write_step(run, 3, rows)
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert found(index, unparsed=1) == [(3, rows[1].group_id, rows[1].sample)]


def test_the_values_of_filters_are_counted(index: TrajectoryIndex) -> None:
    no_such_page = {"value": "no_such_page", "calls": 1}
    with index.connect() as connection:
        given = choices(connection)
    assert given["tool"] == [
        {"value": "browser", "calls": 1, "failed": 1, "seconds": 0.5, "slowest": 0.5, "errors": [no_such_page]},
        {"value": "shell", "calls": 47, "failed": 0, "seconds": 23.5, "slowest": 0.5, "errors": []},
    ]
    assert given["rule"] == [{"value": "token_k3", "rows": 16, "tokens": 32}]
    assert given["steps"] == [0, 2]


def test_engines_have_the_time_and_the_tokens_of_their_turns(run: Path) -> None:
    rows = make_rows(3, groups=1, samples=3)
    for row in rows:  # of which the first 4 tokens are the prompt's
        end = len(row.token_ids)
        row.turns = [
            Turn(role="assistant", text="a", start=0, end=6),
            Turn(role="assistant", text="b", start=6, end=end),
        ]
        row.activities = [Activity("generate", "engine-0", 1.0, 2.0), Activity("generate", "engine-1.1", 1.0, 0.5)]
    rows[2].turns.pop(0)  # it is in another row
    write_step(run, 3, rows)
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    with index.connect() as connection:
        slow, fast = choices(connection)["engine"]
    assert (slow["value"], slow["rows"], slow["turns"], slow["seconds"], slow["slowest"]) == (
        "engine-0",
        3,
        3,
        6.0,
        2.0,
    )
    assert (slow["tokens"], slow["speed"]) == (4, 1.0)
    tokens = sum(len(row.token_ids) - 6 for row in rows[:2])
    assert (fast["value"], fast["tokens"], fast["speed"]) == ("engine-1.1", tokens, tokens / 1.0)
    assert count(index, engine="engine-0") == 3 and count(index, engine="engine-1") == 0


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("天気", 1),
        ("気が", 1),
        ("今日", 1),
        ("天が", 0),
        ("気天", 0),
        ('"は天"', 1),
        ("weather 天", 1),
        ("カ", 1),
        ("カタ", 0),
        ("café", 1),
    ],
)
def test_signs_of_scripts_without_spaces_are_words(run: Path, text: str, rows: int) -> None:
    (row,) = make_rows(3, groups=1, samples=1)
    row.turns = conversation("weather?", "今日は天気がいい。カ Café")
    write_step(run, 3, [row])
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert count(index, text=text, step=3) == rows


@pytest.mark.parametrize(
    "filters",
    [
        *({"nothing": 1}, {"step": "x"}, {"order": "random"}, {"text": " <> "}, {"offset": "a"}, {"text": "a " * 65}),
        *(
            {"where": text}
            for text in ("rewards < 1", "reward < low", "reward", "reward ~ 1", "task < t4", "step = 1 or")
        ),
        *({"where": text} for text in ("group by nothing", "group by tool", 'task = "t4', "1 = 1; DROP TABLE rows")),
        {"order": "nothing_up"},
    ],
)
def test_what_is_no_filter_is_refused(index: TrajectoryIndex, filters: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        found(index, **filters)


@pytest.mark.parametrize("text", ["a OR", "NEAR(", "a*b", "x:y", "-z", "'; DROP TABLE rows; --1", "a\x00b", "日本語"])
def test_no_text_is_an_operator(run: Path, text: str) -> None:
    """A search finds the row that has these words, and no other."""
    (row,) = make_rows(3, groups=1, samples=1)
    row.turns = conversation("weather?", text)
    write_step(run, 3, [row])
    index = TrajectoryIndex(run)
    index.update(threading.Event())
    assert found(index, text=text) == [(3, 3, 0)]
    assert count(index) == 49


def test_a_text_without_words_is_refused(index: TrajectoryIndex) -> None:
    with pytest.raises(RequestRefused) as refused:
        count(index, text='"')
    assert refused.value.code == "no_words"


def test_words() -> None:
    assert words('open "too slow" now') == '"too slow" AND "open" AND "now"*'


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    made = Indexer()
    yield made
    made.close()


def test_an_index_follows_its_run(run: Path, indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)
    assert indexer.progress(run) is None
    index = indexer.of(run)
    wait_for(index, Progress(3, 3))
    write_step(run, 3, make_rows(3))
    wait_for(index, Progress(4, 4))
    assert count(index) == 64


def deleted(run: Path) -> None:
    for file in run.glob("view.sqlite*"):
        file.unlink()


def overwritten(run: Path) -> None:
    (run / "view.sqlite").write_bytes(b"no database" * 1000)


@pytest.mark.parametrize("spoil", [deleted, overwritten])
def test_an_index_that_is_deleted_or_damaged_while_it_is_used_is_made_anew(
    run: Path, indexer: Indexer, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)
    index = indexer.of(run)
    wait_for(index, Progress(3, 3))
    spoil(run)
    write_step(run, 3, make_rows(3))
    wait_for(index, Progress(4, 4))
    assert count(index) == 64


def test_a_run_that_is_deleted_ends_no_other(
    run: Path, tmp_path: Path, indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)
    other = make_run(tmp_path / "other", steps=1)
    gone, index = indexer.of(other), indexer.of(run)
    wait_for(gone, Progress(1, 1))
    other.rename(tmp_path / "elsewhere")  # at once; files that the index writes keep a folder from being removed
    write_step(run, 3, make_rows(3))
    wait_for(index, Progress(4, 4))
    assert not other.exists()


def wait_for(index: TrajectoryIndex, progress: Progress) -> None:
    waiting = threading.Event()
    for _ in range(3000):
        if index.progress == progress:
            return
        waiting.wait(0.02)
    raise AssertionError(f"{index.progress} has not become {progress}")
