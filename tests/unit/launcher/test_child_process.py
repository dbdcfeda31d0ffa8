"""What a process said last, from its output."""

import os
from pathlib import Path

import pytest

from rl_async.insight.roster import said_last
from rl_async.launcher.child_process import is_full

TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>

    raise QueueLost
rl_async.errors.QueueLost: no answer
"""


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        (TRACEBACK + "[W] process group was not destroyed\n", "rl_async.errors.QueueLost: no answer"),
        ("12:00:00 trainer-0 ERROR TrainingDiverged: step 3\n12:00:01 trainer-0 INFO closing\n", "TrainingDiverged"),
        (TRACEBACK + "\nDuring handling, another:\n\n" + TRACEBACK.replace("no answer", "again"), "again"),
        ("error: model.path: no folder\nbye\n", "error: model.path: no folder"),
        ("Loading:  0%\rLoading: 100%\r\n", "Loading: 100%"),
    ],
)
def test_the_last_error_else_the_last_line(output: str, said: str) -> None:
    assert said in said_last(output) and bool(said) == bool(said_last(output))


@pytest.mark.parametrize(("free", "full"), [(0, True), (1, False)])
def test_a_disk_is_full_whose_blocks_are_all_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, full: bool
) -> None:
    found = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([*found[:4], free, *found[5:]]))
    assert is_full(tmp_path) is full
