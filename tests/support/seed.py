"""One seed for everything random in a session of tests: TEST_SEED, or a new one, printed so that it can be repeated.

Hypothesis derives its examples from it, and ``random``, NumPy and PyTorch are seeded before each test from it and the
test's name, so that a test draws the same alone, in another order and on any of xdist's workers.
"""

import os
import random
import sys
import zlib
from collections.abc import Generator
from typing import Any

import hypothesis.core
import pytest

VARIABLE = "TEST_SEED"


class SessionSeed:
    """The plugin. xdist's workers inherit the variable from the main process."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption("--hypothesis-seed", None)
        drawn = option or str(random.SystemRandom().randrange(1 << 32))
        given = os.environ.setdefault(VARIABLE, drawn)
        if option not in (None, given):
            raise pytest.UsageError(f"{VARIABLE}={given} and --hypothesis-seed={option} differ; give one of them")
        if not (given.isascii() and given.isdigit()):
            raise pytest.UsageError(f"{VARIABLE}={given} must be a whole number")
        self._seed = int(given)
        hypothesis.core.global_force_seed = self._seed

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # Not by pytest_report_header, which -q leaves out.
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and not hasattr(session.config, "workerinput"):
            reporter.write_line(f"{VARIABLE}={self._seed}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
        """Seed each fixture by itself, so that it draws the same whichever test is the first to ask for it."""
        self._seed_generators(f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param', '')}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._seed_generators(item.nodeid)

    def _seed_generators(self, name: str) -> None:
        seed = zlib.crc32(f"{self._seed} {name}".encode())
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            # torch.manual_seed also writes a traceback for each kind of accelerator, which may come to be used later.
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available():
                torch.cuda.manual_seed_all(seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            report.sections.append(("Seed", f"{VARIABLE}={self._seed} repeats what was drawn"))
        return report


# How many random examples a property test tries: all of them in ``make test-nightly``, a part of them elsewhere.


# `make test-nightly` sets it.
ALL_EXAMPLES = bool(os.environ.get("ALL_EXAMPLES"))


def examples(count: int) -> int:
    """``count`` where the environment has ``ALL_EXAMPLES``, else a fifth, but 10 at least."""
    return count if ALL_EXAMPLES else max(10, count // 5)
