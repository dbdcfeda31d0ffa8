"""A warm start's greedy episodes call the tools of servers, as the run's episodes do."""

import sys
from pathlib import Path
from typing import cast

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import tool_call
from rl_async.configs.schema.rollout import McpServerConfig
from rl_async.launcher.runs.tiny_model import mean_reward
from rl_async.rollout_server.embedded.engine_thread import LocalEngine
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

pytest.importorskip("mcp", reason="python -m pip install 'rl-async[mcp]' installs the SDK for MCP servers")

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
