"""The lock of a run folder, held by another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.launcher.folder.run_folder import hold

HOLDER = """
import pathlib, sys
from rl_async.launcher.folder.run_folder import hold
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
