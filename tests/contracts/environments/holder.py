"""Holds an environment in a host as a worker does: ``python -m tests.contracts.environments.holder FOLDER``."""

import asyncio
import sys
from pathlib import Path

from tests.contracts.environments.test_hosts import hosted, task


async def hold(folder: Path) -> None:
    async with hosted("Parent", folder) as environments, environments.open(task("held")) as parent:
        print("in a step", flush=True)
        await parent.step("go")


asyncio.run(hold(Path(sys.argv[1])))
