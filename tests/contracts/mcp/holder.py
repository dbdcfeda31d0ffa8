"""Holds sessions as a worker does: ``python holder.py SERVER FOLDER``; prints pids of the server and its child."""

import asyncio
import json
import sys
from pathlib import Path

from rl_async.agent_loop.tools.tool_registry import connect_servers
from rl_async.configs.schema.rollout import AgentConfig, McpServerConfig


async def hold() -> None:
    command = (sys.executable, sys.argv[1], "{workspace}")
    async with connect_servers(AgentConfig(mcp=(McpServerConfig(command=command),)), Path(sys.argv[2]), "test") as box:
        assert box is not None
        with box.episode() as tools:
            about = json.loads((await tools["about"].call({}, timeout_s=60)).text)
            child = await tools["leave_behind"].call({}, timeout_s=60)
            print(json.dumps([about["pid"], int(child.text), about["arguments"][0]]), flush=True)
            await asyncio.Event().wait()


asyncio.run(hold())
