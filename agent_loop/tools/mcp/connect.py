"""Makes the toolbox of a config's servers, with the SDK's connections: for agent workers, and to try a config."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rl_async.agent_loop.tools.mcp.servers import mcp_servers
from rl_async.agent_loop.tools.mcp.sessions import FIRST_PAUSE_S
from rl_async.agent_loop.tools.mcp.toolbox import McpToolbox
from rl_async.agent_loop.tools.registry import get_tool
from rl_async.configs.schema.rollout import AgentConfig


@asynccontextmanager
async def connect_servers(
    agent: AgentConfig, log_folder: Path, owner: str, first_pause_s: float = FIRST_PAUSE_S
) -> AsyncIterator[McpToolbox | None]:
    """Hold the tools of all servers; None if there are no servers. Servers write to logs called after ``owner``.
    For ``first_pause_s`` see ``McpSessions``.

    Raises, before the block begins, McpServerLost for a server that cannot be started or asked, and ConfigError for
    tools that cannot be used.
    """
    if not (servers := mcp_servers(agent.mcp, log_folder, owner)):
        yield None
        return
    from rl_async.agent_loop.tools.mcp.connection import SdkConnection  # imports the SDK, which is optional

    taken = [get_tool(name).name for name in agent.tools]
    async with McpToolbox(servers, SdkConnection, taken, first_pause_s) as toolbox:
        yield toolbox
