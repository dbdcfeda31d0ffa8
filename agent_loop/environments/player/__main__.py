"""Keeps a player: ``python -m rl_async.agent_loop.environments.player --run RUN --gateway URL --index I``.

The player runs under the guard, so that the end of this process, however it comes, ends all that the player started.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL, ConfigError
from rl_async.process import guard
from rl_async.process.http_auth import TOKEN_FILE, token_file
from rl_async.process.role import add_run, heeded, role_parser, run_role

MODULE = "rl_async.agent_loop.environments.player.verifiers"
# How agent.environment begins.
PREFIX = "verifiers:"
# The player has so long to release what its environment holds.
GRACE_S = 10.0


def settings(config: RunConfig, **more: object) -> bytes:
    """Return the line that a player reads first.

    Several environments have a section each in `agent.environment_options`. Raises ConfigError for a further one.
    """
    agent = config.agent
    names, options = (agent.environment or "").removeprefix(PREFIX).split(","), agent.environment_options
    if len(names) > 1:
        if odd := [name for name in options if name not in names]:
            raise ConfigError(
                f"agent.environment_options: {odd[0]} is none of the environments {', '.join(names)}, which have a "
                "section each"
            )
        environments = {name: options.get(name, {}) for name in names}
    else:
        environments = {names[0]: options}
    return msgspec.json.encode({"environments": environments, "at_once": agent.concurrency} | more) + b"\n"


def command(config: RunConfig) -> list[str]:
    """Return the command line of a player. ``-P`` keeps the working directory out of the search for its modules."""
    assert config.agent.environment_hosts is not None
    return [config.agent.environment_hosts.python, "-P", "-m", MODULE]


def main() -> int:
    """Keep a player until the run is over; return its exit code."""
    parser = role_parser("agent_loop.environments.player", __doc__)
    add_run(parser)
    parser.add_argument("--gateway", required=True, help="URL of the gateway whose episodes are played")
    parser.add_argument("--index", type=int, required=True, help="number of this player")
    given = parser.parse_args()
    code = 0

    def work() -> None:
        nonlocal code
        code = asyncio.run(_keep(given))

    return run_role(f"environment-{given.index}", work) or code


async def _keep(given: argparse.Namespace) -> int:
    """Start the player and wait for its end. Asked to end by a signal, it lets the player end first, for GRACE_S."""
    config = load_resolved(given.run / "config.yaml")
    # The guard makes this folder, and removes it.
    folder = Path(tempfile.gettempdir()) / f"rl-async-player-{secrets.token_hex(8)}"
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(folder)],
        *command(config),
        stdin=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != TOKEN_FILE} | {"TMPDIR": str(folder)},
        start_new_session=True,
    )
    stdin = process.stdin
    assert stdin is not None
    stdin.write(settings(config, url=given.gateway, token_file=str(token_file(given.run, "gateway").resolve())))
    asked = asyncio.Event()
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    ended, stop = asyncio.create_task(process.wait()), asyncio.create_task(asked.wait())
    await asyncio.wait([ended, stop], return_when=asyncio.FIRST_COMPLETED)
    if asked.is_set():
        stdin.close()
        await asyncio.wait([ended], timeout=GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await ended
        return EXIT_SIGNAL + signal.SIGTERM
    stop.cancel()
    return await ended


if __name__ == "__main__":
    sys.exit(main())
