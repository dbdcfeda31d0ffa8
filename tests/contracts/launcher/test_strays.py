"""Keepers and guards kill what they keep; what they leave behind when killed is found by a variable, and killed."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rl_async.launcher import play_keeper
from rl_async.process import guard, kernel
from rl_async.process.kernel import ENDED, state_of

MARK = "RL_ASYNC_TEST_STRAYS"


def test_what_has_the_variable_is_killed() -> None:
    value = os.urandom(8).hex()
    with (
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: value}) as marked,
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: "other"}) as other,
    ):
        kernel.kill_marked(MARK, value)
        assert marked.wait() < 0 and other.poll() is None
        other.kill()


def test_what_does_not_end_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    value = os.urandom(8).hex()
    with subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: value}) as marked:
        while f"{MARK}={value}".encode() not in kernel._environment(marked.pid):
            assert marked.poll() is None
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="rl_async.process"):
            patch.setattr(kernel.os, "kill", lambda pid, number: None)  # as if it were in an uninterruptible sleep
            kernel.kill_marked(MARK, value, within_s=0.0)
        assert str(marked.pid) in caplog.text
        marked.kill()


KILLS = """
import ctypes, os
from subprocess import DEVNULL, PIPE, Popen
from {module} import kill_all
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
child = Popen(["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=PIPE, stderr=DEVNULL)
print(child.pid, int(child.stdout.readline()), flush=True)
{then}
"""


def in_a_process(keeping: ModuleType, then: str) -> "subprocess.CompletedProcess[str]":
    """Run ``then`` in a process that has a child and a grandchild, whose pids it prints."""
    program = KILLS.format(module=keeping.__name__, then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("keeping", [guard, play_keeper])
def test_whoever_keeps_processes_kills_all_of_them(keeping: ModuleType) -> None:
    done = in_a_process(keeping, "kill_all()")
    assert done.returncode == 0, done.stderr
    assert all(state_of(int(pid)) in ENDED for pid in done.stdout.split()) and state_of(os.getpid()) not in ENDED


@pytest.mark.parametrize("keeping", [guard, play_keeper])
def test_and_does_not_wait_for_ever_for_one_that_does_not_end(keeping: ModuleType) -> None:
    immortal = "os.kill = lambda pid, number: None\nkill_all(within_s=0.1)"  # as if in an uninterruptible sleep
    done = in_a_process(keeping, immortal)
    child, grandchild = map(int, done.stdout.split())
    for pid in (child, grandchild):
        os.kill(pid, signal.SIGKILL)
    assert done.returncode == 1 and "TimeoutError" in done.stderr and str(child) in done.stderr


def test_a_guard_whose_worker_died_before_it_looked_starts_nothing(tmp_path: Path) -> None:
    """Its parent is then another process: here this one, for a worker that is this one's parent."""
    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getppid()), str(tmp_path / "folder")]
    done = subprocess.run([*command, "touch", str(tmp_path / "started")], timeout=60)
    assert done.returncode == guard.CANNOT_START and list(tmp_path.iterdir()) == []
