"""Servers as the launcher tries them, as a warm start calls them, and as their authors ship them."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.tools.mcp_connection import MOST_BYTES, MOST_VALUES, BoundedBody, Measure, TooLarge
from rl_async.agent_loop.tools.mcp_toolbox import MOST_CHARACTERS, MOST_LOST, McpToolbox
from rl_async.agent_loop.tools.tool import ToolResult
from rl_async.agent_loop.tools.tool_registry import connect_servers
from rl_async.agent_loop.toy_tasks import tool_call
from rl_async.configs.schema.rollout import AgentConfig, McpServerConfig
from rl_async.errors import ConfigError, McpServerLost
from rl_async.launcher.plan.trials import try_mcp_servers
from rl_async.launcher.runs.tiny_model import mean_reward
from rl_async.process.run_files import ENDED, state_of
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


# Sessions over the SDK with servers that go wrong.


HERE = Path(__file__).parent
IMMENSE = (sys.executable, str(HERE / "immense_server.py"))
FAULTY = (sys.executable, str(HERE / "faulty_server.py"))
PATIENCE_S = 60.0

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


async def call_faulty(tools: Any, name: str, timeout_s: float = LONG_S, **arguments: Any) -> ToolResult:
    result: ToolResult = await tools[name].call(arguments, timeout_s=timeout_s)
    return result


async def test_results_and_errors_of_tools(connect: Connect) -> None:
    async with connect() as toolbox:
        with toolbox.episode() as tools:
            assert await call_faulty(tools, "add", a=2, b=3) == ToolResult("5")
            assert "fail" in (await call_faulty(tools, "fail")).error
            assert (await call_faulty(tools, "add", a="x")).error
            assert "image/png" in (await call_faulty(tools, "picture")).text
            assert (await call_faulty(tools, "junk")).text == "after junk"
            result = await call_faulty(tools, "big")
            assert (len(result.text), result.whole) == (MOST_CHARACTERS, 10_000_000)
            assert (await call_faulty(tools, "add", a=2, b=3)).text == "5"


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
            result = await call_faulty(tools, name)
            assert "agent.mcp[0]" in result.error and str(bound) in result.error
            assert (await call_faulty(tools, "hello")).text == "hello"
        assert (await call_faulty(tools, "text")).whole == 4_000_000
        result = await call_faulty(tools, "endless")
        assert "agent.mcp[0]" in result.error and str(MOST_BYTES) in result.error
        if url:
            assert (await call_faulty(tools, "hello")).text == "hello"


@pytest.mark.parametrize("endless", ["pings", "late"])
async def test_an_answer_to_a_call_that_was_given_up_is_not_read_on(connect: Connect, endless: str) -> None:
    names = (endless, "pinging")
    command = (*IMMENSE, json.dumps([{"name": name, "inputSchema": {"type": "object"}} for name in names]))
    with serving(*command, "text/event-stream") as url:
        async with connect(command=(), url=url, scope="worker") as toolbox:
            with toolbox.episode() as tools:
                assert (await call_faulty(tools, endless, timeout_s=0.3)).error == "timeout"
                async with asyncio.timeout(PATIENCE_S):
                    while (await call_faulty(tools, "pinging")).text != "0":
                        pass


async def test_a_slow_call_ends_at_its_deadline_and_the_session_goes_on(connect: Connect) -> None:
    async with connect(command=BARE) as toolbox:
        with toolbox.episode() as tools:
            pid = json.loads((await call_faulty(tools, "about")).text)["pid"]
            assert (await call_faulty(tools, "slow", timeout_s=0.2)).error == "timeout"
            assert json.loads((await call_faulty(tools, "about")).text)["pid"] == pid


@pytest.mark.parametrize("scope", ["episode", "worker"])
async def test_a_server_that_dies_in_a_call_is_started_again(connect: Connect, scope: str) -> None:
    async with connect(command=BARE, scope=scope) as toolbox:
        with toolbox.episode() as tools:
            assert (await call_faulty(tools, "die")).error
            assert (await call_faulty(tools, "add", a=1, b=1)).text == "2"
            for _ in range(MOST_LOST - 1):
                assert (await call_faulty(tools, "die")).error
            with pytest.raises(McpServerLost, match=r"agent\.mcp\[0\]"):
                await call_faulty(tools, "die")


async def test_each_episode_has_its_own_process_and_worker_scope_shares_one(connect: Connect) -> None:
    for scope, count in (("episode", 2), ("worker", 1)):
        async with connect(command=BARE, scope=scope) as toolbox:
            with toolbox.episode() as one, toolbox.episode() as other:
                pids = {json.loads((await call_faulty(tools, "about")).text)["pid"] for tools in (one, other)}
        assert len(pids) == count
        assert all(state_of(pid) in ENDED for pid in pids)


async def test_a_server_gets_no_variables_but_its_own(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_API_KEY", "secret")
    async with connect(env={"MODE": "x"}, command=(*BARE, "{workspace}")) as toolbox:
        with toolbox.episode() as tools:
            about = json.loads((await call_faulty(tools, "about")).text)
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
            assert (await call_faulty(tools, "add", a=2, b=3)).text == "5"
            assert not (await call_faulty(tools, "refuse")).error
            assert (await call_faulty(tools, "add", a=2, b=3)).error
            assert (await call_faulty(tools, "add", a=2, b=3)).text == "5"


async def test_ten_million_characters_over_http(connect: Connect, http_server: str) -> None:
    async with connect(command=(), url=http_server) as toolbox:
        with toolbox.episode() as tools:
            assert (await call_faulty(tools, "big")).whole == 10_000_000


async def test_a_server_over_http_that_is_killed_fails_the_sample_and_is_logged(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(*FAULTY, "http") as url, caplog.at_level(logging.WARNING, logger="rl_async.agent_loop"):
        async with connect(command=(), url=url) as toolbox:
            with toolbox.episode() as tools:
                assert (await call_faulty(tools, "die")).error
                assert "agent.mcp[0]" in caplog.text
                with pytest.raises(McpServerLost, match=url):
                    await call_faulty(tools, "add", a=1, b=1)


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
            about = json.loads((await call_faulty(tools, "about")).text)
            child = int((await call_faulty(tools, "leave_behind")).text)
            # A server may do this.
            if deletes:
                os.rmdir(about["arguments"][0])
            os.kill(psutil.Process(about["pid"]).ppid(), signal.SIGKILL)
            # Its end comes soon after the guard's, not with it.
            await asyncio.to_thread(wait_for_end, about["pid"])
            assert (await call_faulty(tools, "add", a=1, b=1)).error
            assert (await call_faulty(tools, "add", a=1, b=1)).text == "2"
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


# Messages of servers, measured piece by piece.


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values, inner))


def refused(most: int, *pieces: bytes) -> bool:
    measure = Measure("server", most)
    try:
        for piece in pieces:
            measure.add(piece)
    except TooLarge as error:
        assert "server" in str(error)
        return True
    return False


@settings(max_examples=40)
@given(JSON, st.booleans(), st.integers(1, 7))
def test_values_are_counted_wherever_a_message_is_cut(value: Any, ascii_only: bool, size: int) -> None:
    """No text counts as more than one value. An empty container counts as two."""
    data, count = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass"), values(value)
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    assert not refused(2 * count, *pieces)
    assert count < 3 or refused(count - 2, *pieces)


def test_bytes_are_counted() -> None:
    assert not refused(1, b'"', b"x" * (MOST_BYTES - 2), b'"')
    assert refused(1, b'"', b"x" * MOST_BYTES)


class Body(httpx2.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def read(kind: str, *pieces: bytes) -> bytes:
    response = httpx2.Response(200, headers={"content-type": kind}, stream=Body(list(pieces)))
    return b"".join([data async for data in BoundedBody(response, lambda: Measure("server", 10))])


EVENT = b"event: message\r\ndata: [1,2,3,4,5,6]\r\n\r\n"
FULL = b"[1,2,3,4,5,6]"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
async def test_each_event_of_a_stream_is_measured_by_itself(size: int) -> None:
    for stream in (EVENT * 3, EVENT.replace(b"\r", b"") * 3):
        pieces = [stream[place : place + size] for place in range(0, len(stream), size)]
        assert await read("text/event-stream", *pieces) == stream


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "stream",
    [
        b"data: " + FULL + b"\r\ndata: " + FULL + b"\r\n\r\n",
        b"data: " + FULL + b"\rdata: " + FULL + b"\r\r",
        b'id: "\ndata: ' + FULL * 2 + b"\n\n",
        b'id: "\rdata: ' + FULL * 2 + b"\r\r",
        b': \\"\\\ndata: ' + FULL * 2 + b"\n\n",
    ],
)
async def test_no_line_of_an_event_hides_another(stream: bytes, size: int) -> None:
    pieces = [stream[place : place + size] for place in range(0, len(stream), size)]
    with pytest.raises(TooLarge):
        await read("text/event-stream; charset=utf-8", *pieces)


async def test_blank_lines_divide_no_other_body() -> None:
    with pytest.raises(TooLarge):
        await read("application/json", FULL, b"\n\n", FULL)
