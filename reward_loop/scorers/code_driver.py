"""Runs inside the sandbox: loads a program as the module `solution`, then calls a function of it or tests it.

The first line of standard input is a JSON object that says which. Results are written to standard output after `MARK`;
a check that passed is reported by a secret of its own. The text of this file is sent as a program, so it needs nothing
but Python 3.10 and its standard library.
"""

import ast
import asyncio
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import sys
import types
import unittest
from collections.abc import Callable, Mapping
from typing import Any

MARK = "\x00rl-async: "
MISSING = "missing "

# LeetCode, whose tasks have starter code, and the graders of LiveCodeBench and PRIME import these for the program.
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""


class OutOfTime(BaseException):
    """The time of one check is over. Programs that catch Exception do not catch it."""


def main() -> None:
    given = json.loads(sys.stdin.readline())
    reports = os.fdopen(os.dup(1), "wb")

    def report(text: str) -> None:
        reports.write(f"\n{MARK}{text}\n".encode())
        reports.flush()

    # The program is not loaded yet, so that it has no say in this.
    for name in given["modules"]:
        if name != "pytest" and importlib.util.find_spec(name) is None:
            report(given["secret"] + MISSING + name)
            return
    if "pytest" in given["modules"]:
        sys.modules["pytest"] = pytest_stand_in()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    space = module.__dict__
    exec(PRELUDE, space)
    for line in given["imports"]:
        if importlib.util.find_spec(line["module"]) is not None:
            exec(line["source"], space)
    before = dict(space)
    exec(compile(given["program"], "solution.py", "exec"), space)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    if "name" in given:
        name = given["name"]
        own = name in space and space[name] is not before.get(name)
        function = space[name] if own else getattr(space["Solution"](), name)
        report(json.dumps(awaited(loop, function(*given["arguments"]))))
        return
    signal.signal(signal.SIGALRM, _out_of_time)
    for source, secret in given["statements"]:
        if secret is None:
            execute(loop, source, space)
        elif passes(lambda text=source: execute(loop, text, space), given["seconds"]):  # type: ignore[misc]
            report(secret)
    if (test := given["test"]) is not None and run_test(loop, space, test["group"], test["name"], test["unittest"]):
        report(given["secret"])


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def passes(check: Callable[[], object], seconds: float) -> bool:
    """Whether a check ends in time and raises nothing."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        check()
    except (Exception, SystemExit, OutOfTime):
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return True


def awaited(loop: asyncio.AbstractEventLoop, value: Any) -> Any:
    """Return a value, or the result of an awaitable."""
    while inspect.isawaitable(value):

        async def wait(waiting: Any = value) -> Any:
            return await waiting

        value = loop.run_until_complete(wait())
    return value


def execute(loop: asyncio.AbstractEventLoop, source: str, space: dict[str, Any]) -> None:
    """Run one statement, which may await; an expression whose value is awaitable is awaited."""
    tree = ast.parse(source)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    statement = tree.body[0]
    if isinstance(statement, ast.Expr):
        code = compile(ast.Expression(statement.value), "test.py", "eval", flags, dont_inherit=True)
    else:
        code = compile(tree, "test.py", "exec", flags, dont_inherit=True)
    awaited(loop, eval(code, space))


def run_test(loop: asyncio.AbstractEventLoop, space: dict[str, Any], group: str, name: str, of_unittest: bool) -> bool:
    """Run a test function, or the method of the class ``group``; it fails by raising. Returns whether it passed."""
    if of_unittest:
        result = unittest.TestResult()
        unittest.TestSuite([space[group](name)]).run(result)
        return result.testsRun == 1 and result.wasSuccessful() and not result.skipped
    module = types.SimpleNamespace(**{key: space[key] for key in space if key.startswith(("setup_", "teardown_"))})
    hook(module, "setup_module", module)
    if group:
        hook(space[group], "setup_class")
    for arguments in getattr(getattr(space[group], name) if group else space[name], "parameters", [{}]):
        owner = space[group]() if group else module
        function = getattr(owner, name) if group else space[name]
        hook(owner, "setup_method" if group else "setup_function", function)
        awaited(loop, function(**arguments))
        hook(owner, "teardown_method" if group else "teardown_function", function)
    if group:
        hook(space[group], "teardown_class")
    hook(module, "teardown_module", module)
    return True


def hook(owner: Any, name: str, *arguments: object) -> None:
    """Call a function that prepares tests or clears up after them, with as many arguments as it takes."""
    function = getattr(owner, name, None)
    if function is not None:
        function(*arguments[: len(inspect.signature(function).parameters)])


class Raises:
    """pytest.raises."""

    def __init__(self, expected: Any, match: "str | re.Pattern[str] | None" = None) -> None:
        self._expected, self._match = expected, match
        self.value: BaseException | None = None
        self.type: type[BaseException] | None = None

    def __enter__(self) -> "Raises":
        return self

    def __exit__(self, kind: "type[BaseException] | None", error: "BaseException | None", _: object) -> bool:
        if kind is None:
            raise AssertionError("did not raise")
        if not issubclass(kind, self._expected):
            return False
        self.type, self.value = kind, error
        if self._match is not None:
            self.match(self._match)
        return True

    def match(self, pattern: "str | re.Pattern[str]") -> bool:
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{pattern} does not match {self.value}")
        return True


class Approx:
    """pytest.approx of numbers, sequences and mappings."""

    def __init__(
        self, expected: Any, rel: "float | None" = None, abs: "float | None" = None, nan_ok: bool = False
    ) -> None:
        # An absolute tolerance that is given alone replaces the relative one.
        self._rel = rel if rel is not None else (1e-6 if abs is None else 0.0)
        self._abs = 1e-12 if abs is None else abs
        self._expected, self._nan_ok = expected, nan_ok

    def __eq__(self, found: object) -> bool:
        return self._same(found, self._expected)

    __hash__ = None  # type: ignore[assignment]

    def _same(self, found: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            same_keys = isinstance(found, Mapping) and found.keys() == expected.keys()
            return same_keys and all(self._same(found[key], expected[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            same_length = isinstance(found, (list, tuple)) and len(found) == len(expected)
            return same_length and all(map(self._same, found, expected))
        if found == expected:
            return True
        try:
            if math.isnan(expected):
                return self._nan_ok and math.isnan(found)
            if math.isinf(expected):
                return False
            return bool(abs(found - expected) <= max(self._abs, self._rel * abs(expected)))
        except TypeError:
            return False


def pytest_stand_in() -> types.ModuleType:
    """Make the part of pytest that ground truths may use, so that no test depends on what the sandbox has installed."""
    module: Any = types.ModuleType("pytest")

    def raises(expected: Any, function: Any = None, *arguments: Any, match: Any = None, **named: Any) -> Any:
        if function is None:
            return Raises(expected, match)
        with Raises(expected, match) as raised:
            function(*arguments, **named)
        return raised

    def fail(reason: str = "", **_: object) -> None:
        raise AssertionError(reason)

    def parametrize(names: Any, values: Any, **_: object) -> Any:
        keys = [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else list(names)
        rows = [
            dict(zip(keys, row.values if isinstance(row, Param) else row if len(keys) > 1 else [row])) for row in values
        ]
        if not rows:
            raise ValueError("parametrize without values")

        def mark(function: Any) -> Any:
            function.parameters = [{**row, **more} for more in getattr(function, "parameters", [{}]) for row in rows]
            return function

        return mark

    class Param:
        def __init__(self, *values: Any, id: object = None) -> None:
            self.values = values

    module.raises, module.approx, module.fail, module.param = raises, Approx, fail, Param

    def asynchronous(function: Any = None, **_: object) -> Any:
        return function if function is not None else lambda given: given

    module.mark = types.SimpleNamespace(parametrize=parametrize, asyncio=asynchronous)
    return module


if __name__ == "__main__":
    main()
