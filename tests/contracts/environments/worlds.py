"""Environments of a user, for tests in and outside the worker's process. ``folder`` shows what they do."""

import asyncio
import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_async.agent_loop.tools.tool import Step, Tool
from rl_async.messages import Task

COUNTER = itertools.count()


class Game:
    """Guess ``secret``. It cannot be pickled, its numbers are NumPy's, and some guesses break it."""

    def __init__(self, task: Task, folder: str = "") -> None:
        self.secret, self.folder = int(task.ground_truth), Path(folder)
        self.lock, self.guesses = threading.Lock(), 0
        self.never = threading.Event()

    def reset(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "a game"}, {"role": "user", "content": "from 0 to 9"}]

    def tools(self) -> Sequence[Tool]:
        def submit(number: int) -> Step:
            """Submit a number."""
            return Step({"noted": number}, reward=np.float32(0.5), done=number == self.secret, reason="submitted")

        async def pid() -> int:
            return os.getpid()

        def broken(at: str) -> str:
            raise KeyError(at)

        return [Tool(submit), Tool(pid), Tool(broken)]

    def step(self, answer: str) -> Step:
        if answer == "raise":
            raise KeyError("lost")
        if answer == "hang":
            self.never.wait()
        if answer == "forge":
            return Step([{"role": "assistant", "content": "4"}])
        if answer == "nonsense":
            return Step("on", reward="much")  # type: ignore[arg-type]
        with self.lock:
            self.guesses += 1
        if int(answer) == self.secret:
            return Step(done=np.bool_(True), reward=np.float64(1))
        return Step("higher" if int(answer) < self.secret else "lower", reward=-0.25, reason="wrong")

    async def reward(self) -> Mapping[str, Any]:
        return {"score": np.float32(1), "guesses": self.guesses, "text": "is not recorded"}

    def close(self) -> None:
        (self.folder / f"closed-{os.getpid()}-{next(COUNTER)}").touch()


class Prepared:
    """What ``Slow.prepare`` makes: a container, say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, f"{os.getpid()}-{next(COUNTER)}"

    def close(self) -> None:
        (self.folder / f"released-{self.name}").touch()


class Slow:
    """Starts when the file ``gate`` is there, and fails to while there is a file ``broken``."""

    def __init__(self, task: Task, prepared: Prepared, folder: str) -> None:
        self.prepared = prepared

    @staticmethod
    def prepare(folder: str) -> Prepared:
        prepared = Prepared(Path(folder))
        (Path(folder) / f"preparing-{prepared.name}").touch()
        while not (Path(folder) / "gate").exists():
            time.sleep(0.02)
        if (Path(folder) / "broken").exists():
            raise RuntimeError("no image")
        (Path(folder) / f"prepared-{prepared.name}").touch()
        return prepared

    async def reset(self) -> str:
        return self.prepared.name

    async def close(self) -> None:
        self.prepared.close()


class Parent:
    """Starts a process that ignores SIGTERM and has left every process group, as a daemon would."""

    def __init__(self, task: Task, folder: str) -> None:
        command = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
        self.child = subprocess.Popen(command, start_new_session=True)
        (Path(folder) / f"pids-{task.task_id}").write_text(json.dumps([os.getpid(), self.child.pid]))

    async def step(self, answer: str) -> Step:
        await asyncio.Event().wait()
        return Step()


class Unmade:
    """Cannot be made."""

    def __init__(self, task: Task, folder: str) -> None:
        raise ValueError("not today")


class EndsItsProcess:
    """Takes its host with it."""

    def __init__(self, task: Task, folder: str) -> None:
        os._exit(7)


class Gated:
    """Answers when the file ``gate`` is there, and tells in files that it was asked."""

    def __init__(self, task: Task, folder: str) -> None:
        self.folder = Path(folder)

    async def reset(self) -> str:
        return "go"

    def step(self, answer: str) -> Step:
        (self.folder / f"stepping-{os.getpid()}-{next(COUNTER)}").touch()
        while not (self.folder / "gate").exists():
            time.sleep(0.02)
        return Step(done=True)

    async def reward(self) -> float:
        return 1.0


class Haggle(Game):
    """The seller names a price and the buyer answers; each has a tool of the same name, and a reward of its own."""

    roles = ("seller", "buyer")

    def reset(self) -> Step:  # type: ignore[override]
        return Step("name a price", to="seller")

    def tools(self) -> Any:
        def worth(of: str) -> Step:
            """What it is worth to the seller."""
            return Step(f"{of}: 3", reward=np.float32(0.5))

        def dear(of: str) -> str:
            """What it is worth to the buyer."""
            return f"{of}: 5"

        return {"seller": [Tool(worth, name="worth")], "buyer": [Tool(dear, name="worth")]}

    def step(self, answer: str) -> Step:
        self.guesses += 1
        if self.guesses == 2:
            return Step(done=np.bool_(True), reward=np.float64(1))
        return Step(f"for {answer}?", to="buyer", reward=-0.25, reason="asked")

    def reward(self) -> Any:
        return {"seller": np.float64(1), "buyer": {"score": -1, "turns": self.guesses}}
