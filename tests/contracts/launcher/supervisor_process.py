"""A supervisor of fake roles as a process of its own: ``python supervisor_process.py FOLDER``."""

import asyncio
import importlib.util
import sys
from pathlib import Path

from rl_async.launcher.plan.planning import assign_ports
from rl_async.launcher.supervisor import Interrupted, Supervisor, ThisMachine


async def main(folder: Path) -> int:
    spec = importlib.util.spec_from_file_location("fake_plan", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_plan"] = module
    spec.loader.exec_module(module)
    plan = module.fake_plan(folder)
    with Supervisor(plan, ThisMachine(assign_ports(plan.ports), folder), folder) as supervisor:
        try:
            await supervisor.run()
        except Interrupted as interrupted:
            return 128 + interrupted.number
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]))))
