"""The file in which a run's processes say what they do: whole lines, of bounded size."""

from pathlib import Path

import pytest

from rl_async.process import run_files
from rl_async.process.run_files import TIMELINE_FOLDER, TimelineReader, beat, enter, read_timeline


def test_what_was_entered_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) == []
    enter(tmp_path, "launcher", "engine-0", "running", about="pid 7")
    beat(tmp_path, 0, 3, "training")
    enter(tmp_path, "weights", "engine-0", "", version="0.4")
    found = read_timeline(tmp_path)
    assert [(one.writer, one.lane, one.stage, one.step, one.version, one.about) for one in found] == [
        ("launcher", "engine-0", "running", -1, "", "pid 7"),
        ("trainer-0", "trainer-0", "training", 3, "", ""),
        ("weights", "engine-0", "", -1, "0.4", ""),
    ]
    assert [one.at for one in found] == sorted(one.at for one in found)


def test_a_torn_line_is_lost_alone(tmp_path: Path) -> None:
    enter(tmp_path, "weights", "engine-0", "probe")
    file = tmp_path / TIMELINE_FOLDER / "weights.jsonl"
    file.write_bytes(file.read_bytes() + b'{"lane":"engine-0","at":1795')
    enter(tmp_path, "weights", "engine-0", "pause")
    assert [one.stage for one in read_timeline(tmp_path)] == ["probe", "pause"]


def test_its_size_is_bounded_and_the_newest_lines_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MOST_BYTES", 2000)
    reader = TimelineReader(tmp_path)
    for step in range(200):
        enter(tmp_path, "trainer-0", "trainer-0", "training", step=step)
        if step % 7 == 0:
            assert reader.read() == read_timeline(tmp_path), "what follows the files agrees with what reads them anew"
    assert sum(file.stat().st_size for file in (tmp_path / TIMELINE_FOLDER).iterdir()) < 4400
    steps = [one.step for one in read_timeline(tmp_path)]
    assert len(steps) >= 20 and steps == list(range(200 - len(steps), 200))
