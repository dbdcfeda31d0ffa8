"""Servers as the launcher tries them, as a warm start calls them, and as their authors ship them."""

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.tools.mcp_toolbox import McpToolbox
from rl_async.agent_loop.tools.tool_registry import connect_servers
from rl_async.agent_loop.toy_tasks import tool_call
from rl_async.configs.schema.rollout import AgentConfig, McpServerConfig
from rl_async.errors import ConfigError
from rl_async.launcher.plan.trials import try_mcp_servers
from rl_async.launcher.runs.tiny_model import mean_reward
from rl_async.rollout_server.embedded.engine_thread import LocalEngine
from rl_async.transfer_queue.images import MARK
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

pytest.importorskip("mcp", reason="python -m pip install 'rl-async[mcp]' installs the SDK for MCP servers")

SERVERS = Path(os.environ.get("RL_ASYNC_MCP_SERVERS", Path(__file__).parents[3] / ".venv-mcp"))
PYTHON, NODE = SERVERS / "bin" / "python", SERVERS / "node_modules" / "@modelcontextprotocol"
LONG_S = 60.0  # a deadline that no call here reaches

from_pypi = pytest.mark.skipif(not PYTHON.exists(), reason="scripts/install mcp installs servers from PyPI")
from_npm = pytest.mark.skipif(
    not NODE.exists() or shutil.which("node") is None,
    reason="node, then scripts/install mcp, installs servers from npm",
)


@asynccontextmanager
async def connected(tmp_path: Path, *servers: dict[str, Any]) -> AsyncIterator[McpToolbox]:
    agent = AgentConfig(mcp=tuple(McpServerConfig(**config) for config in servers))
    async with connect_servers(agent, tmp_path, "test") as toolbox:
        assert toolbox is not None
        yield toolbox


async def call(tools: Any, name: str, **arguments: Any) -> str:
    result = await tools[name].call(arguments, timeout_s=LONG_S)
    assert not result.error
    return str(result.text)


@from_pypi
async def test_calculator_and_time_side_by_side(tmp_path: Path) -> None:
    calculator = {"command": (str(PYTHON), "-m", "mcp_server_calculator"), "scope": "worker"}
    clock = {"command": f"{PYTHON} -m mcp_server_time --local-timezone UTC", "allow": ("convert_time",)}
    async with connected(tmp_path, calculator, clock) as toolbox:
        with toolbox.episode() as tools:
            assert set(tools) == {"calculate", "convert_time"}
            assert await call(tools, "calculate", expression="2+3*4") == "14"
            times = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            assert "21:00" in await call(tools, "convert_time", **times)
            assert (await tools["calculate"].call({"expression": "2+"}, timeout_s=LONG_S)).error
            assert (await tools["calculate"].call({}, timeout_s=LONG_S)).error


@from_pypi
async def test_each_episode_has_a_database_of_its_own(tmp_path: Path) -> None:
    server = {"command": (str(PYTHON.with_name("mcp-server-sqlite")), "--db-path", "{workspace}/db")}
    async with connected(tmp_path, server) as toolbox:
        for _ in range(2):
            with toolbox.episode() as tools:
                await call(tools, "create_table", query="create table t (x int)")
                await call(tools, "write_query", query="insert into t values (7)")
                assert "7" in await call(tools, "read_query", query="select x from t")


def node(name: str, *arguments: str) -> dict[str, Any]:
    return {"command": ("node", str(NODE / f"server-{name}" / "dist" / "index.js"), *arguments)}


@from_npm
async def test_every_kind_of_result(tmp_path: Path) -> None:
    async with connected(tmp_path, node("everything")) as toolbox:
        with toolbox.episode() as tools:
            assert "hello" in await call(tools, "echo", message="hello")
            picture = await tools["get-tiny-image"].call({}, timeout_s=LONG_S)
            assert MARK in picture.text and picture.images[0].startswith(b"\x89PNG")
            assert "image/png" in picture.plain
            assert "resource" in await call(tools, "get-resource-links", count=2)
            assert await call(tools, "get-resource-reference", resourceType="Text", resourceId=1)
            assert json.loads(await call(tools, "get-structured-content", location="Chicago"))


@from_npm
async def test_files_and_a_memory_per_episode(tmp_path: Path) -> None:
    files = node("filesystem", "{workspace}")
    memory = node("memory") | {"env": {"MEMORY_FILE_PATH": "{workspace}/memory.json"}}
    async with connected(tmp_path, files, memory) as toolbox:
        for _ in range(2):
            with toolbox.episode() as tools:
                folder = (await call(tools, "list_allowed_directories")).split("\n")[-1]
                assert "a.txt" not in await call(tools, "list_directory", path=folder)
                await call(tools, "write_file", path=f"{folder}/a.txt", content="inside")
                assert await call(tools, "read_text_file", path=f"{folder}/a.txt") == "inside"
                entity = {"name": "rl", "entityType": "field", "observations": ["async"]}
                await call(tools, "create_entities", entities=[entity])
                assert json.loads(await call(tools, "read_graph"))["entities"][0]["name"] == "rl"


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


EXAMPLE = Path(__file__).parents[3] / "examples" / "mcp_calculator.py"


class Engine(ScriptedEngine):
    def close(self) -> None:
        self.says = []


async def test_the_tools_of_servers_are_there() -> None:
    tokenizer = train_tokenizer(demos("calculator", 400), 200)
    renderer = ChatRenderer(tokenizer)
    engine = Engine(renderer, [tool_call("calculator", expression="2+3"), "5"])
    config = run_config(mcp=(McpServerConfig(command=(sys.executable, str(EXAMPLE))),), max_turns=2)
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, max_tokens=64))
    assert await mean_reward(config, cast(LocalEngine, engine), renderer, [leased().task]) == 1.0
    assert "<tool_response>\n5\n" in tokenizer.decode(engine.requests[1].token_ids)
    assert engine.says == [], "it is closed"
