"""Second tries of failed tests: the verdict, and real sessions of tests that fail once, twice or are skipped."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.flakes import MOST_FLAKES, MOST_TRIES, Session, flaky_tests, judge, read_session, run_again

ROOT = Path(__file__).parents[2]
FAILED = pytest.ExitCode.TESTS_FAILED


def session(*tests: str, status: int | None = FAILED, in_setup: Sequence[str] = ()) -> Session:
    return Session(dict.fromkeys([*tests, *in_setup], "AssertionError"), status, set(in_setup))


def test_tests_that_pass_alone_are_flaky_and_the_stage_passes() -> None:
    verdict = judge(session("a", "b"), 0, lambda tests: True)
    assert verdict.flaky == ["a", "b"] and not verdict.broken and not verdict.why


def test_a_test_that_fails_again_fails_the_stage() -> None:
    verdict = judge(session("a", "b"), 0, lambda tests: tests == ["a"])
    assert verdict.flaky == ["a"] and verdict.broken == ["b"] and verdict.why


@pytest.mark.parametrize("passes", [True, False])
def test_tests_of_a_file_that_fail_in_their_set_up_are_tried_together_and_count_as_one(passes: bool) -> None:
    shared = [f"a.py::{number}" for number in range(MOST_TRIES + 1)]
    tried: list[Sequence[str]] = []

    def pass_alone(tests: Sequence[str]) -> bool:
        tried.append(tests)
        return passes or tests != shared

    verdict = judge(session("a.py::own", "b.py::own", in_setup=shared), 0, pass_alone)
    assert tried == [["a.py::own"], ["b.py::own"], shared]
    assert verdict.flaky == ["a.py::own", "b.py::own", *([shared[0]] if passes else [])]
    assert list(verdict.broken) == ([] if passes else [shared[0]])
    assert bool(verdict.why) is not passes


@pytest.mark.parametrize(("known", "new", "passes"), [(0, 3, True), (0, 4, False), (3, 1, False), (2, 1, True)])
def test_more_flaky_tests_than_are_tolerated_fail_the_run(known: int, new: int, passes: bool) -> None:
    assert MOST_FLAKES == 3
    verdict = judge(session(*map(str, range(new))), known, lambda tests: True)
    assert bool(verdict.why) is not passes


@pytest.mark.parametrize(
    "ended",
    [
        session(status=None),
        session("a", status=None),
        session(status=FAILED),
        session("a", status=pytest.ExitCode.INTERRUPTED),
        session("a", status=pytest.ExitCode.INTERNAL_ERROR),
        session(status=pytest.ExitCode.NO_TESTS_COLLECTED),
        session(*map(str, range(MOST_TRIES + 1))),
    ],
    ids=["never began", "killed", "nothing failed", "interrupted", "internal error", "no tests", "too many"],
)
def test_a_session_that_single_tests_do_not_explain_fails_without_a_second_try(ended: Session) -> None:
    def never(tests: Sequence[str]) -> bool:
        raise AssertionError(f"{tests} were tried again")

    assert judge(ended, 0, never).why


TESTS = """
import pathlib
import pytest

def fails_first(name):
    mark = pathlib.Path(__file__).with_name(name)
    known = mark.exists()
    mark.touch()
    assert known, "the first try fails"

@pytest.mark.parametrize("text", ["a b", "x::y[z]"])
def test_once(text):
    fails_first(text.replace(":", ""))

def test_passes():
    pass

def test_twice():
    assert pathlib.Path(__file__).with_name("mended").exists()

def test_nested():
    import subprocess, sys
    here = pathlib.Path(__file__).with_name("nested")
    here.mkdir(exist_ok=True)
    (here / "test_it.py").write_text("def test_it(): pass")
    subprocess.run([sys.executable, "-m", "pytest", str(here)], check=True)
    assert False, "behind a session of its own"

@pytest.fixture(scope="module")
def shared():
    fails_first("shared")

@pytest.mark.parametrize("number", range(2))
def test_of_a_fixture(shared, number):
    pass

def test_skips_later():
    if pathlib.Path(__file__).with_name("mended").exists():
        pytest.skip("nothing was tried")
    raise ValueError("at first")
"""


def first_session(folder: Path, chosen: str, *options: str) -> Path:
    """Run the tests above in ``folder`` as a stage of ``.ci/run`` does, and return what it recorded."""
    (folder / "test_them.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p tests.support.outcomes -p no:cacheprovider\n")
    record = folder / "failures.jsonl"
    command = [sys.executable, "-m", "pytest", "-k", chosen, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": f"--failures={record}"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60, check=False)
    return record


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["one process", "workers"]
)
def test_a_test_that_fails_once_is_named_with_its_first_failure(
    there: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    record, report = first_session(there, "once or passes", *options), there / "build" / "flakes.txt"
    assert run_again(record, report) == 0
    assert sorted(flaky_tests(report)) == ["test_them.py::test_once[a b]", "test_them.py::test_once[x::y[z]]"]
    assert "the first try fails" in report.read_text()
    assert "FLAKY: test_them.py::test_once[a b]" in capfd.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_fixture_that_fails_once_is_one_flake(there: Path) -> None:
    record, report = first_session(there, "fixture or passes"), there / "flakes.txt"
    assert len(read_session(record).failures) == 2
    assert run_again(record, report) == 0
    assert flaky_tests(report) == ["test_them.py::test_of_a_fixture[0]"]


@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run(there: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record, report = first_session(there, "once or twice"), there / "flakes.txt"
    assert run_again(record, report) == 1
    assert len(flaky_tests(report)) == 2
    assert "FAILED TWICE: test_them.py::test_twice" in capfd.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_second_try_that_is_skipped_does_not_pass(there: Path) -> None:
    record = first_session(there, "skips_later")
    (there / "mended").touch()
    assert run_again(record, there / "flakes.txt") == 1


@pytest.mark.slow
def test_a_session_records_failures_and_its_end(there: Path) -> None:
    recorded = read_session(first_session(there, "twice"))
    assert list(recorded.failures) == ["test_them.py::test_twice"] and recorded.status == FAILED


@pytest.mark.slow
def test_a_session_within_a_test_does_not_write_into_the_record(there: Path) -> None:
    recorded = read_session(first_session(there, "twice or nested"))
    assert sorted(recorded.failures) == ["test_them.py::test_nested", "test_them.py::test_twice"]
    assert recorded.status == FAILED


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_fails_the_run(there: Path) -> None:
    (there / "test_broken.py").write_text("import nowhere_to_be_found\n")
    record = first_session(there, "passes or broken")
    assert run_again(record, there / "flakes.txt") == 1


@pytest.mark.slow
def test_slow_tests_and_listed_ones_are_selected(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p tests.support.outcomes\nmarkers =\n  slow\n  nightly")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_listed(): pass\ndef test_other(): pass\n"
        "@pytest.mark.slow\n@pytest.mark.nightly\ndef test_nightly(): pass\n"
    )
    (tmp_path / "test_two.py").write_text("def test_of_a_listed_module(): pass\n")
    (tmp_path / "list").write_text("test_one.py::test_listed\ntest_two.py\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}

    def selected(file: str) -> set[str]:
        done = subprocess.run(
            [*command, f"--slow-or-listed={file}"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}

    assert selected("list") == {"test_slow", "test_listed", "test_of_a_listed_module"}
    assert selected("none") == {"test_slow"}
