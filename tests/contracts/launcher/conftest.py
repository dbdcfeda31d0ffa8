"""A plan of fake roles (``roles.py``), and the means to look at their processes."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl_async.launcher.plan.planning import Plan, PortWish, ProcessSpec, Role

ROLES = Path(__file__).with_name("roles.py")
DEADLINE_S = 60.0
GONE_S = 10.0


def fake_plan(
    folder: Path,
    *,
    stop_timeout_s: float = 20.0,
    max_restarts: int = 2,
    reward_model: bool = False,
    queue_restarts: int = 0,
) -> Plan:
    """One process of each role; the trainer is done when ``folder/go`` exists."""
    (folder / "logs").mkdir(exist_ok=True)

    def spec(role: Role, *arguments: str, restarts: int = max_restarts) -> ProcessSpec:
        argv = (sys.executable, str(ROLES), role, str(folder), *arguments)
        first = ("--relaunched",) if role == "queue" else ()
        again = ("--resume",) if role == "trainer" else ()
        name = role if role in ("queue", "prepare", "reward-model") else f"{role}-0"
        return ProcessSpec(
            name=name,
            role=role,
            argv=argv,
            max_restarts=restarts,
            first_argv=first,
            restart_argv=again,
            engine_kind="embedded",
        )

    return Plan(
        mode="disaggregated",
        transport="gloo",
        prepare=spec("prepare"),
        queue=spec("queue", "{queue}", restarts=queue_restarts),
        engines=(spec("engine", "{engine-0}"),),
        workers=(spec("worker"),),
        trainers=(spec("trainer", "{queue}"),),
        ports=(PortWish("queue"), PortWish("engine-0"), PortWish("reward-model")),
        start_timeout_s=40.0,
        stop_timeout_s=stop_timeout_s,
        reward_model=spec("reward-model", "{reward-model}") if reward_model else None,
    )


class Rig:
    """The folder of a fake run, seen from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def do(self, kind: str, *lines: str) -> None:
        """Say how a role behaves at its first, second, ... start."""
        (self.folder / f"{kind}.do").write_text("\n".join(lines))

    def go(self) -> None:
        """Let the trainer finish."""
        (self.folder / "go").touch()

    def pids(self, kind: str) -> list[int]:
        """Processes of a role that ever ran, oldest first."""
        file = self.folder / f"{kind}.pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def alive(self) -> list[int]:
        """Processes of this run that still run."""
        kinds = [file.stem for file in self.folder.glob("*.pids")]
        return [pid for kind in kinds for pid in self.pids(kind) if running(pid)]

    def left(self) -> list[int]:
        """Processes of this run that do not end by themselves: one is gone some time after it was killed."""
        deadline = time.monotonic() + GONE_S
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return alive


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until true; fails after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    (tmp_path / "logs").mkdir()
    rig = Rig(tmp_path)
    yield rig
    for pid in rig.alive():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    return fake_plan


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    return wait_until
