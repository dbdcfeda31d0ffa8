"""Separates flaky tests from broken ones, for ``.ci/run`` and ``make test FLAKES=N``.

    python -m tests.support.flakes again FAILURES --report FILE      run the tests that failed once more, each alone
    python -m tests.support.flakes repeat N -- COMMAND ...           run a pytest command N times beside a busy machine

``again`` reads the file of ``pytest --failures``. A test that passes alone is flaky; the report gets its name and the
text of its first failure. Tests of a file that failed in their set-up share a fixture; they are tried together and
count as one. The exit code is 1 if a test failed again, if the report names more than ``MOST_FLAKES`` tests, or if the
session did not end regularly.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

MOST_FLAKES = 3
# More failures than this have a cause that no second try removes, and trying them all would take very long.
MOST_TRIES = 12
FLAKY = "FLAKY: "


@dataclass
class Session:
    """A pytest session: the text of each failed test's first failure, the exit status if it came to its end, and the
    tests that failed in their set-up."""

    failures: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    in_setup: set[str] = field(default_factory=set)

    def tries(self) -> list[list[str]]:
        """Return the failed tests, those together that are tried together."""
        tries: dict[str, list[str]] = {}
        for test in self.failures:
            tries.setdefault(test.split("::")[0] if test in self.in_setup else test, []).append(test)
        return list(tries.values())


@dataclass(frozen=True)
class Verdict:
    """The tests that passed alone, those that failed again, and why the stage counts as failed (empty if it passed). Of
    tests that were tried together the first one stands for all."""

    flaky: Sequence[str] = ()
    broken: Sequence[str] = ()
    why: str = ""


def read_session(file: Path) -> Session:
    """Read the lines that ``pytest --failures`` wrote; without a file the session never began."""
    session = Session()
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        if "status" in record:
            session.status = record["status"]
        else:
            session.failures.setdefault(record["test"], record["text"])
            if record["phase"] == "setup":
                session.in_setup.add(record["test"])
    return session


def judge(session: Session, known: int, pass_alone: Callable[[Sequence[str]], bool]) -> Verdict:
    """Try the failed tests once more. ``known`` is the number of flaky tests of earlier stages."""
    if session.status is None:
        return Verdict(why="pytest did not come to its end")
    if session.status != pytest.ExitCode.TESTS_FAILED or not session.failures:
        return Verdict(why=f"pytest ended with exit code {session.status}, which no single test explains")
    tries = session.tries()
    if len(tries) > MOST_TRIES:
        return Verdict(why=f"{len(session.failures)} tests failed, too many to try each again")
    passed = {tests[0]: pass_alone(tests) for tests in tries}
    flaky, broken = ([test for test in passed if passed[test] is which] for which in (True, False))
    if broken:
        return Verdict(flaky, broken, f"{len(broken)} of {len(passed)} failed tests failed again, alone")
    if known + len(flaky) > MOST_FLAKES:
        return Verdict(flaky, why=f"{known + len(flaky)} tests of this run are flaky; {MOST_FLAKES} are tolerated")
    return Verdict(flaky)


def pass_alone(tests: Sequence[str]) -> bool:
    """Run tests in a process of their own and say whether all passed; skipped is not passed."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "result.xml"
        # Options of the failed session, such as files that it appends to, are not for the second try.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        environment.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-m", "pytest", "-n", "0", f"--junitxml={record}", *tests]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode != 0:
            return False
        suites = ElementTree.parse(record).getroot().iter("testsuite")
        return all(int(suite.get("tests", 0)) == len(tests) and suite.get("skipped") == "0" for suite in suites)


def run_again(failures: Path, report: Path) -> int:
    """Try the failed tests of a session again, extend the report, and return the exit code."""
    session = read_session(failures)
    known = len(flaky_tests(report))
    verdict = judge(session, known, pass_alone)
    report.parent.mkdir(parents=True, exist_ok=True)
    with report.open("a") as file:
        for test in verdict.flaky:
            file.write(f"{FLAKY}{test}\n{textwrap.indent(session.failures[test], '    ')}\n")
    for test in verdict.flaky:
        print(f"{FLAKY}{test}")
    for test in verdict.broken:
        print(f"FAILED TWICE: {test}")
    if verdict.why:
        print(f"the stage failed: {verdict.why}", file=sys.stderr)
    return 1 if verdict.why else 0


def flaky_tests(report: Path) -> list[str]:
    """Return the tests that a report names."""
    lines = report.read_text().splitlines() if report.exists() else []
    return [line.removeprefix(FLAKY) for line in lines if line.startswith(FLAKY)]


def repeat(times: int, command: Sequence[str]) -> int:
    """Run a pytest command several times beside a load, and print how often each test failed; the exit code."""
    failed: Counter[str] = Counter()
    irregular = 0
    with tempfile.TemporaryDirectory() as folder, load():
        for number in range(1, times + 1):
            print(f"round {number} of {times}, beside stress-ng --cpu 2", flush=True)
            file = Path(folder) / f"{number}.jsonl"
            done = subprocess.run([*command, f"--failures={file}"], check=False)
            session = read_session(file)
            failed.update(session.failures.keys())
            irregular += done.returncode != 0 and not session.failures
    for test, count in failed.most_common():
        print(f"failed in {count} of {times} rounds: {test}")
    if irregular:
        print(f"{irregular} of {times} rounds ended without running the tests", file=sys.stderr)
    elif not failed:
        print(f"no test failed in {times} rounds")
    return 1 if failed or irregular else 0


@contextmanager
def load() -> Iterator[None]:
    """Keep two cores busy while the block runs."""
    if shutil.which("stress-ng") is None:
        sys.exit("FLAKES needs stress-ng: apt-get install stress-ng")
    with subprocess.Popen(["stress-ng", "--cpu", "2", "--quiet"]) as process:
        try:
            yield
        finally:
            process.terminate()


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Tell flaky tests from broken ones."
    parser = argparse.ArgumentParser(prog="python -m tests.support.flakes", description=description)
    commands = parser.add_subparsers(required=True, dest="command")
    again = commands.add_parser("again", help="run the tests that failed once more, each alone")
    again.add_argument("failures", type=Path, help="what pytest --failures wrote")
    again.add_argument("--report", type=Path, required=True, help="file that gets flaky tests and their first failures")
    repeated = commands.add_parser("repeat", help="run a pytest command several times beside stress-ng --cpu 2")
    repeated.add_argument("times", type=int)
    repeated.add_argument("pytest_command", nargs="+")
    given = parser.parse_args(arguments)
    if given.command == "again":
        return run_again(given.failures, given.report)
    return repeat(given.times, given.pytest_command)


if __name__ == "__main__":
    sys.exit(main())
