"""The scorer ``code``: runs the program of an answer against the hidden tests of its task, in a sandbox.

Expected outputs never enter the sandbox: they are compared out here with the program's output or result. Tests that are
code do enter it, and run beside the program: in a process that it cannot look into where they only call its functions,
else in its own.
"""

import ast
import asyncio
import json
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rl_async.concurrency import off_loop
from rl_async.configs.schema.reward import CodeConfig
from rl_async.errors import DataError
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.scorers import code_driver
from rl_async.reward_loop.scorers.code_driver import INSEPARABLE, MARK, MISSING, canonical, shortened
from rl_async.reward_loop.scorers.code_tests import (
    Asserts,
    Call,
    Pair,
    Test,
    TestFunction,
    certain_checks,
    parse_tests,
    rewrite,
    same_text,
    same_value,
    starter_imports,
)
from rl_async.sandbox import Result, Sandbox, SandboxLost, SandboxRefused, Workspace

DRIVER = Path(code_driver.__file__).read_text()
BESIDE, APART = f"{DRIVER}\nmain()\n", f"{DRIVER}\nmain_apart()\n"
# With more tests than this, only the sum of their times and the longest are recorded.
MOST_TIMED = 16


class _ModuleMissing(Exception):
    """Tests import a module that the sandbox does not have; the message is its name."""


class _Inseparable(Exception):
    """Tests give the program something that cannot leave their process."""


class CodeScorer:
    """Scores answers by their programs' share of passed tests, or by whether all passed."""

    def __init__(self, config: CodeConfig, sandbox: Sandbox) -> None:
        self._config, self._sandbox = config, sandbox
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def score(self, conversation: Conversation) -> Score:
        """Return the score, with the numbers of tests and passed ones, their times, and the failed ones as the reason.

        An answer without a program gets 0. Tests that did not run, after a first failure or for lack of time, count as
        failed. Raises DataError and ScorerFailed.
        """
        tests = await off_loop(len(conversation.ground_truth), parse_tests, conversation)
        count = sum(test.checks for test in tests)
        program = last_program(conversation.solution_str)
        if program is None:
            extra = {"extracted": 0.0, "tests": float(count), "passed": 0.0}
            return Score(0.0, extra, "the answer has no program")
        async with self._slots:
            try:
                results, times = await self._run(program, tests, starter_imports(conversation.extra_info))
            except _ModuleMissing as error:
                raise DataError(
                    f"{conversation.place}: its tests import {error}, which the sandbox does not have "
                    "(sandbox.packages)"
                ) from error
            except SandboxLost as error:
                raise ScorerFailed(str(error)) from error
        passed = sum(results)
        extra = {"extracted": 1.0, "tests": float(count), "passed": float(passed)}
        extra |= {"seconds": sum(times), "longest_s": max(times, default=0.0)}
        if count <= MOST_TIMED:
            extra |= {f"test_{number}_s": seconds for number, seconds in enumerate(times)}
        share = passed / count
        value = float(share == 1) if self._config.all_or_nothing else share
        return Score(value, extra, _reason(results, count))

    async def _run(
        self, program: str, tests: list[Test], imports: list[dict[str, str]]
    ) -> tuple[list[bool], list[float]]:
        """Return whether each test that ran passed, and its time: an equal share of its process's."""
        results, times = list[bool](), list[float]()
        end = time.monotonic() + self._config.timeout_s
        for test in tests:
            if end <= time.monotonic():
                break
            seconds = min(self._config.test_timeout_s * test.checks, end - time.monotonic())
            began = time.monotonic()
            try:
                passed = await self._in_workspace(program, test, imports, seconds, apart=True)
            except _Inseparable:
                seconds = max(0.0, min(seconds, end - time.monotonic()))
                passed = await self._in_workspace(program, test, imports, seconds, apart=False)
            times += [(time.monotonic() - began) / test.checks] * test.checks
            results += passed
            if not all(passed) and self._config.all_or_nothing:
                break
        return results, times

    async def _in_workspace(
        self, program: str, test: Test, imports: list[dict[str, str]], seconds: float, *, apart: bool
    ) -> list[bool]:
        workspace = await self._sandbox.open()
        try:
            return await self._passed(workspace, program, test, imports, seconds, apart=apart)
        finally:
            await workspace.close()

    async def _passed(
        self,
        workspace: Workspace,
        program: str,
        test: Test,
        imports: list[dict[str, str]],
        seconds: float,
        *,
        apart: bool,
    ) -> list[bool]:
        """Run a test's process, ``apart`` from the program if the test allows it; return whether each of its checks
        passed. Raises _ModuleMissing if the tests import a module that the sandbox lacks, and _Inseparable."""
        try:
            if isinstance(test, Pair) and test.after is None:
                result = await workspace.run("python", program, stdin=test.stdin.encode(), seconds=seconds)
                return [_ended_well(result) and same_text(result.stdout.decode(errors="replace"), test.stdout)]
            told = await asyncio.to_thread(_told, test, apart=apart)
            given = {"program": program, "imports": imports, "seconds": self._config.test_timeout_s, **told.given}
            stdin = json.dumps(given).encode() + b"\n"
            if isinstance(test, Pair):
                stdin += test.stdin.encode()
            result = await workspace.run("python", APART if told.apart else BESIDE, stdin=stdin, seconds=seconds)
        # No process can be started with this program.
        except SandboxRefused:
            return [False] * test.checks
        lines = result.stdout.decode(errors="replace").split("\n")
        reports = [line.partition(MARK)[2] for line in lines if MARK in line]
        if isinstance(test, Call):
            return [_ended_well(result) and bool(reports) and _returned(reports[-1], test.expected)]
        found = [report.removeprefix(told.secret) for report in reports if report.startswith(told.secret)]
        if missing := [line for line in found if line.startswith(MISSING)]:
            raise _ModuleMissing(missing[0].removeprefix(MISSING))
        if INSEPARABLE in found:
            raise _Inseparable
        passed = _passed_parts(found, told.expected, told.certain)
        if isinstance(test, Asserts):
            return [part in passed for part in test.checked]
        if isinstance(test, TestFunction):
            return [_ended_well(result) and 0 in passed]
        assert test.after is not None
        printed = "\n".join(line for line in lines if MARK not in line)
        return [_ended_well(result) and passed >= set(test.after.checked) and same_text(printed, test.stdout)]

    async def close(self) -> None:
        """Do nothing: a workspace lasts as long as a test."""


class _Told(NamedTuple):
    """A test as the driver reads it, the secret that its reports begin with, and the expected values, kept here.

    ``certain``: the numbers of expected values that each part of a test must have found to pass. ``apart``: whether the
    program runs in a process of its own.
    """

    given: dict[str, Any]
    secret: str = ""
    expected: dict[int, str] = {}  # noqa: RUF012  never changed
    certain: dict[int, set[int]] = {}  # noqa: RUF012  never changed
    apart: bool = False


def _told(test: Test, *, apart: bool) -> _Told:
    """Return a test for the driver, with a new secret, which a program would have to find before it could forge one."""
    script = isinstance(test, Pair)
    code = test.after if isinstance(test, Pair) else test
    if isinstance(code, Call):
        return _Told({"name": code.name, "arguments": code.arguments, "modules": [], "script": False})
    assert code is not None and not isinstance(code, Pair)
    rewritten, secret = rewrite(tuple(code.statements)), secrets.token_hex()
    checked = set(code.checked) if isinstance(code, Asserts) else set[int]()
    own, certain = None, certain_checks(rewritten.statements)
    if isinstance(code, TestFunction):
        own = {"group": code.group, "name": code.name, "unittest": code.unittest}
        certain = certain_checks(rewritten.statements, code.name, code.group)
    apart = apart and not script and rewritten.called is not None
    given = {
        "statements": [[text, number in checked] for number, text in enumerate(rewritten.statements)],
        "mentioned": rewritten.mentioned,
        "required": code.required,
        "modules": code.modules,
        "secret": secret,
        "test": own,
        "script": script,
        "names": rewritten.called,
    }
    expected = {number: shortened(canonical(value)) for number, value in rewritten.expected.items()}
    return _Told(given, secret, expected, certain, apart)


def _passed_parts(reports: list[str], expected: dict[int, str], certain: dict[int, set[int]]) -> set[int]:
    """Return the numbers of the statements that ended, and passed at least one check and all they made, of these all
    that are ``certain``, since "ok" may be forged where the program has found the secret.

    A test function has the number 0.
    """
    told: dict[str, set[int]] = {"ok": set(), "failed": set(), "done": set()}
    right: dict[int, set[int]] = {}
    for report in reports:
        part, kind, *more = ast.literal_eval(report)
        if kind == "seen":
            number, values = more
            kind = "ok" if expected[number] in values else "failed"
            if kind == "ok":
                right.setdefault(part, set()).add(number)
        told[kind].add(part)
    passed = (told["ok"] & told["done"]) - told["failed"]
    return {part for part in passed if right.get(part, set()) >= certain.get(part, set())}


def _returned(said: str, expected: Any) -> bool:
    try:
        return same_value(json.loads(said), expected)
    except (ValueError, RecursionError):
        return False


def _reason(results: list[bool], tests: int) -> str:
    """Name the tests that failed, counted from 0 as their times are, and those that were not reached."""
    failed = [str(number) for number, good in enumerate(results) if not good]
    parts = [f"failed: test {', '.join(failed)}"] if failed else []
    if len(results) < tests:
        parts.append(f"not reached: test {len(results)}" + (f" to {tests - 1}" if len(results) < tests - 1 else ""))
    return "; ".join(parts)


def _ended_well(result: Result) -> bool:
    return result.exit == 0 and not result.limit


# Info strings name it as `python title="x"`, `{.python}` or `python:main.py`.
_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
# Indentation and the marks of quotes and list items may stand before a fence.
_OPENING = re.compile(
    r"(?P<before>(?:[ \t]|>|(?:[-+*]|\d{1,9}[.)])[ \t])*)"
    r"(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<info>.*)",
    re.DOTALL,
)
# Models also write `Answer: ```python`, which CommonMark reads as text.
_BEHIND_TEXT = re.compile(
    r"(?P<before>)[^`]*[^`\s][ \t]*(?P<fence>`{3,})(?P<info>(?:python3?|py3?)[ \t]*)", re.IGNORECASE
)


def last_program(answer: str) -> str | None:
    """Return the last fenced block in Python, else the last one without a language, else None."""
    blocks = list(_blocks(answer))
    for languages in (("python", "python3", "py", "py3"), ("",)):
        if found := [text for language, text in blocks if language in languages]:
            return found[-1]
    return None


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block that is closed, by CommonMark's rules.

    A block ends with a fence of the same character that is at least as long and not indented by four columns more.
    Lines lose the indentation and the quote marks of the opening fence. An opening fence may have any indentation,
    as in a list item, and one that names Python may stand behind text on its line.
    """
    opening: re.Match[str] | None = None
    lines = list[str]()
    for line in re.split(r"\r\n|\n|\r", answer):
        if opening is None:
            opening, lines = _OPENING.fullmatch(line) or _BEHIND_TEXT.fullmatch(line), []
            continue
        inner = _without(line, opening["before"])
        fence = inner.strip(" \t")
        indent = len(inner) - len(inner.lstrip(" "))
        if len(fence) >= len(opening["fence"]) and set(fence) == {opening["fence"][0]} and indent < 4:
            language = _LANGUAGE.match(opening["info"])
            yield language[1].lower() if language else "", "\n".join(lines)
            opening = None
        else:
            lines.append(inner)


def _without(line: str, before: str) -> str:
    """Strip from a line of a block the quote marks and the indentation of its opening fence."""
    for mark in before:
        if mark == ">":
            stripped = line.lstrip(" ")
            line = stripped[1:] if stripped.startswith(">") else line
        elif line[:1] in (" ", "\t"):
            line = line[1:]
    return line
