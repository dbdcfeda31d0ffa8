"""The tools `python` and `bash`: programs of the model in a workspace of its conversation, in a sandbox."""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rl_async.agent_loop.tools.tool import CallableTool, Tool
from rl_async.configs.schema.run import RunConfig
from rl_async.sandbox.api import Language, Result

SHARE = 0.8  # of agent.tool_timeout_s, so that a program is ended, with its output kept, before the call is given up


class Programs(Protocol):
    """What the tools need of a workspace."""

    async def run(self, language: Language, code: str, *, seconds: float | None = None) -> Result:
        """Run a program. Raises SandboxLost and SandboxRefused."""
        ...

    async def close(self) -> None:
        """End whatever runs."""
        ...


class Opener(Protocol):
    """What opens it, such as a sandbox."""

    async def open(self) -> Programs: ...


class CodeTools:
    """The workspace of one conversation, an async context manager: opened by the first call and closed at the end."""

    def __init__(self, sandbox: Opener, config: RunConfig) -> None:
        self._sandbox = sandbox
        self._limit, self._share = config.sandbox.timeout_s, SHARE * config.agent.tool_timeout_s
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
    """Write for the model what a program printed, and how it ended unless well."""
    printed = (result.stdout + result.stderr).decode(errors="replace")
    reasons = {
        "seconds": f"stopped: it ran longer than {seconds:.3g} s",
        "cpu": "stopped: it used too much processor time",
        "memory": "stopped: it used too much memory",
        "output": "stopped: it printed too much",
        "files": "stopped: it made too many files",
    }
    if result.limit:
        return f"{printed.rstrip()}\n[{reasons[result.limit]}]".lstrip()
    if result.exit < 0:
        return f"{printed.rstrip()}\n[ended by signal {-result.exit}]".lstrip()
    return f"{printed.rstrip()}\n[exit code {result.exit}]".lstrip() if result.exit else printed


PYTHON, BASH = Tool(CodeTools.python), Tool(CodeTools.bash)
TOOLS_OF_CODE = (PYTHON, BASH)
