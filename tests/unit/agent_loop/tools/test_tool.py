"""Tools: schemas from types, and every failure as a result."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pytest

from rl_async import concurrency
from rl_async.agent_loop import runner
from rl_async.agent_loop.chat_formats.format import HERMES
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments import session
from rl_async.agent_loop.environments.environment_registry import ENVIRONMENTS
from rl_async.agent_loop.tools.tool import Step, Tool, ToolResult
from rl_async.agent_loop.tools.tool_registry import BASH, CALCULATOR, PYTHON, CodeTools, get_tool
from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError, EnvironmentFailed
from rl_async.messages import Task, Trajectory
from rl_async.sandbox import Language, Result, SandboxLost
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


async def add_later(a: int) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"sum": a + 1}


def broken(a: int) -> str:
    raise RuntimeError("no disk")


def unit(kind: Literal["c", "f"]) -> str:
    return kind


async def call(function: Callable[..., Any], *, timeout_s: float = 5.0, **arguments: Any) -> ToolResult:
    return await Tool(function).call(arguments, timeout_s=timeout_s)


async def test_results() -> None:
    assert await call(add, a=1) == ToolResult("2")
    assert await call(add_later, a=1) == ToolResult('{"sum":2}')
    assert await call(unit, kind="c") == ToolResult("c")


async def test_a_step_is_a_result_with_a_reward() -> None:
    def submit(a: int) -> Step:
        return Step(f"got {a}", reward=0.5, done=True, reason="close")

    assert await call(submit, a=1) == ToolResult("got 1", reward=0.5, reason="close", done=True)


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", b"1", [0.5], {"a": 1.0}, np.array([1.0, 2.0]), 10**400])
async def test_a_reward_that_is_no_finite_number_fails_the_episode(reward: Any) -> None:
    def submit(a: int) -> Step:
        return Step("got it", reward=reward)

    with pytest.raises(EnvironmentFailed, match="submit"):
        await call(submit, a=1)


@pytest.mark.parametrize("done", ["no", None, 1, [], np.array([True, False])])
async def test_an_end_that_is_no_truth_value_fails_the_episode(done: Any) -> None:
    def submit(a: int) -> Step:
        return Step("got it", done=done)

    with pytest.raises(EnvironmentFailed, match="submit"):
        await call(submit, a=1)


@pytest.mark.parametrize("reward", [True, np.float32(1.0), np.array([1.0]), np.int64(1), 1])
async def test_numbers_of_other_types_are_rewards(reward: Any) -> None:
    def submit(a: int) -> Step:
        return Step(None, reward=reward, done=cast(bool, np.bool_(True)))

    found = await call(submit, a=1)

    assert found == ToolResult("", reward=1.0, done=True) and type(found.reward) is float and found.done is True


async def test_failures_are_results() -> None:
    assert await call(broken, a=1) == ToolResult("error: no disk", "no disk")
    for arguments in ({}, {"a": "x"}, {"a": 1, "c": 2}):
        assert (await call(add, **arguments)).error == "bad arguments"
    assert (await call(unit, kind="k")).error == "bad arguments"


async def test_half_surrogate_pairs_of_tools_become_question_marks() -> None:
    def halves(a: int) -> str:
        if a:
            raise ValueError("\udcff")
        return "a\ud800b"

    assert await call(halves, a=0) == ToolResult("a?b")
    assert await call(halves, a=1) == ToolResult("error: ?", "?")


async def test_where_a_tool_raises_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool(broken)
    for number in range(3):
        await tool.call({"a": number}, timeout_s=5.0)
    (said,) = (record.getMessage() for record in caplog.records)
    assert (
        said.startswith("a call of tool broken raised RuntimeError in ")
        and "test_tool.py:" in said
        and "no disk" in said
    )


async def test_a_hanging_tool_meets_its_deadline() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    async def hang_later() -> None:
        await asyncio.sleep(30)

    assert await call(hang, timeout_s=0.05) == ToolResult("error: timeout", "timeout")
    assert await call(hang_later, timeout_s=0.05) == ToolResult("error: timeout", "timeout")
    release.set()


async def test_a_pause_of_this_process_counts_little_of_a_tools_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "LOOK_S", 0.1)

    async def answer() -> str:
        await asyncio.sleep(0.2)
        return "in time"

    called = asyncio.ensure_future(call(answer, timeout_s=0.4))
    await asyncio.sleep(0.01)
    time.sleep(0.6)  # noqa: ASYNC251  the process is to stand still
    assert await called == ToolResult("in time")


async def test_calls_that_never_return_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MOST_OVERDUE", 3)
    release, started = threading.Event(), list[int]()

    def hang() -> None:
        started.append(1)
        release.wait(30)

    tool = Tool(hang)
    bound = tool.bound(hang)  # an episode's own, which counts with the others
    errors = [(await (tool, bound)[n % 2].call({}, timeout_s=0.02)).error for n in range(5)]
    assert errors[:3] == ["timeout"] * 3 and all("agent.tool_timeout_s" in error for error in errors[3:])
    assert len(started) == 3
    release.set()
    while tool.overdue:  # noqa: ASYNC110  only the thread knows that it has ended
        await asyncio.sleep(0)
    assert (await tool.call({}, timeout_s=5.0)).error == ""


def test_schema() -> None:
    assert Tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }


def test_untyped_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a' needs a type"):
        Tool(eval("lambda a: a"), name="bad")


def test_users_tools(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("def shout(text: str) -> str:\n    return text.upper()\nnumber = 3\n")
    assert get_tool(f"{tmp_path}/t.py:shout").name == "shout"
    with pytest.raises(ConfigError, match="is not a function"):
        get_tool(f"{tmp_path}/t.py:number")
    with pytest.raises(ConfigError, match="built in: calculator"):
        get_tool("magic")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', [("f", {"a": 1})]),
        ('<tool_call>{"name":"f"}</tool_call>', [("f", {})]),
        ('x<tool_call>{"name":"f"}</tool_call>y<tool_call>{"name":"g"}</tool_call>', [("f", {}), ("g", {})]),
        ("<tool_call>{</tool_call>", [("", None)]),
        ('<tool_call>{"name":"f"}', [("", None)]),
        ('<tool_call>{"name":"f"}<tool_call>{"name":"g"}</tool_call>', [("", None), ("g", {})]),
        ('<tool_call>{"name":1}</tool_call>', [("", None)]),
        ('<tool_call>{"name":"f","arguments":"x"}</tool_call>', [("", None)]),
        ("<tool_call>[]</tool_call>", [("", None)]),
        ("</tool_call>", []),
    ],
)
def test_hermes(text: str, expected: list[tuple[str, Any]]) -> None:
    assert [(call.name, call.arguments) for call in HERMES.parse(text)] == expected


# The tools that run code: one workspace per episode, whose life is the episode's, and what the model reads.


class ScriptedWorkspace:
    """Answers each program with the next of the given results, or raises it."""

    def __init__(self, results: list[Result | Exception]) -> None:
        self.results, self.programs, self.seconds, self.closed = results, list[tuple[str, str]](), 0.0, 0

    async def run(self, language: Language, code: str, *, stdin: bytes = b"", seconds: float | None = None) -> Result:
        self.programs.append((language, code))
        self.seconds = seconds or 0.0
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        self.closed += 1


class ScriptedSandbox:
    def __init__(self, *results: Result | Exception) -> None:
        self.results, self.opened = list(results), list[ScriptedWorkspace]()

    async def open(self) -> ScriptedWorkspace:
        await asyncio.sleep(0.01)
        self.opened.append(ScriptedWorkspace(self.results))
        return self.opened[-1]


def ended(stdout: bytes = b"", stderr: bytes = b"", exit: int = 0, limit: str = "") -> Result:
    return Result(stdout, stderr, exit, limit, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ended(b"5\n"), "5\n"),
        (ended(b"a\n", b"Error: b\n", 1), "[exit code 1]\na\nError: b"),
        (ended(exit=2), "[exit code 2]"),
        (ended(exit=-11), "[ended by signal 11]"),
        (ended(b"\xff", exit=-9, limit="output"), "[stopped: it printed too much]\n�"),
        (ended(exit=-9, limit="seconds"), "[stopped: it ran longer than 5 s]"),
    ],
)
async def test_what_the_model_reads(result: Result, text: str) -> None:
    config = msgspec.structs.replace(run_config(tool_timeout_s=60.0), sandbox=SandboxConfig(timeout_s=5.0))
    async with CodeTools(ScriptedSandbox(result), config) as code:  # type: ignore[arg-type]
        (tool,) = code.bind([PYTHON])
        assert (await tool.call({"code": "1"}, timeout_s=60.0))[:2] == (text, "")


async def test_a_lost_sandbox_is_a_failed_call() -> None:
    async with CodeTools(ScriptedSandbox(SandboxLost("gone")), run_config()) as code:  # type: ignore[arg-type]
        (tool,) = code.bind([BASH])
        assert (await tool.call({"command": "ls"}, timeout_s=60.0)).error == "gone"


async def test_calls_of_one_turn_share_the_workspace() -> None:
    sandbox = ScriptedSandbox(ended(b"1"), ended(b"2"))
    async with CodeTools(sandbox, run_config()) as code:  # type: ignore[arg-type]
        python, bash = code.bind([PYTHON, BASH])
        calls = python.call({"code": "a"}, timeout_s=60.0), bash.call({"command": "b"}, timeout_s=60.0)
        assert [result.text for result in await asyncio.gather(*calls)] == ["1", "2"]
    (workspace,) = sandbox.opened
    assert (workspace.programs, workspace.closed) == ([("python", "a"), ("bash", "b")], 1)


async def test_a_call_whose_time_is_over_runs_nothing() -> None:
    sandbox = ScriptedSandbox()
    async with CodeTools(sandbox, run_config(tool_timeout_s=0.001)) as code:  # type: ignore[arg-type]
        (tool,) = code.bind([PYTHON])
        result = await tool.call({"code": "1"}, timeout_s=60.0)
    assert "not run" in result.text and sandbox.opened[0].programs == []


async def test_other_tools_stay_as_they_are_and_no_call_opens_no_workspace() -> None:
    sandbox = ScriptedSandbox()
    async with CodeTools(sandbox, run_config()) as code:  # type: ignore[arg-type]
        assert code.bind([CALCULATOR]) == [CALCULATOR]
    assert sandbox.opened == []


CALL = '<tool_call>\n{"name":"%s","arguments":{"%s":"%s"}}\n</tool_call>'


async def play(renderer: ChatRenderer, *tools: str) -> Trajectory:
    says = [CALL % ("python", "code", "a"), CALL % ("bash", "command", "b"), "5"]
    config = run_config(tools=("python", "bash"), max_tokens=256, tool_timeout_s=5.0)
    engine = ScriptedEngine(renderer, says)
    task = leased(tools=list(tools)) if tools else leased()
    (row,) = await runner.EpisodeRunner(config, renderer, engine).run(task, 0)
    return row


@pytest.mark.parametrize("tools", [(), ("bash", "python")])
async def test_an_episode_has_one_workspace(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, tools: tuple[str, ...]
) -> None:
    sandbox = ScriptedSandbox(ended(b"1"), ended(b"2"))
    monkeypatch.setattr(session, "make_sandbox", lambda config: sandbox)
    row = await play(renderer, *tools)
    (workspace,) = sandbox.opened
    assert (workspace.programs, workspace.closed) == ([("python", "a"), ("bash", "b")], 1)
    assert 0 < workspace.seconds <= 4.0  # the program is ended before the call is given up
    assert [call.result for turn in row.turns for call in turn.tool_calls] == ["1", "2"]


def test_without_a_sandbox_a_run_with_such_tools_does_not_start(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"sandbox\.kind.*apt-get install"):
        runner.EpisodeRunner(run_config(tools=("python",)), renderer, ScriptedEngine(renderer, []))
    runner.EpisodeRunner(run_config(tools=("calculator",)), renderer, ScriptedEngine(renderer, []))
    assert SandboxConfig().kind == "bubblewrap"


class Relay:
    """A game: what one role says is told the other."""

    roles = ("first", "second")

    def __init__(self, task: Task, host: object) -> None: ...

    def reset(self) -> Step:
        return Step("go", to="first")

    def step(self, answer: str) -> Step:
        return Step(answer, to="second", done=answer == "over")


async def test_each_role_of_a_game_has_a_workspace_of_its_own(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, call = ScriptedSandbox(ended(b"1"), ended(b"2")), CALL % ("bash", "command", "b")
    monkeypatch.setattr(session, "make_sandbox", lambda config: sandbox)
    monkeypatch.setitem(ENVIRONMENTS, "own", Relay)
    config = run_config(environment="own", tools=("bash",), max_tokens=256)
    engine = ScriptedEngine(renderer, [call, "5", call, "over"])
    first, second = await runner.EpisodeRunner(config, renderer, engine).run(leased(), 0)
    assert [row.turns[1].tool_calls[0].result for row in (first, second)] == ["1", "2"]
    assert [(workspace.programs, workspace.closed) for workspace in sandbox.opened] == [([("bash", "b")], 1)] * 2
