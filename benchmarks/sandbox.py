"""How long programs in sandboxes take, one after another and many at once.

    python -m benchmarks.sandbox --concurrent 256 --json FILE

Each run opens a workspace, runs a program that prints one line, and closes the workspace, as an episode with one call
does; then the same in workspaces that are open already. The peer is the same program without a sandbox. All start at
the same moment, so the 99th percentile of many at once is mostly the time to start as many processes on these cores.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.sandbox import Sandbox, Workspace
from rl_async.sandbox.bubblewrap import PYTHON
from rl_async.sandbox.kinds import make_sandbox

PROGRAM = "print(1)"
CONFIG = SandboxConfig(timeout_s=600.0, workspace_bytes=1 << 20)


async def whole(sandbox: Sandbox) -> None:
    workspace = await sandbox.open()
    try:
        await run(workspace)
    finally:
        await workspace.close()


async def run(workspace: Workspace) -> None:
    result = await workspace.run("python", PROGRAM)
    assert (result.stdout, result.limit) == (b"1\n", ""), result


async def bare() -> None:
    process = await asyncio.create_subprocess_exec(PYTHON, "-c", PROGRAM, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0


async def seconds(work: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def summary(times: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {f"p{cut}_ms": round(1e3 * cuts[cut - 1], 1) for cut in (50, 95, 99)}


async def measure(concurrent: int, rounds: int) -> dict[str, dict[str, float]]:
    sandbox = make_sandbox(CONFIG)
    found = {}
    found["bare, one by one"] = summary([await seconds(bare) for _ in range(rounds)])
    found["sandbox, one by one"] = summary([await seconds(lambda: whole(sandbox)) for _ in range(rounds)])
    found[f"bare, {concurrent} at once"] = summary(
        await asyncio.gather(*(seconds(bare) for _ in range(concurrent))),
    )
    found[f"sandbox, {concurrent} at once"] = summary(
        await asyncio.gather(*(seconds(lambda: whole(sandbox)) for _ in range(concurrent))),
    )
    workspaces = [await sandbox.open() for _ in range(concurrent)]
    await asyncio.gather(*map(run, workspaces))
    found[f"open workspaces, {concurrent} at once"] = summary(
        await asyncio.gather(*(seconds(lambda opened=opened: run(opened)) for opened in workspaces))  # type: ignore[misc]
    )
    for workspace in workspaces:
        await workspace.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.concurrent, arguments.rounds))
    print(f"{os.cpu_count()} cores")
    for name, numbers in found.items():
        print(f"{name:32}", *(f"{key} {value}" for key, value in numbers.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"cores": os.cpu_count(), "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
