"""Starts modules of this project that look at what a config names: users' code and servers stay out of the launcher."""

import subprocess

from rl_async.errors import EXIT_USER, ConfigError
from rl_async.process.role import own_module


def run_apart(module: str, *arguments: str, what: str, limit_s: float, given: bytes | None = None) -> str:
    """Run ``rl_async.MODULE`` with ``given`` on standard input; return what it printed.

    Raises ConfigError with the last line of its standard error if it ends with EXIT_USER. Otherwise the error begins
    with ``what``, a config key and what is done, such as "agent.mcp: trying the servers".
    """
    try:
        done = subprocess.run(own_module(module, *arguments), input=given, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{what} took longer than {limit_s:g} s") from error
    said = done.stderr.decode(errors="replace")
    # Code of others may have printed warnings above it.
    if done.returncode == EXIT_USER and said.strip():
        raise ConfigError(said.splitlines()[-1])
    if done.returncode != 0:
        raise ConfigError(f"{what} ended with {done.returncode}: {said[-2000:]}")
    return done.stdout.decode(errors="replace")
