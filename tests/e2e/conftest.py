"""Data and a model that was hardly trained, made once for all tests of whole runs; a working directory with them."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import CHROMIUM
from tests.e2e.command import HARDLY_WARM, succeed


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
