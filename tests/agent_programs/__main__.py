"""Plays and trains episodes with agent programs as they are shipped: see ``python -m tests.agent_programs -h``.

For each client: it is installed into a folder of its own, a tiny model learns to call one of its tools, a run is
launched, `rl-async play` plays its episodes with the client, confined to its workspace and the gateway, both steps are
trained, and `rl-async audit` must agree.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rl_async.errors import UserError
from tests.agent_programs.clients import CLIENTS, Client, install_commands
from tests.agent_programs.puppet import make_puppet
from tests.agent_programs.trial import Found, TrialFailed, run_trial


def main() -> int:
    """Try the clients; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.agent_programs", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--folder", type=Path, required=True, help="for clients, models and runs; kept")
    parser.add_argument("--model", type=Path, help="a model that learns what to say, instead of a tiny one")
    arguments = parser.parse_args()
    if unknown := set(arguments.clients) - set(CLIENTS):
        parser.error(f"no client {', '.join(sorted(unknown))}")
    missing = [program for program in ("bwrap", "npm", "node") if shutil.which(program) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}")
    torch.set_num_threads(1)
    folder: Path = arguments.folder.absolute()
    found, failed = [], []
    for name in arguments.clients or CLIENTS:
        began = time.monotonic()
        try:
            found.append(try_client(name, CLIENTS[name], folder, arguments.model))
        except (TrialFailed, UserError, subprocess.CalledProcessError) as error:
            failed.append(name)
            print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{name}: ok after {time.monotonic() - began:.0f} s: {found[-1]}", flush=True)
    print(table(found))
    return 1 if failed else 0


def try_client(name: str, client: Client, folder: Path, base: Path | None) -> Found:
    """Install the client and make its model, if they are missing, and run its trial."""
    installed = folder / "clients" / (client.folder or name)
    if not installed.is_dir():
        install(client, installed)
    puppet = folder / "models" / f"{base.name if base else 'tiny'}-{client.lines.name}"
    if not puppet.is_dir():
        make_puppet(client.lines, puppet, base)
    trials = folder / "trials" / name
    return run_trial(name, client, trials / str(len(list(trials.glob("*")))), installed, puppet)


def install(client: Client, folder: Path) -> None:
    """Install the client; what is left of a failure is removed."""
    folder.mkdir(parents=True)
    try:
        for command in install_commands(client, folder):
            subprocess.run(command, check=True, stdout=sys.stderr)
    except BaseException:
        shutil.rmtree(folder)
        raise


def table(found: Sequence[Found]) -> str:
    """Return the results as a Markdown table."""
    lines = [list(Found._fields), ["---"] * len(Found._fields)]
    lines += [[f"{value:.1e}" if isinstance(value, float) else str(value) for value in row] for row in found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
