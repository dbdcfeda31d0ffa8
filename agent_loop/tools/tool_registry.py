"""The tools by name: built-in ones, `python` and `bash` in the sandbox, users' own, and those of MCP servers.

`python` and `bash` run programs of the model in a workspace of its conversation. ``connect_servers`` makes the toolbox
of a config's MCP servers, with the SDK's connections. It stands here, not beside the toolbox, because the connection
imports the toolbox.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rl_async.agent_loop.tools.mcp_toolbox import FIRST_PAUSE_S, McpToolbox, mcp_servers
from rl_async.agent_loop.tools.tool import CallableTool, Tool, evaluate
from rl_async.configs.derived import code_problem, listed_code
from rl_async.configs.schema.reward import SandboxConfig
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Task
from rl_async.sandbox import Language, Result
from rl_async.userload import is_user_reference, load_user_object

# A program may use this share of agent.tool_timeout_s, so that it ends, and its output is kept, before its call does.
SHARE = 0.8


class Programs(Protocol):
    """The part of a workspace that the tools use: the sandbox's own, or one that an environment has prepared."""

    async def run(self, language: Language, code: str, *, seconds: float | None = None) -> Result:
        """Run a program. Raises SandboxLost and SandboxRefused."""
        ...

    async def close(self) -> None:
        """End all programs."""
        ...


class Opener(Protocol):
    """Opens a workspace: the sandbox, or the environment."""

    async def open(self) -> Programs: ...


class CodeTools:
    """The workspace of one conversation, an async context manager: the first call opens it, the end closes it."""

    def __init__(self, sandbox: Opener, config: RunConfig) -> None:
        self._sandbox = sandbox
        self._limit, self._share = (config.sandbox or SandboxConfig()).timeout_s, SHARE * config.agent.tool_timeout_s
        self._workspace: Programs | None = None
        self._closed = False
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A call may be opening the workspace.
        async with self._lock:
            self._closed = True
            if self._workspace is not None:
                await self._workspace.close()

    def bind(self, tools: Sequence[CallableTool]) -> list[CallableTool]:
        """Return ``tools`` with those of code working in this workspace."""
        own = {tool: getattr(self, tool.name) for tool in TOOLS_OF_CODE}
        return [tool.bound(own[tool]) if isinstance(tool, Tool) and tool in own else tool for tool in tools]

    async def python(self, code: str) -> str:
        """Run a Python program. Print what you want to see. Files in the current folder stay for later calls."""
        return await self._run("python", code)

    async def bash(self, command: str) -> str:
        """Run a bash command. Files in the current folder stay for later calls."""
        return await self._run("bash", command)

    async def _run(self, language: Language, code: str) -> str:
        """Run a program after those of the same turn, which share the workspace, in what is left of its call's time."""
        called = time.monotonic()
        async with self._lock:
            if self._closed:
                return "[not run: the conversation is over]"
            if self._workspace is None:
                self._workspace = await self._sandbox.open()
            seconds = min(self._limit, self._share - (time.monotonic() - called))
            if seconds <= 0:
                return "[not run: the calls before it took its time]"
            return _text(await self._workspace.run(language, code, seconds=seconds), seconds)


def _text(result: Result, seconds: float) -> str:
    """Show the model how a program failed, if it did, and then its output, whose end may be cut off."""
    printed = (result.stdout + result.stderr).decode(errors="replace")
    reasons = {
        "seconds": f"stopped: it ran longer than {seconds:.3g} s",
        "cpu": "stopped: it used too much processor time",
        "memory": "stopped: it used too much memory",
        "output": "stopped: it printed too much",
        "files": "stopped: it made too many files",
    }
    if result.limit:
        ended = reasons[result.limit]
    elif result.exit:
        ended = f"exit code {result.exit}" if result.exit > 0 else f"ended by signal {-result.exit}"
    else:
        return printed
    return f"[{ended}]\n{printed}".rstrip()


PYTHON, BASH = Tool(CodeTools.python), Tool(CodeTools.bash)
TOOLS_OF_CODE = (PYTHON, BASH)


def calculator(expression: str) -> str:
    """Evaluate whole-number arithmetic with + - * and parentheses."""
    return str(evaluate(expression))


CALCULATOR = Tool(calculator, quick=True)
TOOLS = {"calculator": CALCULATOR, "python": PYTHON, "bash": BASH}


NO_SERVERS: Mapping[str, CallableTool] = {}


def task_tools(
    config: RunConfig, task: Task, of_servers: Mapping[str, CallableTool] = NO_SERVERS
) -> list[CallableTool]:
    """Return the tools of a task: those that it names, or all of the config's and ``of_servers`` (`agent.mcp`).

    Raises ConfigError for one that does not exist, and DataError for a task that names code not listed in the config.
    """
    require_listed(config, task)
    if task.tools is None:
        return [*map(get_tool, config.agent.tools), *of_servers.values()]
    return [of_servers.get(name) or get_tool(name) for name in task.tools]


def distinct(tools: Sequence[CallableTool], of_servers: Mapping[str, CallableTool]) -> Sequence[CallableTool]:
    """Return an environment's tools. Raises ConfigError if one has the name of a server's."""
    if twice := next((tool.name for tool in tools if tool.name in of_servers), None):
        raise ConfigError(
            f"agent.environment: its tool {twice!r} is also one of agent.mcp; leave it out there by allow"
        )
    return tools


def require_listed(config: RunConfig, task: Task) -> None:
    """Raise DataError if the task names code that the config does not list, before any of it is loaded."""
    if problem := code_problem(task, listed_code(config)):
        raise DataError(f"task {task.task_id}: {problem}")


@functools.cache
def get_tool(name: str) -> Tool:
    """Return a built-in tool or the user's function ``path.py:name``. Raises ConfigError for an unknown name."""
    if is_user_reference(name):
        function = load_user_object(name, "agent.tools")
        if isinstance(function, Tool):
            return function
        if not callable(function):
            raise ConfigError(f"agent.tools: {name} is not a function")
        return Tool(function)
    if name not in TOOLS:
        raise ConfigError(f"agent.tools: no tool {name!r}; built in: {', '.join(TOOLS)}; or path.py:function")
    return TOOLS[name]


@asynccontextmanager
async def connect_servers(
    agent: AgentConfig, log_folder: Path, owner: str, first_pause_s: float = FIRST_PAUSE_S
) -> AsyncIterator[McpToolbox | None]:
    """Hold the tools of all servers, or None without servers. Their logs are named after ``owner``. For
    ``first_pause_s`` see ``McpSessions``.

    Raises, before the block begins, McpServerLost for a server that cannot be started or asked, and ConfigError for
    tools that cannot be used.
    """
    if not (servers := mcp_servers(agent.mcp, log_folder, owner)):
        yield None
        return
    # This module imports the SDK, which is optional.
    from rl_async.agent_loop.tools.mcp_connection import SdkConnection

    taken = [get_tool(name).name for name in agent.tools]
    async with McpToolbox(servers, SdkConnection, taken, first_pause_s) as toolbox:
        yield toolbox
