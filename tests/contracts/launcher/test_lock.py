"""The lock of a run folder, held by another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.launcher.run_folder import hold, hold_unnamed, new_run

HOLDER = """
import pathlib, sys
from rl_async.launcher.run_folder import hold
with hold(pathlib.Path(sys.argv[1])):
    print(flush=True)
    input()
"""


def test_a_run_in_use_is_refused_naming_its_process_until_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UserError, match=rf"--name: .*mine .*{holder.pid}"), hold(folder):
            pass
        with hold(tmp_path / "runs" / "other"):
            holder.kill()
            holder.wait()
    with hold(folder):
        assert not folder.exists()
        assert (tmp_path / "runs" / ".mine.lock").read_text() == f"{os.getpid()}\n"
    assert list((tmp_path / "runs").iterdir()) == []


def test_unnamed_runs_that_start_at_once_take_different_names(tmp_path: Path) -> None:
    chosen = [new_run("calculator", [f"launcher.run_dir={tmp_path}"]) for _ in range(3)]
    assert len({folder for _, folder in chosen}) == 1
    with hold_unnamed(*chosen[0]) as (first, one), hold_unnamed(*chosen[1]) as (second, two):
        one.mkdir()
        assert [first.name, second.name] == [one.name, two.name] and one != two
    two.mkdir()
    with hold_unnamed(*chosen[2]) as (third, three):
        assert third.name == three.name and three not in (one, two)
