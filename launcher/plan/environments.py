"""Tries the environment of `agent.environment` in a separate process: ``python -m
rl_async.launcher.plan.environments``.

This finds an unknown name, an action space that cannot be played in text or an error in ``reset`` before the run has a
folder.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec

from rl_async.configs.checks import plays_itself
from rl_async.configs.derived import parts
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_USER, ConfigError, RlAsyncError
from rl_async.installation import install_beside
from rl_async.launcher.plan.user_code import run_apart
from rl_async.messages import Task
from rl_async.transfer_queue.dataset import first_task

# Imports take this long, beside the deadlines of the environment's CALLS: preparing, making, resetting and closing it.
SLACK_S = 60.0
CALLS = 4
# Importing verifiers from a slow disk takes a minute.
PLAYER_S = 180.0
# This environment is not tried: the policy may play the user, and otherwise a separate server does.
NEEDS_POLICY = "simulated_user"


class _Trial(msgspec.Struct):
    """The input of the process: the environment to try, and a task for it."""

    config: RunConfig
    task: Task


def try_environment(config: RunConfig) -> None:
    """Begin and end an episode of the run's environment with the first task.

    If the data must still be made, only environments that need no more than a seed are tried. Raises ConfigError,
    naming the key, for an environment that the run could not use, and DataError for data without a task.
    """
    from rl_async.agent_loop.environments.environment_registry import by_seed

    agent, name = config.agent, config.agent.environment
    if name is None or name == NEEDS_POLICY or config.rollout.replay:
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
    given = msgspec.json.encode(_Trial(config, task))
    run_apart("launcher.plan.environments", what=what, limit_s=limit_s, given=given)


def _try_player(config: RunConfig) -> None:
    """Load an environment in its own Python, with the first task if the data exist. Raises ConfigError."""
    from rl_async.agent_loop.environments.player.__main__ import command, settings

    words, key = command(config), "agent.environment_hosts.python"
    there = config.data.make is None or Path(parts(config.data)[0].path).is_file()
    task = {"extra": first_task(config).extra} if there else {}
    try:
        done = subprocess.run(words, input=settings(config, **task), capture_output=True, timeout=PLAYER_S)
    except OSError as error:
        raise ConfigError(f"{key}: {words[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{key}: {words[0]} did not load the environment within {PLAYER_S:g} s") from error
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {done.returncode}"]
    if done.returncode == EXIT_USER:
        raise ConfigError(said[-1].removeprefix("error: "))
    if done.returncode:
        raise ConfigError(
            f"{key}: {words[0]} needs verifiers 0.4, and rl-async by `{install_beside(words[0])}`; it said: {said[-1]}"
        )


def main() -> int:
    """Run the trial on standard input; print an error as the last line of standard error."""
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=_Trial)
    try:
        asyncio.run(_try(trial.config, trial.task))
    # Nothing has run yet, so every failure is taken for a mistake in the config.
    except RlAsyncError as error:
        key, text = "agent.environment", " ".join(str(error).splitlines())
        print(text if text.startswith(key) else f"{key}: {text} (task {trial.task.task_id})", file=sys.stderr)
        return EXIT_USER
    return 0


async def _try(config: RunConfig, task: Task) -> None:
    from rl_async.agent_loop.environments.environment_registry import LocalEnvironments
    from rl_async.agent_loop.environments.speakers import Services

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


if __name__ == "__main__":
    sys.exit(main())
