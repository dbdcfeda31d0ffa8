"""The code that a user of these runs brings: a loop that calls every tool, and an environment in a container.

The loop is ``agent.loop`` of a run, which reads the file by its path. The tasks of presets name a loop of their own, so
the run needs others: ``write_tasks``.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rl_async.agent_loop.chat_formats.format import ParsedCall
from rl_async.agent_loop.episode import Episode
from rl_async.agent_loop.tools.tool import Step, Tool
from rl_async.messages import Task

TIMES = 5
PAUSE_S = 0.2
SUM = {"expression": "20 + 3 * 7"}
# Arguments of tools; any other tool is a calculator.
ARGUMENTS: dict[str, dict[str, object]] = {
    "python": {
        "code": "import os, time; open('seen', 'a').write('x'); time.sleep(0.3); print(os.stat('seen').st_size)"
    },
    "bash": {"command": "setsid sleep 600 & echo here >> seen; sleep 0.3; wc -c seen"},
    # The rest ends with its program.
}


def write_tasks(path: Path) -> None:
    """Write a few tasks that leave the choice of the loop to the config."""
    rows = [
        {
            "data_source": "calculator",
            "prompt": [{"role": "user", "content": f"what is {number}+{number}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        }
        for number in range(16)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def play(episode: Episode) -> str:
    """Sample one answer, then call the tools."""
    reason = await episode.generate()
    given = [(name, ARGUMENTS.get(name, SUM)) for name in episode.tools]
    calls = [ParsedCall(name, arguments, json.dumps(arguments)) for name, arguments in given]
    for _ in range(TIMES):
        await episode.call(calls)
        await asyncio.sleep(PAUSE_S)
    return reason


# An environment whose container takes seconds to start. Nothing but a kill ends it once its host is gone.


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
