"""Heartbeats of ranks, which of them is missing from a collective, and the parsing of a stack dump."""

import os
from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.process.role import main_thread
from rl_async.process.run_files import Beat, beat, missing_ranks, read_beats


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
