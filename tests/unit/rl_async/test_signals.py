"""Signals that a process was started to ignore."""

import signal
import subprocess
import sys

CHILD = """
import signal, subprocess, sys
from rl_async.process.role import heeded, ignore_alone
before = heeded(signal.SIGHUP, signal.SIGTERM)
ignore_alone(signal.SIGTERM, signal.SIGHUP)
assert heeded(signal.SIGHUP, signal.SIGTERM) == before
signal.raise_signal(signal.SIGTERM)
assert subprocess.run([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGTERM)"]).returncode == -15
print(*before)
"""


def test_an_ignored_signal_stays_so_and_is_not_handed_to_children() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    done = subprocess.run([sys.executable, "-c", CHILD], preexec_fn=ignore, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{int(signal.SIGHUP)}\n"), done.stderr
