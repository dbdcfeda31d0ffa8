"""The report file: what it holds is bounded, and nothing in it can run or load anything."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.errors import UserError
from rl_async.launcher.view import page as module
from rl_async.launcher.view.queries import KEY
from rl_async.launcher.view.page import write_report
from tests.conftest import make_rows
from tests.support.recordings import HOSTILE, make_run, write_evaluation, write_step


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
