"""The tools that run code: one workspace per episode, whose life is the episode's, and what the model reads."""

import asyncio

import msgspec
import pytest

from rl_async.agent_loop import runner
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments import speakers
from rl_async.agent_loop.environments.environment_registry import ENVIRONMENTS
from rl_async.agent_loop.step import Step
from rl_async.agent_loop.tools.tool_registry import BASH, CALCULATOR, PYTHON, CodeTools
from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.messages import Task, Trajectory
from rl_async.sandbox.api import Language, Result, SandboxLost
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config


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
    monkeypatch.setattr(speakers, "make_sandbox", lambda config: sandbox)
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
    monkeypatch.setattr(speakers, "make_sandbox", lambda config: sandbox)
    monkeypatch.setitem(ENVIRONMENTS, "own", Relay)
    config = run_config(environment="own", tools=("bash",), max_tokens=256)
    engine = ScriptedEngine(renderer, [call, "5", call, "over"])
    first, second = await runner.EpisodeRunner(config, renderer, engine).run(leased(), 0)
    assert [row.turns[1].tool_calls[0].result for row in (first, second)] == ["1", "2"]
    assert [(workspace.programs, workspace.closed) for workspace in sandbox.opened] == [([("bash", "b")], 1)] * 2
