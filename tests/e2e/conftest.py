"""Data and a model that was hardly trained, made once for all tests of whole runs; working directories with them, and
short runs there."""

import fcntl
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import command as command_line
from tests.e2e.browser import CHROMIUM
from tests.e2e.command import HARDLY_WARM, RL_ASYNC, succeed
from tests.e2e.small_runs import SMALL, Run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    install = "install Chromium and its driver: apt-get install chromium; pip install 'rl-async[browser]'"
    playwright = pytest.importorskip("playwright.sync_api", reason=install)
    if CHROMIUM is None:
        pytest.skip(install)
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """What ``rl-async sft --config calculator`` leaves; processes of pytest-xdist share it."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent
    made = root / "calculator" / "artifacts"
    with (root / "calculator.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or this process has ended
        if not made.is_dir():
            home = root / "calculator.unfinished"
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            succeed(home, "sft", "--config", "calculator", *HARDLY_WARM)
            home.rename(made.parent)
    return made


@pytest.fixture
def workplace(artifacts: Path, tmp_path: Path) -> Path:
    """``tmp_path``, so that a run there need not begin with its preparation."""
    shutil.copytree(artifacts, tmp_path / "artifacts")
    return tmp_path


@pytest.fixture(scope="module")
def home(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with data and a model that was hardly trained."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(artifacts, folder / "artifacts")
    return folder


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Run]]:
    """Start ``rl-async launch`` in the background, with forked roles or ``installed``; what is left of it is killed."""
    launched: list[Run] = []

    def launch(
        name: str,
        *more: str,
        mode: str = "disaggregated",
        config: str = "calculator",
        installed: bool = False,
    ) -> Run:
        command = ["launch", "--mode", mode, "--config", config, "--name", name, *SMALL, *more]
        if installed:
            process: Run = subprocess.Popen(
                [RL_ASYNC, *command], cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        else:
            process = command_line.start(home, *command)
        launched.append(process)
        return process

    yield launch
    for process in launched:
        if process.poll() is None:
            process.kill()
            process.wait(10)
