"""An environment whose container takes seconds to start. Nothing but a kill ends it once its host is gone."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rl_async.agent_loop.tools.tool import Step, Tool
from rl_async.messages import Task

COMMAND = "setsid sleep 600 <&- >&- 2>&- & sleep {start_s}; echo $!; exec cat"


class Container:
    """Says what it is told, once it has started: a process, and another one in a session of its own, with files.

    Raises RuntimeError if it has been killed.
    """

    def __init__(self, start_s: float) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="container-"))
        self._process = subprocess.Popen(
            ["sh", "-c", COMMAND.format(start_s=start_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            start_new_session=True,
        )
        self._other = int(self._read())

    def ask(self, text: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the container was killed")
        return line.rstrip("\n")

    def close(self) -> None:
        os.kill(self._other, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._folder)


class InContainer:
    """Has one tool, and is worth 1 if its container runs to the end. ``record``: a folder in which steps leave a file
    named after the process."""

    def __init__(self, task: Task, container: Container, start_s: float = 1.0, record: str = "") -> None:
        self._container, self._record = container, record

    @staticmethod
    def prepare(start_s: float = 1.0, record: str = "") -> Container:
        return Container(start_s)

    def tools(self) -> Sequence[Tool]:
        return [Tool(self.evaluate)]

    def evaluate(self, expression: str) -> str:
        """Evaluate an expression."""
        return self._container.ask(expression)

    def step(self, answer: str) -> Step:
        if self._record:
            (Path(self._record) / str(os.getpid())).touch()
        return Step(done=True)

    def reward(self) -> float:
        return float(self._container.ask("1"))

    def close(self) -> None:
        self._container.close()
