"""The page: its routes, who may use it, serving it, and the report."""

import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import AsyncIterator, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rl_async.errors import RequestRefused, UserError
from rl_async.evaluation import wilson
from rl_async.insight.recorded_evaluations import compare as by_files
from rl_async.insight.recorded_evaluations import read_evaluation
from rl_async.insight.view import page as module
from rl_async.insight.view.index import KEY, TrajectoryIndex, compared, recorded, table
from rl_async.insight.view.page import (
    OPEN,
    MetricColumns,
    PageAccess,
    SecurityHeaders,
    ViewedRun,
    ViewedRuns,
    ViewServer,
    write_report,
)
from rl_async.insight.view.trajectories import RecordedRow, lines, story, token_texts, tokenizer_of
from rl_async.messages import Trajectory, Version, VersionRun
from rl_async.process.http_server import server_of
from rl_async.process.run_files import ProcessRecord, beat
from rl_async.recording import evaluation_file, images_file, write_trajectories
from tests.conftest import make_rows
from tests.fuzz.http import Served
from tests.support.recordings import HOSTILE, conversation, make_run, write_evaluation, write_step
from tests.support.tiny_models import drawing


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
    # The place of the first sampled token.
    first = 4
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
    # The byte f0 begins a character that never ends.
    lead = tokenizer.token_to_id("ð")
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
        # Such a turn earns 0.25.
        turns = conversation(asked, f"{role} {segment}")
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


TOKEN = "t" * 43


class Parrot:
    """Repeats what is said, and from which conversation."""

    async def say(self, run: Path, name: str, text: str) -> AsyncIterator[bytes]:
        for part in (run.name, name, text):
            yield json.dumps(part).encode() + b"\n"

    async def close(self) -> None:
        """Do nothing, since nothing is open."""


class Page:
    """A browser that has opened the page of the runs in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.views: list[ViewServer] = []

        def make() -> Any:
            access = PageAccess(TOKEN, 1)
            self.views.append(ViewServer(ViewedRuns([folder]), access, Parrot()))
            return server_of(SecurityHeaders(self.views[0].application()), access), None

        self._served = Served(make)
        self.cookie = f"rl-async-view-1={TOKEN}"

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Request a path with these headers alone; the status, headers in lower case, and the body."""
        connection = http.client.HTTPConnection("127.0.0.1", self._served.port, timeout=60)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, read

    def say(self, body: bytes, path: str = "/api/runs/a/chat", **changed: str) -> tuple[int, bytes]:
        """Talk to the run ``a`` as the page does, with some headers changed; an empty one is left out."""
        own = f"127.0.0.1:{self._served.port}"
        headers = {"Host": own, "Origin": f"http://{own}", "Cookie": self.cookie, "Content-Type": "application/json"}
        headers = {name: value for name, value in (headers | changed).items() if value}
        status, _, answer = self.ask(path, "POST", body, **headers)
        return status, answer

    def get(self, path: str) -> Any:
        """Request JSON as the page does."""
        status, _, body = self.ask(f"/api/{path}", Cookie=self.cookie)
        assert status == 200, body
        return json.loads(body)

    def events(self, count: int) -> list[dict[str, Any]]:
        """Follow the events, up to ``count``."""
        connection = http.client.HTTPConnection("127.0.0.1", self._served.port, timeout=60)
        connection.request("GET", "/api/events", headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        found = []
        while len(found) < count:
            line = answer.readline()
            if line.startswith(b"data: "):
                found.append(json.loads(line.removeprefix(b"data: ")))
        connection.close()
        return found

    def close(self) -> None:
        self._served.stop()
        for view in self.views:
            view.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_evaluation(make_run(tmp_path / "a"), 2, [[1.0], [0.0]], ["math", "math"])
    make_run(tmp_path / "b", steps=1)
    return tmp_path


@pytest.fixture
def page(runs: Path) -> Iterator[Page]:
    made = Page(runs)
    yield made
    made.close()


def indexed(page: Page, run: str) -> dict[str, Any]:
    """The choices of a run once its files are in the index."""
    while True:
        given = page.get(f"runs/{run}/choices")
        if given["progress"]["files"] and given["progress"]["indexed"] == given["progress"]["files"]:
            return dict(given)


def test_the_address_sets_a_cookie_and_the_token_stays_out_of_the_page(page: Page) -> None:
    status, headers, _ = page.ask(f"{OPEN}{TOKEN}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert page.ask("/", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/api/runs", {}),
        ("/", {}),
        ("/app.js", {}),
        ("/api/runs", {"Cookie": "rl-async-view-1=wrong"}),
        ("/api/runs", {"Cookie": "rl-async-view-2=" + TOKEN}),
        ("/api/runs", {"Cookie": 'rl-async-view-1="\\'}),
        (f"{OPEN}wrong", {}),
        (OPEN, {}),
        (f"/api/runs?token={TOKEN}", {}),
        ("/api/runs", {"Cookie": f"rl-async-view-1={TOKEN}", "Host": "rebound.example"}),
        ("/api/runs", {"Cookie": f"rl-async-view-1={TOKEN}", "Origin": "http://other.example"}),
    ],
)
def test_nobody_else_is_let_in(page: Page, path: str, headers: dict[str, str]) -> None:
    status, _, body = page.ask(path, **headers)
    assert status == 403 and TOKEN.encode() not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(page: Page, method: str) -> None:
    assert page.ask("/api/runs", method, Cookie=page.cookie)[0] == 403


def test_the_page_itself_may_talk_to_a_run(page: Page) -> None:
    status, answer = page.say(b'{"text": "hi", "conversation": "c"}')
    assert (status, answer.split()) == (200, [b'"a"', b'"c"', b'"hi"'])
    status, answer = page.say(b'{"text": "hi"}', Host="localhost:9", Origin="http://localhost:9")
    assert status == 200, "the port may be forwarded"


@pytest.mark.parametrize(
    "changed",
    [
        {"Origin": ""},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://other.example"},
        {"Origin": "https://127.0.0.1"},
        {"Host": "rebound.example", "Origin": "http://rebound.example"},
        {"Cookie": ""},
        {"Cookie": "rl-async-view-1=wrong"},
        {"Content-Type": "text/plain"},
        {"Content-Type": ""},
        {"path": "/api/runs/a/config"},
        {"path": "/api/runs/a/chat/more"},
        {"path": "/api/runs"},
    ],
    ids=str,
)
def test_no_other_page_may_talk_to_a_run(page: Page, changed: dict[str, str]) -> None:
    assert page.say(b'{"text": "hi"}', **changed)[0] == 403


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"text": 1}', b'{"text": "a", "run": "b"}', b"\xff"])
def test_words_that_are_none_are_refused(page: Page, body: bytes) -> None:
    assert page.say(body)[0] == 400
    assert page.say(b'{"text": "hi"}', "/api/runs/none/chat")[0] == 404


@pytest.mark.parametrize("path", ["/", "/app.js", "/app.css", "/icon.svg", "/api/runs", "/nothing"])
def test_every_answer_restricts_what_the_page_may_do(page: Page, path: str) -> None:
    status, headers, _ = page.ask(path, Cookie=page.cookie)
    assert status == (404 if path == "/nothing" else 200)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/..%2Fserver.py", "/%2e%2e/server.py", "/api/runs/..%2F..%2Fetc/config"])
def test_no_other_file_is_served(page: Page, path: str) -> None:
    assert page.ask(path, Cookie=page.cookie)[0] == 404


def test_runs_and_their_configs(page: Page, runs: Path) -> None:
    listed = {run["name"]: run for run in page.get("runs")}
    assert listed.keys() == {"a", "b"}
    assert (listed["a"]["steps_done"], listed["a"]["steps"], listed["a"]["running"]) == (3, 3, False)
    assert listed["a"]["evaluation"] == 0.5 and listed["b"]["evaluation"] is None
    assert page.get("runs/b/config") == {"name": "b", "mode": "disaggregated", "trainer.steps": 1}
    make_run(runs / "later")
    assert len(page.get("runs")) == 3
    assert page.ask("/api/runs/none/config", Cookie=page.cookie)[0] == 404


def test_metrics_evaluations_and_comparisons(page: Page) -> None:
    found = page.get("runs/a/metrics?keys=reward/mean,none")
    assert found["steps"] == [0, 1, 2] and list(found["columns"]) == ["reward/mean"] and "step" in found["names"]
    assert page.get(f"runs/a/metrics?keys=step&epoch={found['epoch']}&after=2")["columns"] == {"step": [2.0]}
    indexed(page, "a")
    evaluations = page.get("runs/a/evaluations")
    assert [line["average"][0] for line in evaluations["table"]] == [0.5] and len(evaluations["records"]) == 1
    assert page.get("runs/a/compare?before=2&after=2")["count"] == 2


def test_the_timeline_is_given_whole_or_in_part(page: Page, runs: Path) -> None:
    for step in range(3):
        beat(runs / "a", 0, step, "training")
    whole = page.get("runs/a/timeline")
    (lane,) = whole["lanes"]
    assert (lane["process"], lane["rows"][0][0][3]) == ("trainer-0", "training")
    assert [step for step, _, _ in whole["steps"]] == [0, 1, 2]
    assert page.get("runs/a/timeline?from=5&to=9")["lanes"] == page.get("runs/b/timeline")["lanes"] == []


def test_a_trajectory_and_its_group(page: Page) -> None:
    indexed(page, "a")
    (row,) = page.get("runs/a/trajectories?text=owned")["rows"]
    key = "-".join(str(row[name]) for name in ("partition", "step", "grp", "sample", "segment"))
    told = page.get(f"runs/a/trajectories/{key}")
    assert told["turns"][1]["text"] == HOSTILE and told["tokens"]["advantage"][4] == 1.5
    assert told["error"] == "TimeoutError: too slow" and told["reward_parts"] == {"exact": 0.0}
    assert told["reward_reasons"] == {"exact": "the page is missing"}
    (found,) = page.get("runs/a/trajectories?text=missing")["rows"]
    assert found["grp"] == row["grp"], "reasons are searched, too"
    group = page.get(f"runs/a/groups/train-1-{row['grp']}")
    assert [other["sample"] for other in group] == [0, 1, 2, 3] and group[0]["turns"][1]["text"] == HOSTILE
    assert [one["sample"] for one in page.get(f"runs/a/groups/train-1-{row['grp']}?sample=2")] == [2]


def test_an_image_of_a_trajectory_is_a_picture(page: Page, runs: Path) -> None:
    indexed(page, "a")
    row = page.get("runs/a/trajectories?text=owned")["rows"][0]
    key = "-".join(str(row[name]) for name in ("partition", "step", "grp", "sample", "segment"))
    assert page.get(f"runs/a/trajectories/{key}")["media"] == []
    sha256 = hashlib.sha256(drawing(1)).hexdigest()
    address = f"/api/runs/a/trajectories/{key}/{sha256}"
    assert page.ask(address, Cookie=page.cookie)[0] == 404
    for file in (runs / "a" / "trajectories").glob("*.jsonl.gz"):
        with zipfile.ZipFile(images_file(file), "w") as images:
            images.writestr(sha256, drawing(1))
    status, headers, body = page.ask(address, Cookie=page.cookie)
    assert (status, headers["content-type"], body) == (200, "image/png", drawing(1))
    assert page.ask(address)[0] == 403, "nobody else sees it"


def test_a_task_is_found_in_its_data_source_alone(page: Page) -> None:
    indexed(page, "a")
    task = page.get("runs/a/trajectories?limit=1")["rows"][0]["task"]
    of_source = [page.get(f"runs/a/trajectories?task={task}&source={source}")["count"] for source in ("math", "")]
    assert of_source[0] > 0 and of_source[1] == 0, "no name is a data source, too"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("trajectories/train-1-4-0", 404),
        ("trajectories/train-99-4-0-0", 404),
        ("groups/train-1", 404),
        ("groups/train-1-x", 400),
        ("trajectories?step=x", 400),
        ("metrics?after=x", 400),
        ("evaluations?solved=x", 400),
        ("compare?before=0", 400),
        ("timeline?from=x", 400),
        ("timeline?from=2&to=1", 400),
        ("compare?before=99999999999999999999&after=0", 400),
        ("trajectories?offset=inf", 400),
        ("trajectories?offset=1e30", 400),
        ("trajectories?limit=nan", 400),
        ("trajectories?reward_from=nan", 400),
        ("trajectories/train-²-0-0-0", 400),
        ("groups/train-99999999999999999999-1", 400),
    ],
)
def test_what_is_not_there_is_said(page: Page, path: str, status: int) -> None:
    found, headers, body = page.ask(f"/api/runs/a/{quote(path, safe='/?=&')}", Cookie=page.cookie)
    assert found == status and json.loads(body)["error"]["message"] and "default-src" in str(headers)


@pytest.mark.parametrize("config", ["", "- a", "a: [", "\x00"])
def test_a_run_that_cannot_be_read_is_listed_with_its_problem_beside_the_others(
    page: Page, runs: Path, config: str
) -> None:
    (runs / "b" / "config.yaml").write_text(config)
    listed = {run["name"]: run["problem"] for run in page.get("runs")}
    assert listed["a"] == "" and "config.yaml" in listed["b"]
    assert {event["run"]: bool(event["problem"]) for event in page.events(2)} == {"a": False, "b": True}


def test_what_fails_is_said_as_json(page: Page, runs: Path) -> None:
    (runs / "a" / "view.sqlite").mkdir()
    status, headers, body = page.ask("/api/runs/a/choices", Cookie=page.cookie)
    assert status == 500 and json.loads(body)["error"]["message"] and "default-src" in str(headers)


def test_events_tell_of_new_steps(page: Page, runs: Path) -> None:
    first = {event["run"]: event for event in page.events(2)}
    assert (first["a"]["count"], first["b"]["count"]) == (3, 1)
    write_step(runs / "b", 1, make_rows(1))
    assert {event["run"]: event["count"] for event in page.events(2)} == {"a": 3, "b": 2}


def test_a_diagnosis_of_what_never_ran_says_so(page: Page) -> None:
    status, _, body = page.ask("/api/runs/a/diagnosis", Cookie=page.cookie)
    assert status == 409 and "run" in json.loads(body)["error"]["message"]


def test_places_without_runs_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError):
            ViewedRuns([place])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run")
    runs = ViewedRuns([tmp_path / "x", tmp_path / "y" / "run"])
    assert sorted(run.name for run in runs.all()) == ["run", "run~2"]
    assert runs.named("run~2").folder == tmp_path / "y" / "run"


def test_trainings_are_listed_before_evaluations_and_each_from_the_newest(page: Page, runs: Path) -> None:
    for at, name in enumerate(["b", "a", "eval-a", "eval-b"]):
        folder = runs / name if name in "ab" else make_run(runs / name, steps=0)
        os.utime(folder / "config.yaml", (at + 1, at + 1))
    record = ProcessRecord(name="engine-0", role="engine", pid=1, started=0, state="ended")
    (runs / "eval-a" / "processes.json").write_bytes(msgspec.json.encode([record]))
    (runs / "eval-b" / "config.yaml").write_text("eval: {endpoint: {url: http://x, model: m}}")
    os.utime(runs / "eval-b" / "config.yaml", (4, 4))
    assert [run["name"] for run in page.get("runs")] == ["a", "b", "eval-b", "eval-a"]


def test_an_evaluation_has_no_steps_and_is_finished_once_all_of_it_is_recorded(page: Page, runs: Path) -> None:
    folder = make_run(runs / "eval-a", steps=0)
    record = ProcessRecord(name="engine-0", role="engine", pid=1, started=0, state="ended")
    (folder / "processes.json").write_bytes(msgspec.json.encode([record]))
    served = make_run(runs / "eval-b", steps=0)
    (served / "config.yaml").write_text("eval: {endpoint: {url: http://x, model: m}}")

    def states() -> set[tuple[int, bool]]:
        listed = [run for run in page.get("runs") if run["name"] in ("eval-a", "eval-b")]
        assert len(listed) == 2
        return {(run["steps"], run["finished"]) for run in listed}

    assert states() == {(0, False)}
    for run in (folder, served):
        write_evaluation(run, 0, [[1.0]], ["sums"])
        evaluation_file(run, 0).rename(evaluation_file(run, 0, whole=False))
    assert states() == {(0, False)}, "ended early"
    for run in (folder, served):
        write_evaluation(run, 0, [[1.0]], ["sums"])
    assert states() == {(0, True)}


SERVE = """
import os, sys
from pathlib import Path
from rl_async.insight.view.page import serve
os.access = lambda *_: False  # root may write everywhere
serve([Path(sys.argv[1])], 0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_temporary_index_goes_with_its_process(tmp_path: Path, number: signal.Signals) -> None:
    run, temporary = make_run(tmp_path / "run", steps=1), tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", SERVE, str(run)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())
            cookie = f"rl-async-view-{address.port}={address.path.removeprefix('/open/')}"
            connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
            connection.request("GET", "/api/runs/run/choices", headers={"Cookie": cookie})
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read() and list(temporary.iterdir())
            connection.close()
            process.send_signal(number)
            assert process.wait(60) == 128 + number and not list(temporary.iterdir())
        finally:
            process.kill()


class Parsed(HTMLParser):
    """The scripts, styles and policy of a page, as a browser reads them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.policy, self._inside = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside, given = tag, dict(attrs)
        if tag == "script":
            self.scripts.append((given, ""))
        if tag == "style":
            self.styles.append("")
        if given.get("http-equiv") == "content-security-policy":
            self.policy = given["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] = self.scripts[-1][0], self.scripts[-1][1] + data
        if self._inside == "style":
            self.styles[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "run")
    write_evaluation(made, 0, [[1.0], [0.0]], ["math", "math"])
    write_evaluation(made, 3, [[0.0], [1.0]], ["math", "math"])
    return made


def written(run: Path, out: Path) -> tuple[Parsed, dict[str, Any]]:
    write_report(run, out)
    parsed = Parsed(out.read_text())
    (data,) = (text for given, text in parsed.scripts if given.get("id") == "report")
    return parsed, msgspec.json.decode(data)["run"]["run"]


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_only_the_pages_own_script_may_run(run: Path, tmp_path: Path) -> None:
    parsed, data = written(run, tmp_path / "out.html")
    (script,) = (text for given, text in parsed.scripts if not given)
    assert len(parsed.scripts) == 2 and parsed.styles
    assert re.findall(r"script-src (\S+);", parsed.policy) == [sha256(script)]
    assert re.findall(r"style-src (\S+);", parsed.policy) == [sha256(parsed.styles[0])]
    assert parsed.policy.startswith("default-src 'none';")
    assert any(told["turns"][1]["text"] == HOSTILE for told in data["trajectories"].values())


def test_it_has_whole_groups_of_each_step_and_the_compared_answers(run: Path, tmp_path: Path) -> None:
    _, data = written(run, tmp_path / "out.html")
    trained = [(row["step"], row["sample"]) for row in data["rows"] if row["partition"] == "train"]
    assert sorted(trained) == [(step, sample) for step in range(3) for sample in range(4)]
    assert {row["step"] for row in data["rows"] if row["partition"] == "eval"} == {0, 3}
    assert data["compare 0 3"]["sources"][0]["worse"] == 1 and data["metrics"]["steps"] == [0, 1, 2]
    assert data["trajectories"].keys() == {"-".join(str(row[n]) for n in KEY) for row in data["rows"]}


def test_a_resumed_run_has_its_evaluations(run: Path, tmp_path: Path) -> None:
    write_step(run, 0, make_rows(0, seed=7), lineage=1)
    _, data = written(run, tmp_path / "out.html")
    assert sorted((row["step"], row["grp"]) for row in data["rows"] if row["partition"] == "eval") == [
        *((0, 1000), (0, 1001), (3, 1000), (3, 1001))
    ]


def test_it_is_bounded(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    assert {row["step"] for row in written(run, tmp_path / "a.html")[1]["rows"] if row["partition"] == "train"} == {
        0,
        2,
    }
    whole = written(run, tmp_path / "b.html")[1]["trajectories"].values()
    monkeypatch.setattr(module, "MOST_BYTES", sum(len(msgspec.json.encode(told)) for told in whole) - 1)
    rows = written(run, tmp_path / "c.html")[1]["rows"]
    shown = [(row["partition"], row["step"]) for row in rows]
    assert shown == [("eval", 3)] * 2 + [("train", 2)] * 4 + [("eval", 0)] * 2, "whole groups, the compared ones kept"


def test_metrics_are_thinned_and_what_is_left_out_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(run, tmp_path / "a.html")[1]
    assert whole["recorded"] == {"trajectories": 52, "steps": 3}
    monkeypatch.setattr(module, "MOST_NUMBERS", 2 * len(whole["metrics"]["columns"]))
    thinned = written(run, tmp_path / "b.html")[1]["metrics"]
    assert thinned["steps"] == [0, 2]
    assert all(column == [*whole["metrics"]["columns"][name][::2]] for name, column in thinned["columns"].items())


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        write_report(tmp_path, tmp_path / "out.html")


def test_a_file_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none"):
        write_report(run, tmp_path / "none" / "out.html")


# The page's sources: the built files are theirs, and a report searches as the server does.


ROOT = Path(__file__).parents[4]
STATIC = ROOT / "insight" / "view" / "static"
WEB = ROOT / "insight" / "view" / "web"


def test_the_page_refers_to_its_own_files_alone() -> None:
    page = (STATIC / "index.html").read_text()
    files = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(files) == 3 and all((STATIC / file.removeprefix("/")).is_file() for file in files)
    assert not re.search(r"<script(?![^>]*\bsrc=)|style=|\son\w+=", page), "the policy forbids what stands inline"
    assert "http" not in re.sub(r"/\*!.*?\*/", "", (STATIC / "app.css").read_text(), flags=re.DOTALL)


def test_the_page_is_built_from_its_sources(tmp_path: Path) -> None:
    if not (WEB / "node_modules").is_dir() or shutil.which("node") is None:
        pytest.skip("install the page's tools: npm ci --prefix insight/view/web")
    subprocess.run([ROOT / "scripts" / "build_view", tmp_path], check=True, timeout=150)
    built = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert built.keys() == {"app.js", "app.css", "licenses.txt"}
    differs = [name for name, content in built.items() if (STATIC / name).read_bytes() != content]
    assert not differs, "run scripts/build_view"


ASKED = """
import { embedded, sameTask } from "./embedded";
const { report, row } = JSON.parse(await new Response(process.stdin as any).text());
console.log(JSON.stringify(embedded(report)(`runs/r/trajectories?${sameTask(row)}`)));
"""


def test_the_same_task_over_time_is_the_newest_of_its_data_source(tmp_path: Path) -> None:
    if not (WEB / "node_modules").is_dir() or shutil.which("node") is None:
        pytest.skip("install the page's tools: npm ci --prefix insight/view/web")
    bundled = subprocess.run(
        [WEB / "node_modules/.bin/esbuild", "--bundle", "--format=esm", "--loader=ts", f"--outfile={tmp_path}/ask.mjs"],
        input=ASKED,
        cwd=WEB / "src",
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert bundled.returncode == 0, bundled.stderr
    numbers = {"partition": "train", "grp": 0, "sample": 0, "segment": 0}
    rows = [{**numbers, "step": n // 2, "task": "1", "source": ("math", "")[n % 2]} for n in range(300)]

    def asked(source: str) -> dict[str, Any]:
        run = {"rows": rows, "trajectories": {}, "recorded": {"trajectories": 300}}
        given = {"report": {"runs": [], "run": {"r": run}}, "row": {"task": "1", "source": source}}
        node = ["node", str(tmp_path / "ask.mjs")]
        said = subprocess.run(node, input=json.dumps(given), capture_output=True, text=True, check=True, timeout=60)
        return dict(json.loads(said.stdout))

    for source in ("math", ""):
        found = asked(source)
        assert found["count"] == 150 and {row["source"] for row in found["rows"]} == {source}
        assert [row["step"] for row in found["rows"]] == [*range(149, 49, -1)]
