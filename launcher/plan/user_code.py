"""Loads the code that a config names in a separate process: ``python -m rl_async.launcher.plan.user_code``.

This finds typos before the run has a folder, and keeps the code's imports and side effects out of the launcher.
``run_apart`` starts this module and its siblings for tools, environments and MCP servers.
"""

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rl_async.configs.derived import uses_sandbox
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_USER, ConfigError
from rl_async.process.role import own_module
from rl_async.sandbox.kinds import make_sandbox
from rl_async.userload import is_user_reference, load_user_object


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


# Importing torch from a slow disk takes a minute.
LOAD_S = 180.0


def check_user_code(config: RunConfig) -> None:
    """Raise ConfigError naming the key if code that the run would load does not exist, load or fit.

    Also raises it if the run needs a sandbox and none can be made here.
    """
    if uses_sandbox(config):
        make_sandbox(config.sandbox)
    named = list(named_code(config))
    _load([(key, name) for key, name in named if not is_user_reference(name)])
    if own := [(key, name) for key, name in named if is_user_reference(name)]:
        keys, names = (", ".join(dict.fromkeys(column)) for column in zip(*own))
        run_apart("launcher.plan.user_code", json.dumps(own), what=f"{keys}: loading {names}", limit_s=LOAD_S)


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


def _load(named: Sequence[tuple[str, str]]) -> None:
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


def main() -> int:
    """Load the pairs of key and name in the argument; print an error as the last line of standard error."""
    try:
        _load(json.loads(sys.argv[1]))
    except ConfigError as error:
        print(" ".join(str(error).splitlines()), file=sys.stderr)
        return EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main())
