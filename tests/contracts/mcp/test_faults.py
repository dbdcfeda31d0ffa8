"""Sessions over the SDK with servers that go wrong."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_async.agent_loop.tools.mcp_toolbox import MOST_CHARACTERS, MOST_LOST, McpToolbox
from rl_async.agent_loop.tools.tool import ToolResult
from rl_async.agent_loop.tools.tool_registry import connect_servers
from rl_async.configs.schema.rollout import AgentConfig, McpServerConfig
from rl_async.errors import ConfigError, McpServerLost
from rl_async.process.run_files import ENDED, state_of

pytest.importorskip("mcp", reason="python -m pip install 'rl-async[mcp]' installs the SDK for MCP servers")

from rl_async.agent_loop.tools.mcp_connection import MOST_BYTES, MOST_VALUES

HERE = Path(__file__).parent
BARE = (sys.executable, str(HERE / "bare_server.py"))
IMMENSE = (sys.executable, str(HERE / "immense_server.py"))
FAULTY = (sys.executable, str(HERE / "faulty_server.py"))
PATIENCE_S = 60.0
LONG_S = 60.0  # a deadline that no call here reaches

Connect = Callable[..., AbstractAsyncContextManager[McpToolbox]]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    @asynccontextmanager
    async def connect(**config: Any) -> AsyncIterator[McpToolbox]:
        servers = (McpServerConfig(**({"command": FAULTY} | config)),)
        async with connect_servers(AgentConfig(mcp=servers), tmp_path, "test", first_pause_s=0.0) as toolbox:
            assert toolbox is not None
            yield toolbox

    return connect


def is_there(folder: str) -> bool:
    return Path(folder).exists()


async def call(tools: Any, name: str, timeout_s: float = LONG_S, **arguments: Any) -> ToolResult:
    result: ToolResult = await tools[name].call(arguments, timeout_s=timeout_s)
    return result


async def test_results_and_errors_of_tools(connect: Connect) -> None:
    async with connect() as toolbox:
        with toolbox.episode() as tools:
            assert await call(tools, "add", a=2, b=3) == ToolResult("5")
            assert "fail" in (await call(tools, "fail")).error
            assert (await call(tools, "add", a="x")).error
            assert "image/png" in (await call(tools, "picture")).text
            assert (await call(tools, "junk")).text == "after junk"
            result = await call(tools, "big")
            assert (len(result.text), result.whole) == (MOST_CHARACTERS, 10_000_000)
            assert (await call(tools, "add", a=2, b=3)).text == "5"


async def test_only_tools_that_are_allowed_are_offered(connect: Connect) -> None:
    async with connect(command=BARE, allow=("about",)) as toolbox:
        with toolbox.episode() as tools:
            assert list(tools) == ["about"]


@pytest.mark.parametrize("transport", ["stdio", "application/json", "text/event-stream"])
async def test_an_answer_that_is_too_large_to_be_parsed_is_an_error_that_names_the_server(
    connect: Connect, transport: str
) -> None:
    """It is refused while it is read, so that it stalls no other episode. The session goes on, except after an endless
    line, which has no next one."""
    names = ("blocks", "values", "nested", "endless", "text", "hello")
    command = (*IMMENSE, json.dumps([{"name": name, "inputSchema": {"type": "object"}} for name in names]))
    async with contextlib.AsyncExitStack() as stack:
        url = "" if transport == "stdio" else stack.enter_context(serving(*command, transport))
        config = {"command": (), "url": url} if url else {"command": command, "name": "immense"}
        toolbox = await stack.enter_async_context(connect(scope="worker", **config))
        tools = stack.enter_context(toolbox.episode())
        for name, bound in (("blocks", MOST_VALUES), ("values", MOST_VALUES), ("nested", MOST_VALUES)):
            result = await call(tools, name)
            assert "agent.mcp[0]" in result.error and str(bound) in result.error
            assert (await call(tools, "hello")).text == "hello"
        assert (await call(tools, "text")).whole == 4_000_000
        result = await call(tools, "endless")
        assert "agent.mcp[0]" in result.error and str(MOST_BYTES) in result.error
        if url:
            assert (await call(tools, "hello")).text == "hello"


@pytest.mark.parametrize("endless", ["pings", "late"])
async def test_an_answer_to_a_call_that_was_given_up_is_not_read_on(connect: Connect, endless: str) -> None:
    names = (endless, "pinging")
    command = (*IMMENSE, json.dumps([{"name": name, "inputSchema": {"type": "object"}} for name in names]))
    with serving(*command, "text/event-stream") as url:
        async with connect(command=(), url=url, scope="worker") as toolbox:
            with toolbox.episode() as tools:
                assert (await call(tools, endless, timeout_s=0.3)).error == "timeout"
                async with asyncio.timeout(PATIENCE_S):
                    while (await call(tools, "pinging")).text != "0":
                        pass


async def test_a_slow_call_ends_at_its_deadline_and_the_session_goes_on(connect: Connect) -> None:
    async with connect(command=BARE) as toolbox:
        with toolbox.episode() as tools:
            pid = json.loads((await call(tools, "about")).text)["pid"]
            assert (await call(tools, "slow", timeout_s=0.2)).error == "timeout"
            assert json.loads((await call(tools, "about")).text)["pid"] == pid


@pytest.mark.parametrize("scope", ["episode", "worker"])
async def test_a_server_that_dies_in_a_call_is_started_again(connect: Connect, scope: str) -> None:
    async with connect(command=BARE, scope=scope) as toolbox:
        with toolbox.episode() as tools:
            assert (await call(tools, "die")).error
            assert (await call(tools, "add", a=1, b=1)).text == "2"
            for _ in range(MOST_LOST - 1):
                assert (await call(tools, "die")).error
            with pytest.raises(McpServerLost, match=r"agent\.mcp\[0\]"):
                await call(tools, "die")


async def test_each_episode_has_its_own_process_and_worker_scope_shares_one(connect: Connect) -> None:
    for scope, count in (("episode", 2), ("worker", 1)):
        async with connect(command=BARE, scope=scope) as toolbox:
            with toolbox.episode() as one, toolbox.episode() as other:
                pids = {json.loads((await call(tools, "about")).text)["pid"] for tools in (one, other)}
        assert len(pids) == count
        assert all(state_of(pid) in ENDED for pid in pids)


async def test_a_server_gets_no_variables_but_its_own(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_API_KEY", "secret")
    async with connect(env={"MODE": "x"}, command=(*BARE, "{workspace}")) as toolbox:
        with toolbox.episode() as tools:
            about = json.loads((await call(tools, "about")).text)
            folder = about["arguments"][0]
            assert is_there(folder)
    assert "OUR_API_KEY" not in about["variables"] and {"MODE", "PATH"} <= set(about["variables"])
    assert not is_there(folder)


@contextlib.contextmanager
def serving(*command: str) -> Iterator[str]:
    """Run a server that prints its port; yield its address."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    with serving(*FAULTY, "http") as url:
        yield url


@pytest.mark.parametrize("scope", ["episode", "worker"])
async def test_a_session_over_http_that_expired_is_begun_again(connect: Connect, http_server: str, scope: str) -> None:
    async with connect(command=(), url=http_server, scope=scope) as toolbox:
        with toolbox.episode() as tools:
            assert (await call(tools, "add", a=2, b=3)).text == "5"
            assert not (await call(tools, "refuse")).error
            assert (await call(tools, "add", a=2, b=3)).error
            assert (await call(tools, "add", a=2, b=3)).text == "5"


async def test_ten_million_characters_over_http(connect: Connect, http_server: str) -> None:
    async with connect(command=(), url=http_server) as toolbox:
        with toolbox.episode() as tools:
            assert (await call(tools, "big")).whole == 10_000_000


async def test_a_server_over_http_that_is_killed_fails_the_sample_and_is_logged(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(*FAULTY, "http") as url, caplog.at_level(logging.WARNING, logger="rl_async.agent_loop"):
        async with connect(command=(), url=url) as toolbox:
            with toolbox.episode() as tools:
                assert (await call(tools, "die")).error
                assert "agent.mcp[0]" in caplog.text
                with pytest.raises(McpServerLost, match=url):
                    await call(tools, "add", a=1, b=1)


@pytest.mark.parametrize(
    "config",
    [
        {"command": (sys.executable, "-m", "no_such_module")},
        {"command": (sys.executable, "-c", "import time; time.sleep(3600)"), "start_timeout_s": 0.5},
        {"command": (sys.executable, "-c", "print('hello')")},
        {"command": (), "url": "http://127.0.0.1:1/mcp"},
    ],
)
async def test_a_server_that_begins_no_session_is_lost(connect: Connect, config: dict[str, Any]) -> None:
    with pytest.raises(McpServerLost, match=r"agent\.mcp\[0\]"):
        async with connect(**config):
            pass


@pytest.mark.parametrize(
    "config",
    [
        {"command": BARE, "allow": ("subtract",)},
        {"command": (*BARE, '[{"name": "x", "inputSchema": {"type": "array"}}]')},
        {"command": (*BARE, '[{"name": "x", "inputSchema": "object"}]')},
        {"command": (*BARE, "[]")},
    ],
)
async def test_tools_that_cannot_be_used_are_a_config_error(connect: Connect, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[0\]"):
        async with connect(**config):
            pass


async def test_what_a_server_says_at_its_end_is_in_the_error(connect: Connect) -> None:
    with pytest.raises(McpServerLost, match="no_such_module"):
        async with connect(command=(sys.executable, "-m", "no_such_module")):
            pass


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while state_of(pid) not in ENDED:
        assert time.monotonic() < until, pid
        time.sleep(0.02)


@pytest.mark.parametrize("deletes", [False, True])
async def test_nothing_is_left_of_a_server_whose_guard_is_killed(connect: Connect, deletes: bool) -> None:
    async with connect(command=(*BARE, "{workspace}")) as toolbox:
        with toolbox.episode() as tools:
            about = json.loads((await call(tools, "about")).text)
            child = int((await call(tools, "leave_behind")).text)
            if deletes:  # as a server may do
                os.rmdir(about["arguments"][0])
            os.kill(psutil.Process(about["pid"]).ppid(), signal.SIGKILL)
            await asyncio.to_thread(wait_for_end, about["pid"])  # which comes soon after the guard's, not with it
            assert (await call(tools, "add", a=1, b=1)).error
            assert (await call(tools, "add", a=1, b=1)).text == "2"
    assert all(state_of(pid) in ENDED for pid in (about["pid"], child)) and not is_there(about["arguments"][0])


def test_nothing_is_left_of_a_server_whose_worker_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, str(HERE / "holder.py"), BARE[1], str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ) as holder:
        assert holder.stdout is not None
        server, child, folder = json.loads(holder.stdout.readline())
        assert Path(folder).is_dir()
        assert not {state_of(server), state_of(child)} & set(ENDED)
        holder.send_signal(signal.SIGKILL)
    until = time.monotonic() + PATIENCE_S
    while left := [pid for pid in (server, child) if state_of(pid) not in ENDED] or Path(folder).exists():
        assert time.monotonic() < until, left
        time.sleep(0.05)
