"""What the launcher tries of `agent.mcp` before a run has a folder."""

import sys
from pathlib import Path

import pytest

from rl_async.configs.schema.rollout import AgentConfig, McpServerConfig
from rl_async.errors import ConfigError
from rl_async.launcher.plan.mcp_servers import try_mcp_servers

pytest.importorskip("mcp", reason="python -m pip install 'rl-async[mcp]' installs the SDK for MCP servers")

BARE = (sys.executable, str(Path(__file__).parent / "bare_server.py"))


def agent(*servers: McpServerConfig) -> AgentConfig:
    return AgentConfig(mcp=servers)


def test_each_servers_tools_are_named() -> None:
    servers = (
        McpServerConfig(command=BARE, allow=("add", "slow"), name="one"),
        McpServerConfig(command=BARE, allow=("add",), name="two"),
    )
    assert try_mcp_servers(agent(*servers)) == ["agent.mcp[0]: one_add, slow", "agent.mcp[1]: two_add"]
    assert try_mcp_servers(agent()) == []


@pytest.mark.parametrize(
    "server",
    [
        McpServerConfig(command="no-such-program-here"),
        pytest.param(McpServerConfig(command=(sys.executable, "-m", "no_such_module")), marks=pytest.mark.slow),
        McpServerConfig(command=BARE, allow=("ad",)),
        pytest.param(McpServerConfig(url="http://127.0.0.1:1/mcp"), marks=pytest.mark.slow),
    ],
)
def test_what_a_run_could_not_use_is_named_with_its_key(server: McpServerConfig) -> None:
    with pytest.raises(ConfigError, match=r"^agent\.mcp\[0\]"):
        try_mcp_servers(agent(server))
