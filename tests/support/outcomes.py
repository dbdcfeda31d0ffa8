"""A pytest plugin that records the tests that failed, and those that were skipped for want of an installation, and that
selects the latter together with the slow ones.

Only the session's main process records: workers of pytest-xdist report to it.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--not-installed",
        type=Path,
        metavar="FILE",
        help="append to FILE the ids of tests that were skipped because something is not installed",
    )
    parser.addoption(
        "--failures",
        type=Path,
        metavar="FILE",
        help="write each failed test to FILE with its text, as lines of JSON, and at the end pytest's exit status",
    )
    parser.addoption(
        "--slow-or-listed",
        type=Path,
        metavar="FILE",
        help="run only the slow tests but the nightly ones, and those that FILE lists, by their ids or their modules",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    # Tests that run pytest themselves must not write into the files of this session.
    os.environ.pop("PYTEST_ADDOPTS", None)
    if (file := config.getoption("--not-installed")) is not None:
        config.pluginmanager.register(SkipRecorder(file))
    if (file := config.getoption("--failures")) is not None:
        config.pluginmanager.register(FailureRecorder(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (file := config.getoption("--slow-or-listed")) is None:
        return
    listed = set(file.read_text().splitlines()) if file.exists() else set()

    def wanted(item: pytest.Item) -> bool:
        if "nightly" in item.keywords:
            return False
        return "slow" in item.keywords or not listed.isdisjoint({item.nodeid, item.nodeid.split("::")[0]})

    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]


class SkipRecorder:
    """Append to ``file``, one a line, each test or module that is skipped for a reason that says what to install."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._written: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._record(report)

    def _record(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        if "install" in reason and report.nodeid not in self._written:
            self._written.add(report.nodeid)
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")


class FailureRecorder:
    """Write failures to ``file`` as they are reported: ``{"test": …, "phase": …, "text": …}``, then ``{"status": …}``.

    A session that was ended from outside leaves a file without a status.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "phase": report.when, "text": report.longreprtext})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "phase": "collect", "text": report.longreprtext})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write({"status": int(exitstatus)})

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
