"""The scorer ``code``: runs the program of an answer against the hidden tests of its task, in a sandbox.

Expected outputs never enter the sandbox: they are compared out here with what the program printed or returned. Tests
that are code do enter it, and run in the program's own process.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from rl_async.configs.schema.reward import CodeConfig
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.scorers.code_tests import (
    CALL,
    MARK,
    Code,
    Pair,
    Test,
    parse_tests,
    same_text,
    same_value,
)
from rl_async.sandbox.api import Result, Sandbox, SandboxLost, SandboxRefused, Workspace

MOST_TIMED = 16  # tests whose time is recorded each; of more, the sum and the longest


class CodeScorer:
    """Scores answers by their programs' share of passed tests, or by whether all passed."""

    def __init__(self, config: CodeConfig, sandbox: Sandbox) -> None:
        self._config, self._sandbox = config, sandbox
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def score(self, conversation: Conversation) -> Score:
        """Return the score, with the tests, those passed, their times, and which failed. Raises DataError, and
        ScorerFailed.

        An answer without a program gets 0. Tests that the first failure or a lack of time left out count as failed.
        """
        tests = parse_tests(conversation)
        program = last_program(conversation.solution_str)
        if program is None:
            extra = {"extracted": 0.0, "tests": float(len(tests)), "passed": 0.0}
            return Score(0.0, extra, "the answer has no program")
        async with self._slots:
            try:
                workspace = await self._sandbox.open()
                try:
                    results, times = await self._run(workspace, program, tests)
                finally:
                    await workspace.close()
            except SandboxLost as error:
                raise ScorerFailed(str(error)) from error
        passed = sum(results)
        extra = {"extracted": 1.0, "tests": float(len(tests)), "passed": float(passed)}
        extra |= {"seconds": sum(times), "longest_s": max(times, default=0.0)}
        if len(tests) <= MOST_TIMED:
            extra |= {f"test_{number}_s": seconds for number, seconds in enumerate(times)}
        share = passed / len(tests)
        value = float(share == 1) if self._config.all_or_nothing else share
        return Score(value, extra, _reason(results, len(tests)))

    async def _run(self, workspace: Workspace, program: str, tests: list[Test]) -> tuple[list[bool], list[float]]:
        """Return whether each test that ran passed, and its time."""
        results, times = list[bool](), list[float]()
        end = time.monotonic() + self._config.timeout_s
        for test in tests:
            seconds = min(self._config.test_timeout_s, end - time.monotonic())
            if seconds <= 0:
                break
            began = time.monotonic()
            good = await _passes(workspace, program, test, seconds)
            times.append(time.monotonic() - began)
            results.append(good)
            if not good and self._config.all_or_nothing:
                break
        return results, times

    async def close(self) -> None:
        """Do nothing: a workspace lasts as long as its answer is scored."""


def _reason(results: list[bool], tests: int) -> str:
    """Name the tests that failed, counted from 0 as their times are, and those that were not reached."""
    failed = [str(number) for number, good in enumerate(results) if not good]
    parts = [f"failed: test {', '.join(failed)}"] if failed else []
    if len(results) < tests:
        parts.append(f"not reached: test {len(results)}" + (f" to {tests - 1}" if len(results) < tests - 1 else ""))
    return "; ".join(parts)


async def _passes(workspace: Workspace, program: str, test: Test, seconds: float) -> bool:
    try:
        if isinstance(test, Pair):
            result = await workspace.run("python", program, stdin=test.stdin.encode(), seconds=seconds)
            return _ended_well(result) and same_text(result.stdout.decode(errors="replace"), test.stdout)
        secret = secrets.token_hex()
        given: dict[str, Any] = {"program": program, "secret": secret}
        given |= {"code": test.text} if isinstance(test, Code) else {"name": test.name, "arguments": test.arguments}
        result = await workspace.run("python", CALL, stdin=json.dumps(given).encode() + b"\n", seconds=seconds)
    except SandboxRefused:  # a program that no process can be started with
        return False
    _, mark, said = result.stdout.decode(errors="replace").rpartition(MARK)
    if isinstance(test, Code):
        return _ended_well(result) and said.strip() == secret
    if not _ended_well(result) or not mark:
        return False
    try:
        return same_value(json.loads(said), test.expected)
    except (ValueError, RecursionError):
        return False


def _ended_well(result: Result) -> bool:
    return result.exit == 0 and not result.limit


def last_program(answer: str) -> str | None:
    """Return the last fenced block in Python, or else the last one without a language; None if there is neither."""
    blocks = list(_blocks(answer))
    for languages in (("python", "python3", "py"), ("",)):
        if found := [text for language, text in blocks if language in languages]:
            return found[-1]
    return None


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block that is closed."""
    language, lines = None, list[str]()
    for line in answer.splitlines():
        if language is None and line.lstrip().startswith("```"):
            language, lines = line.strip("` \t").lower(), []
        elif language is not None and line.strip() == "```":
            yield language, "\n".join(lines)
            language = None
        else:
            lines.append(line)
