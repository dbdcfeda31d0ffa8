"""What a killed keeper or guard leaves behind is found by a variable, and killed."""

import logging
import os
import subprocess
from typing import Any

import pytest

from rl_async.process import strays

MARK = "RL_ASYNC_TEST_STRAYS"


def test_what_has_the_variable_is_killed() -> None:
    value = os.urandom(8).hex()
    with (
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: value}) as marked,
        subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: "other"}) as other,
    ):
        strays.kill_marked(MARK, value)
        assert marked.wait() < 0 and other.poll() is None
        other.kill()


def test_what_does_not_end_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    value = os.urandom(8).hex()
    with subprocess.Popen(["sleep", "600"], env=os.environ | {MARK: value}) as marked:
        while f"{MARK}={value}".encode() not in strays._environment(marked.pid):
            assert marked.poll() is None
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="rl_async.process"):
            patch.setattr(strays.os, "kill", lambda pid, number: None)  # as if it were in an uninterruptible sleep
            strays.kill_marked(MARK, value, within_s=0.0)
        assert str(marked.pid) in caplog.text
        marked.kill()
