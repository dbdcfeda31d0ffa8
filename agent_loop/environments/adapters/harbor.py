"""`harbor:FOLDER`: Harbor's tasks, played and judged in a workspace of the sandbox; `extra_info.task` names the task.

The workspace has the files that the task's Dockerfile copies, and the tools `bash` and `python`. The tests come into it
when the episode is over, so nothing that the model ran has seen them; like Harbor's they run where the model worked.
"""

import asyncio
import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rl_async.agent_loop.environments.adapters.harbor_task import HarborTask, Placed, read_task, task_folders
from rl_async.agent_loop.tools.code import BASH, PYTHON, CodeTools
from rl_async.agent_loop.tools.tool import CallableTool
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.messages import Task
from rl_async.sandbox.api import Language, Result, Sandbox, SandboxLost, SandboxRefused, Workspace

log = logging.getLogger("rl_async.agent_loop")

TOP = ("app", "tests", "logs")  # the names at the root that tasks use
REWARDS = ("logs/verifier/reward.json", "logs/verifier/reward.txt")  # the first one counts
_COMMANDS: dict[Language, str] = {"bash": "bash", "python": "python3"}
_LAST = 500  # bytes of what tests printed, for the log
# What the model put where the tests and their reward belong goes first. Nothing of the model's runs any more.
_CLEAR = "rm -rf tests logs/verifier && mkdir -p tests logs/verifier logs/agent logs/artifacts"


class HarborTasks:
    """Makes the environments of the tasks in a folder. Raises ConfigError if it holds none."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        try:
            task_folders(self._folder)
        except DataError as error:
            raise ConfigError(f"agent.environment=harbor:{folder}: {error}") from error

    def episode(self, task: Task, sandbox: Sandbox, config: RunConfig) -> "Harbor":
        """Return the environment of a row. Raises DataError if it names no folder."""
        name = task.extra.get("task")
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise DataError(f"task {task.task_id}: harbor needs extra_info.task, the name of a folder, not {name!r}")
        return Harbor(self._folder / name, sandbox, config)


class Harbor:
    """An episode of a task."""

    own_deadlines = True  # those of the sandbox

    def __init__(self, folder: Path, sandbox: Sandbox, config: RunConfig) -> None:
        self._folder, self._sandbox, self._config = folder, sandbox, config
        self._opened: _Opened | None = None

    async def reset(self) -> None:
        """Open the workspace; the task's prompt says all there is to say. Raises DataError for a wrong task."""
        task = await asyncio.to_thread(read_task, self._folder)
        self._opened = _Opened(task, await self._sandbox.open(top=TOP))
        try:
            await self._opened.place(task.files, f"mkdir -p logs/agent {shlex.quote(task.workdir.lstrip('/'))}")
        except (SandboxLost, SandboxRefused) as error:
            raise EnvironmentFailed(f"harbor: {self._folder}: its files cannot be placed: {error}") from error

    def tools(self) -> Sequence[CallableTool]:
        """Return `bash` and `python`."""
        assert self._opened is not None
        return CodeTools(self._opened, self._config).bind([BASH, PYTHON])

    async def reward(self) -> Mapping[str, float]:
        """Let the tests judge what was done. Without a usable reward it is worth 0, and ``verified`` is 0."""
        assert self._opened is not None
        try:
            rewards = await self._opened.judged()
        except _Unjudged as error:
            log.warning("harbor: %s: worth 0: %s", self._folder, error)
            return {"score": 0.0, "verified": 0.0}
        if "reward" not in rewards and len(rewards) != 1:
            raise EnvironmentFailed(f"harbor: {self._folder}: none of the rewards {list(rewards)} is `reward`")
        score = rewards["reward"] if "reward" in rewards else next(iter(rewards.values()))
        return {**rewards, "score": score, "verified": 1.0}

    async def close(self) -> None:
        """Forget the workspace."""
        if self._opened is not None:
            await self._opened.close()


class _Unjudged(Exception):
    """The tests left no reward: the message says why."""


class _Opened:
    """The workspace of a task, in which programs start in the task's folder, with its variables.

    It is what CodeTools open, too.
    """

    def __init__(self, task: HarborTask, workspace: Workspace) -> None:
        self._task, self._workspace = task, workspace

    async def open(self) -> "_Opened":
        """Return it, which is open."""
        return self

    async def close(self) -> None:
        """Close the workspace."""
        await self._workspace.close()

    async def run(self, language: Language, code: str, *, seconds: float | None = None) -> Result:
        """Run a program of the model."""
        return await self._start([_COMMANDS[language], "-c", code], self._task.env, seconds)

    async def place(self, files: Sequence[Placed], program: str) -> None:
        """Run a program in bash, then write files. Raises SandboxRefused if either fails."""
        executable = [file.path for file in files if file.executable]
        await self._prepare(program)
        for file in files:
            await self._workspace.put(file.path, file.data)
        if executable:
            await self._prepare(shlex.join(["chmod", "+x", *executable]))

    async def judged(self) -> dict[str, float]:
        """Run the tests and return their rewards. Raises _Unjudged, and EnvironmentFailed if the workspace is lost."""
        task = self._task
        try:
            await self.place(task.tests, _CLEAR)
            argv = ["bash", "/tests/test.sh"]
            ended = await self._start(argv, task.env | task.verifier_env, task.verifier_s)
            return await self._rewards(_how(ended))
        except SandboxRefused as error:
            raise _Unjudged(str(error)) from error
        except SandboxLost as error:
            raise EnvironmentFailed(f"harbor: {task.name}: {error}") from error

    async def _rewards(self, how: str) -> dict[str, float]:
        for path in REWARDS:
            try:
                text = await self._workspace.get(path)
            except SandboxRefused:
                continue
            try:
                return _numbers(text, as_json=path.endswith(".json"))
            except ValueError as error:
                raise _Unjudged(f"/{path} is no reward: {error}; {how}") from error
        raise _Unjudged(f"the tests wrote no /{' or /'.join(REWARDS)}; {how}")

    async def _prepare(self, program: str) -> None:
        ended = await self._workspace.run("bash", program)
        if ended.exit != 0:
            raise SandboxRefused(f"{program.partition(' ')[0]}: {_how(ended)}")

    async def _start(self, argv: Sequence[str], env: Mapping[str, str], seconds: float | None) -> Result:
        variables = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
        program = f"cd {shlex.quote(self._task.workdir)} && {variables}exec {shlex.join(argv)}"
        return await self._workspace.run("bash", program, seconds=seconds)


def _how(ended: Result) -> str:
    """Say how a program ended, with the last that it printed."""
    last = (ended.stdout + ended.stderr)[-_LAST:].decode(errors="replace").strip()
    return f"ended by the limit of {ended.limit}, {last!r}" if ended.limit else f"exit code {ended.exit}, {last!r}"


def _numbers(text: bytes, *, as_json: bool) -> dict[str, float]:
    """Read a reward, or several by name: text with a number, or JSON. Raises ValueError."""
    read = msgspec.json.decode(text, type=float | bool | dict[str, float | bool]) if as_json else float(text)
    rewards = {name: float(value) for name, value in (read if isinstance(read, dict) else {"reward": read}).items()}
    if not all(map(math.isfinite, rewards.values())):
        raise ValueError(f"not finite: {rewards}")
    return rewards
