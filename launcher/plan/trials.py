"""Tries what a config names before the run has a folder: code, tools, environments and MCP servers.

This finds a typo, a function that raises, an action space that cannot be played in text, or a server that does not
answer. Each trial runs in a process of its own, ``python -m rl_async.launcher.plan.trials NAME``, which keeps imports
and side effects out of the launcher. It reads JSON from standard input, and prints a mistake as the last line of
standard error.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_async.configs.checks import plays_itself
from rl_async.configs.derived import MODELLED_USERS, parts, uses_sandbox
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_USER, ConfigError, RlAsyncError
from rl_async.files import UNDECODABLE
from rl_async.installation import install_beside
from rl_async.messages import Task
from rl_async.process.role import own_module
from rl_async.sandbox.kinds import make_sandbox
from rl_async.transfer_queue.chat_messages import TOOLS_FILE
from rl_async.userload import is_user_reference, load_user_object

# Importing torch from a slow disk takes a minute.
LOAD_S = 180.0
# For imports beside the deadlines of environments and servers, and for retries of a server that ends at once.
SLACK_S = 60.0
# Each has the environment's deadline: preparing, making, resetting and closing it.
CALLS = 4


def run_apart(module: str, *arguments: str, what: str, limit_s: float, given: bytes | None = None) -> str:
    """Run ``rl_async.MODULE`` with ``given`` on standard input; return its output.

    Raises ConfigError with the last line of its standard error if it ends with EXIT_USER. For other failures the error
    begins with ``what``: a config key and the attempt, such as "agent.mcp: trying the servers".
    """
    try:
        done = subprocess.run(own_module(module, *arguments), input=given, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{what} took longer than {limit_s:g} s") from error
    said = done.stderr.decode(errors="replace")
    # Libraries may have printed warnings above the last line.
    if done.returncode == EXIT_USER and said.strip():
        raise ConfigError(said.splitlines()[-1])
    if done.returncode != 0:
        raise ConfigError(f"{what} ended with {done.returncode}: {said[-2000:]}")
    return done.stdout.decode(errors="replace")


def _try_apart(trial: str, given: object, what: str, limit_s: float) -> str:
    return run_apart("launcher.plan.trials", trial, what=what, limit_s=limit_s, given=msgspec.json.encode(given))


def check_user_code(config: RunConfig, *, apart: bool = True) -> None:
    """Raise ConfigError naming the key if code that the run would load does not exist, load or fit.

    Also raises it if the run needs a sandbox and none can be made here. Unless ``apart``, the user's own code is left
    to `load_own`, in a process that needs it anyway: a file may import torch, which takes seconds.
    """
    if uses_sandbox(config):
        make_sandbox(config.sandbox)
    named = list(named_code(config))
    _load([(key, name) for key, name in named if not is_user_reference(name)])
    if apart and (own := [(key, name) for key, name in named if is_user_reference(name)]):
        keys, names = (", ".join(dict.fromkeys(column)) for column in zip(*own))
        _try_apart("code", own, f"{keys}: loading {names}", LOAD_S)


def load_own(config: RunConfig) -> None:
    """Load the user's own code into this process. Raises ConfigError like `check_user_code`."""
    _load([(key, name) for key, name in named_code(config) if is_user_reference(name)])


def named_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the config keys that may name code and take effect in this run, each with its value."""
    agent, algorithm = config.agent, config.algorithm
    if agent.gateway is None:
        yield "agent.loop", agent.loop
        if agent.environment:
            yield "agent.environment", agent.environment
    yield from (("agent.tools", name) for name in agent.tools)
    yield from (("reward.functions", term.name) for term in config.reward.functions)
    if config.trainer.loop:
        yield "trainer.loop", config.trainer.loop
    for key in ("advantage", "loss", "correction"):
        if is_user_reference(name := getattr(algorithm, key)):
            yield f"algorithm.{key}", name


def _load(named: Sequence[tuple[str, str]]) -> str:
    """Look up each name. Raises ConfigError, which for user code that raises names the line."""
    from rl_async.agent_loop.environments.environment_registry import get_environment
    from rl_async.agent_loop.episode import get_loop
    from rl_async.agent_loop.tools.tool_registry import get_tool
    from rl_async.reward_loop.scorers.scorer_registry import SERVED, get_scorer

    loaders: dict[str, Callable[[str], Any]] = {
        "agent.loop": get_loop,
        "agent.environment": get_environment,
        "agent.tools": get_tool,
        "reward.functions": lambda name: None if name in SERVED else get_scorer(name),
    }
    for key, name in named:
        try:
            # The trainer's functions must only exist: the trainer itself tries them, with torch, on a tiny batch.
            loaders[key](name) if key in loaders else load_user_object(name, key)
        except ConfigError:
            raise
        # Importing a user's file may raise anything.
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(
                f"{key}: loading {name} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            ) from error
    return ""


def write_tool_schemas(config: RunConfig, folder: Path) -> None:
    """Write the schemas of the config's tools, and of the built-in ones, which tasks may name, into a run's folder.

    The queue can then count the tokens of prompts without loading users' code. With a gateway the file lists none,
    since programs offer their own tools. Raises ConfigError if a tool cannot be loaded.
    """
    from rl_async.agent_loop.tools.tool_registry import TOOLS

    names = [] if config.agent.gateway is not None else [*dict.fromkeys([*TOOLS, *config.agent.tools])]
    if any(map(is_user_reference, names)):
        printed = _try_apart("tools", names, "agent.tools: loading them", LOAD_S)
        # The user's code may have printed something before.
        try:
            schemas = msgspec.json.decode(printed.rstrip().rpartition("\n")[2], type=dict[str, dict[str, Any]])
        except UNDECODABLE as error:
            raise ConfigError(f"agent.tools: their code prints something as it ends: {printed[-80:]!r}") from error
    else:
        schemas = schemas_of(names)
    (folder / TOOLS_FILE).write_text(json.dumps(schemas))


def schemas_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schemas of tools by name. Imports their code; raises ConfigError if it cannot be loaded."""
    from rl_async.agent_loop.tools.tool_registry import get_tool

    return {name: get_tool(name).schema for name in names}


def try_mcp_servers(agent: AgentConfig) -> list[str]:
    """Begin a session with each server of `agent.mcp`; return, for each, a line that names its tools.

    Raises ConfigError, naming the key, for a server that the run could not use.
    """
    if not agent.mcp or agent.gateway is not None:
        return []
    from rl_async.agent_loop.tools.mcp_toolbox import mcp_servers

    # Raises for mistakes that show without starting a server.
    mcp_servers(agent.mcp, Path(), "")
    limit_s = SLACK_S + 3 * max(server.start_timeout_s for server in agent.mcp)
    return _try_apart("mcp", agent, "agent.mcp: beginning and ending sessions with the servers", limit_s).splitlines()


async def _meet_servers(agent: AgentConfig) -> str:
    from rl_async.agent_loop.tools.tool_registry import connect_servers

    with tempfile.TemporaryDirectory(prefix="rl-async-mcp-") as logs:
        async with connect_servers(agent, Path(logs), "trial") as toolbox:
            assert toolbox is not None
            offered = toolbox.offered
    keys = dict.fromkeys(key for key, _ in offered)
    return "\n".join(f"{key}: {', '.join(name for at, name in offered if at == key)}" for key in keys)


class _Trial(msgspec.Struct):
    """An environment to try, and a task for it."""

    config: RunConfig
    task: Task


def try_environment(config: RunConfig) -> None:
    """Begin and end an episode of the run's environment with the first task.

    If the data must still be made, only environments that need no more than a seed are tried. Raises ConfigError,
    naming the key, for an environment that the run could not use, and DataError for data without a task.
    """
    from rl_async.agent_loop.environments.environment_registry import by_seed
    from rl_async.transfer_queue.dataset import first_task

    agent, name = config.agent, config.agent.environment
    # A user that is a model needs the policy, which is not there yet, or a server.
    if name is None or name in MODELLED_USERS or config.rollout.replay:
        return
    if plays_itself(config):
        _try_player(config)
        return
    if agent.gateway is not None:
        return
    if config.data.make is None or Path(parts(config.data)[0].path).is_file():
        task = first_task(config)
    elif by_seed(name):
        task = Task(task_id="trial", data_source="", prompt=[{"role": "user", "content": "x"}], ground_truth="")
    else:
        return
    hosts = agent.environment_hosts
    limit_s = SLACK_S + CALLS * max(agent.environment_timeout_s, hosts.start_timeout_s if hosts else 0.0)
    what = f"agent.environment: beginning and ending an episode of {name}"
    _try_apart("environment", _Trial(config, task), what, limit_s)


def _try_player(config: RunConfig) -> None:
    """Load an environment in its own Python, with the first task if the data exist. Raises ConfigError."""
    from rl_async.agent_loop.environments.player.__main__ import command, settings
    from rl_async.transfer_queue.dataset import first_task

    words, key = command(config), "agent.environment_hosts.python"
    there = config.data.make is None or Path(parts(config.data)[0].path).is_file()
    task = {"extra": first_task(config).extra} if there else {}
    try:
        done = subprocess.run(words, input=settings(config, **task), capture_output=True, timeout=LOAD_S)
    except OSError as error:
        raise ConfigError(f"{key}: {words[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{key}: {words[0]} did not load the environment within {LOAD_S:g} s") from error
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {done.returncode}"]
    if done.returncode == EXIT_USER:
        raise ConfigError(said[-1].removeprefix("error: "))
    if done.returncode:
        raise ConfigError(
            f"{key}: {words[0]} needs verifiers 0.4, and rl-async by `{install_beside(words[0])}`; it said: {said[-1]}"
        )


def _play(trial: _Trial) -> str:
    try:
        asyncio.run(_begin_and_end(trial.config, trial.task))
    except RlAsyncError as error:
        key, text = "agent.environment", str(error)
        raise ConfigError(text if text.startswith(key) else f"{key}: {text} (task {trial.task.task_id})") from error
    return ""


async def _begin_and_end(config: RunConfig, task: Task) -> None:
    from rl_async.agent_loop.environments.environment_registry import LocalEnvironments
    from rl_async.agent_loop.environments.session import Services

    assert config.agent.environment is not None
    # Hosts set their own, longer deadline for the start.
    limited = config.agent.environment_hosts is not None
    services = Services(config)
    environments = LocalEnvironments(config.agent.environment, services, start_limited=limited)
    try:
        async with environments.open(task) as session:
            await session.reset()
            session.tools()
    finally:
        await services.close()


# What each trial reads, and the function that makes its output.
TRIALS: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "code": (list[tuple[str, str]], _load),
    "tools": (list[str], lambda names: json.dumps(schemas_of(names))),
    "mcp": (AgentConfig, lambda agent: asyncio.run(_meet_servers(agent))),
    "environment": (_Trial, _play),
}


def main() -> int:
    """Run the trial that the argument names."""
    kind, function = TRIALS[sys.argv[1]]
    try:
        print(function(msgspec.json.decode(sys.stdin.buffer.read(), type=kind)))
    # Nothing has run yet, so every failure, even of a server, is taken for a mistake in the config.
    except RlAsyncError as error:
        print(" ".join(str(error).splitlines()), file=sys.stderr)
        return EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main())
