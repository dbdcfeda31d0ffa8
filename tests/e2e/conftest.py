"""Data and a model that was hardly trained, made once for all tests of whole runs; working directories with them, and
short runs there."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import small_runs as command_line
from tests.e2e.artifacts import make
from tests.e2e.browser import CHROMIUM
from tests.e2e.small_runs import SMALL, Run
from tests.support.forked import Forked

HERE = Path(__file__).parent


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the modules that need the artifacts behind those that do not, which run while the artifacts are made."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    needing = {items[place].path for place in places if needs_artifacts(items[place])}
    ordered = sorted((items[place] for place in places), key=lambda item: item.path in needing)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def needs_artifacts(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "artifacts" in item.fixturenames


@pytest.fixture(scope="session", autouse=True)
def artifacts_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of the artifacts, which are made in the background from the first test of whole runs on.

    Processes of pytest-xdist share them.
    """
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent
    if not any(map(needs_artifacts, request.session.items)):
        yield root
        return
    making = Forked("tests.e2e.artifacts", str(root), parent=True)
    yield root
    try:
        making.wait(280)
    finally:
        making.kill()


@pytest.fixture(scope="session")
def artifacts(artifacts_folder: Path) -> Path:
    """What ``rl-async sft --config calculator`` leaves."""
    return make(artifacts_folder)


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
    """Start ``rl-async launch`` in the background, with forked roles; what is left of it is killed.

    The installed command is run by tests/e2e/faults/test_surroundings.py, the tutorials and scripts/try_wheel, and each
    role as a process of its own by tests/contracts.
    """
    launched: list[Run] = []

    def launch(
        name: str,
        *more: str,
        mode: str = "disaggregated",
        config: str = "calculator",
        environment: Mapping[str, str] | None = None,
    ) -> Run:
        command = ["launch", "--mode", mode, "--config", config, "--name", name, *SMALL, *more]
        launched.append(command_line.start(home, *command, environment=environment))
        return launched[-1]

    yield launch
    for process in launched:
        if process.poll() is None:
            process.kill()
            process.wait(10)
