"""Tries the servers of `agent.mcp` in a separate process: ``python -m rl_async.launcher.plan.mcp_servers``.

This finds a typo in a command, a server that does not answer or an unknown tool before the run has a folder.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

from rl_async.configs.schema.rollout import AgentConfig
from rl_async.errors import EXIT_USER, ConfigError, McpServerLost
from rl_async.launcher.plan.user_code import run_apart

# For imports, and retries of a server that ends at once, beside the servers' own deadlines.
SLACK_S = 60.0


def try_mcp_servers(agent: AgentConfig) -> list[str]:
    """Begin a session with each server; return, for each, a line that names its tools.

    Raises ConfigError, naming the key, for a server that the run could not use.
    """
    if not agent.mcp or agent.gateway is not None:
        return []
    from rl_async.agent_loop.tools.mcp_toolbox import mcp_servers

    # Raises for mistakes that show without starting a server.
    mcp_servers(agent.mcp, Path(), "")
    limit_s = SLACK_S + 3 * max(server.start_timeout_s for server in agent.mcp)
    what = "agent.mcp: beginning and ending sessions with the servers"
    found = run_apart("launcher.plan.mcp_servers", what=what, limit_s=limit_s, given=msgspec.json.encode(agent))
    return found.splitlines()


def main() -> int:
    """Try the servers of the section `agent` on standard input; print their tools, or the error on standard error."""
    agent = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentConfig)
    try:
        print("\n".join(asyncio.run(_try(agent))))
    # Nothing has run yet, so a lost server is taken for a mistake in the config, too.
    except (ConfigError, McpServerLost) as error:
        print(" ".join(str(error).splitlines()), file=sys.stderr)
        return EXIT_USER
    return 0


async def _try(agent: AgentConfig) -> list[str]:
    from rl_async.agent_loop.tools.tool_registry import connect_servers

    with tempfile.TemporaryDirectory(prefix="rl-async-mcp-") as logs:
        async with connect_servers(agent, Path(logs), "trial") as toolbox:
            assert toolbox is not None
            offered = toolbox.offered
    keys = dict.fromkeys(key for key, _ in offered)
    return [f"{key}: {', '.join(name for at, name in offered if at == key)}" for key in keys]


if __name__ == "__main__":
    sys.exit(main())
