"""Files in which a run's processes say what they do: the timeline, and heartbeats of ranks."""

import os
from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.process import run_files
from rl_async.process.role import main_thread
from rl_async.process.run_files import (
    TIMELINE_FOLDER,
    Beat,
    ProgressWriter,
    TimelineReader,
    beat,
    enter,
    missing_ranks,
    read_beats,
    read_progress,
    read_timeline,
)


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


def at(rank: int, step: int, phase: str) -> Beat:
    return Beat(rank=rank, pid=100 + rank, step=step, phase=phase, since=0.0)


def test_the_last_beat_of_each_rank_is_read(tmp_path: Path) -> None:
    assert read_beats(tmp_path) == []
    beat(tmp_path, 1, 4, "training")
    beat(tmp_path, 0, 4, "training")
    beat(tmp_path, 0, 5, "waiting for a batch")
    said = read_beats(tmp_path)
    assert [(b.rank, b.step, b.phase, b.pid) for b in said] == [
        (0, 5, "waiting for a batch", os.getpid()),
        (1, 4, "training", os.getpid()),
    ]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rank": 0}', b"\xff", b"[" * 5000])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.json").write_bytes(content)
    with pytest.raises(UserError, match=r"0\.json"):
        read_beats(tmp_path)


def test_progress_is_written_now_and_then_and_tells_what_the_rest_takes(tmp_path: Path) -> None:
    now, read = 100.0, lambda: read_progress(tmp_path, "trainer-0")
    write = ProgressWriter(tmp_path, "trainer-0", lambda: now)
    assert read() is None
    for seconds, done, seen in ((0.0, 0, 0), (0.5, 1, 0), (2.0, 4, 4), (2.5, 5, 4)):
        now = 100.0 + seconds
        write("training", done, 12, "micro-batches")
        found = read()
        assert found is not None and (found.done, found.total, found.since) == (seen, 12, 100.0)
    assert found.left_s == 4.0
    # New work is written at once, and its time counts from there.
    write("values", 0, 3, "micro-batches")
    found = read()
    assert found is not None and (found.work, found.since, found.left_s) == ("values", 102.5, None)


def test_who_cannot_run_is_missing_before_who_is_behind_and_else_all_others_are() -> None:
    beats = [at(0, 3, "meeting the ranks"), at(1, 3, "training"), at(2, 3, "meeting the ranks")]
    fine = {0: "S", 1: "R", 2: "S"}
    assert missing_ranks(beats, 0, fine) == [beats[1]]
    assert missing_ranks(beats, 0, fine | {2: "T"}) == [beats[2]]
    assert missing_ranks(beats, 1, fine) == [beats[0], beats[2]]


def test_the_newest_dump_counts() -> None:
    dump = 'Stack (most recent call first):\n  File "a.py", line 1 in old\n'
    assert [frame.name for frame in main_thread(dump + dump.replace("old", "new"))] == ["new"]
    assert main_thread("") == ()
