"""TEST_SEED repeats a session: the same examples of property tests and the same draws, also on xdist's workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support.seed import SessionSeed

def pytest_configure(config):
    config.pluginmanager.register(SessionSeed(config))
"""
TESTS = """
import os, random
from pathlib import Path
import pytest
from hypothesis import given, settings, strategies as st

def note(value):
    with Path(os.environ["DRAWN"]).open("a") as file:
        file.write(f"{value}\\n")

@settings(max_examples=20, database=None, deadline=None, derandomize=False)
@given(st.lists(st.integers()))
def test_property(values):
    note(values)

@pytest.fixture(scope="session")
def model():
    random.seed(0)
    return random.random()

@pytest.fixture(scope="session")
def drawn():
    return random.random()

def test_of_its_own(model):
    note(random.random())

def test_of_a_fixture(model, drawn):
    note(f"{drawn} {random.random()}")

def test_that_fails():
    assert False
"""


def session(folder: Path, *options: str, passed: int = 3, **environment: str) -> tuple[list[str], str]:
    """What the tests drew, in some order, and what was printed."""
    drawn = folder / "drawn"
    drawn.unlink(missing_ok=True)
    plain = {name: value for name, value in os.environ.items() if name not in ("TEST_SEED", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."],
        env=plain | {"PYTHONPATH": str(ROOT), "DRAWN": str(drawn)} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"1 failed, {passed} passed" in done.stdout, done.stdout + done.stderr
    return sorted(drawn.read_text().splitlines()), done.stdout


def test_the_same_seed_draws_the_same_and_is_printed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_random.py").write_text(TESTS)
    first, printed = session(tmp_path)
    seed = printed.partition("TEST_SEED=")[2].split()[0]
    assert printed.count(f"TEST_SEED={seed}") == 2, "at the start, and where a test failed"
    assert len(first) > 20
    assert session(tmp_path, TEST_SEED=seed)[0] == first
    assert session(tmp_path, "-n", "2", TEST_SEED=seed)[0] == first
    assert session(tmp_path, f"--hypothesis-seed={seed}")[0] == first
    assert session(tmp_path, TEST_SEED=f"{int(seed) + 1}")[0] != first


def test_a_test_draws_alone_as_it_does_behind_another_that_makes_its_fixtures(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_random.py").write_text(TESTS)
    together, _ = session(tmp_path, TEST_SEED="7")
    alone, _ = session(tmp_path, "-k", "test_of_a_fixture or test_that_fails", passed=1, TEST_SEED="7")
    assert len(alone) == 1 and alone[0] in together
