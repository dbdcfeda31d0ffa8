"""Sessions that begin when needed and again when lost, over a handwritten connection."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_async.agent_loop.tools.mcp_toolbox import (
    MOST_LOST,
    MOST_TIMEOUTS,
    OPENINGS,
    Listed,
    McpServer,
    McpSessions,
    McpToolbox,
    ToolFailed,
)
from rl_async.agent_loop.tools.tool import ToolResult
from rl_async.configs.schema.mcp import McpServerConfig
from rl_async.errors import McpServerLost

OBJECT: dict[str, Any] = {"type": "object"}


class FakeConnection:
    """Answers with its number, unless the called tool says otherwise."""

    def __init__(self, number: int, opens: bool, lists: bool = True) -> None:
        self.number, self.opens, self.lists = number, opens, lists
        self.lost = self.ended = False

    async def opened(self) -> None:
        await asyncio.sleep(0)
        if not self.opens:
            raise McpServerLost("no such server")

    async def tools(self) -> list[Listed]:
        if not self.lists:
            self.lost = True
            raise McpServerLost("it was killed")
        return [Listed("who", "", OBJECT)]

    async def call(self, name: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        if name == "die":
            self.lost = True
            raise ToolFailed("connection closed")
        if name == "refuse":
            raise ToolFailed("bad arguments")
        if name == "hang":
            await asyncio.Event().wait()
        return {"content": [{"type": "text", "text": str(self.number)}]}

    def close(self) -> None:
        self.lost = self.ended = True

    async def closed(self) -> None:
        return None


class Connections:
    """Makes connections and keeps them; ``opens`` says of each, by number, whether it opens, ``lists`` whether it lives
    until it has listed its tools."""

    def __init__(
        self, opens: Callable[[int], bool] = lambda number: True, lists: Callable[[int], bool] = lambda number: True
    ) -> None:
        self.made: list[FakeConnection] = []
        self._opens, self._lists = opens, lists

    def __call__(self, server: McpServer) -> FakeConnection:
        number = len(self.made)
        self.made.append(FakeConnection(number, self._opens(number), self._lists(number)))
        return self.made[-1]


def a_server(**config: Any) -> McpServer:
    return McpServer(McpServerConfig(url="http://127.0.0.1:1/mcp", **config), 0, Path("none.log"))


def make(connect: Connections) -> McpSessions:
    return McpSessions(a_server(), connect, asyncio.Semaphore(2), first_pause_s=0.0)


async def call(made: McpSessions, name: str = "who", timeout_s: float = 30.0) -> ToolResult:
    return await made.call(name, {}, timeout_s)


async def test_a_session_begins_with_the_first_call_and_is_kept() -> None:
    connect = Connections()
    made = make(connect)
    assert not connect.made
    assert [(await call(made)).text for _ in range(3)] == ["0", "0", "0"]
    assert len(connect.made) == 1


async def test_callers_who_wait_for_a_session_share_it() -> None:
    made = make(connect := Connections())
    assert {(await done).text for done in [asyncio.create_task(call(made)) for _ in range(5)]} == {"0"}
    assert len(connect.made) == 1


async def test_a_lost_session_is_an_error_to_the_model_and_the_next_call_begins_another() -> None:
    made = make(Connections())
    assert (await call(made, "die")).error
    assert (await call(made)).text == "1"


async def test_a_refused_call_keeps_the_session() -> None:
    made = make(connect := Connections())
    assert (await call(made, "refuse")).error == "bad arguments"
    assert (await call(made)).text == "0"
    assert len(connect.made) == 1


async def test_a_session_that_is_lost_between_calls_is_replaced_without_an_error() -> None:
    made = make(connect := Connections())
    assert (await call(made)).text == "0"
    connect.made[0].lost = True
    assert (await call(made)).text == "1"
    assert connect.made[0].ended


async def test_too_many_losses_in_a_row_fail_the_sample_and_name_the_server() -> None:
    made = make(Connections())
    for _ in range(MOST_LOST - 1):
        assert (await call(made, "die")).error
    with pytest.raises(McpServerLost, match=r"agent\.mcp\[0\]"):
        await call(made, "die")
    assert not (await call(made)).error  # it may be well again
    assert (await call(made, "die")).error


async def test_one_loss_counts_once_however_many_calls_were_in_flight() -> None:
    made = make(Connections())
    await call(made)
    results = await asyncio.gather(*(call(made, "die") for _ in range(2 * MOST_LOST)))
    assert all(result.error for result in results)


async def test_a_server_that_does_not_open_is_tried_a_few_times() -> None:
    made = make(connect := Connections(lambda number: number == OPENINGS - 1))
    assert (await call(made)).text == str(OPENINGS - 1)
    made = make(connect := Connections(lambda number: False))
    with pytest.raises(McpServerLost, match="no such server"):
        await call(made)
    assert len(connect.made) == OPENINGS


async def test_calls_past_the_deadline_are_errors_and_several_in_a_row_lose_the_session() -> None:
    made = make(connect := Connections())
    for _ in range(MOST_TIMEOUTS):
        assert not connect.made or not connect.made[0].lost
        assert (await call(made, "hang", timeout_s=0.01)).error == "timeout"
    assert connect.made[0].lost
    assert (await call(made)).text == "1"


async def test_a_burst_that_a_slow_server_cannot_answer_in_time_loses_no_session() -> None:
    """Calls at once are no calls in a row; and while some are answered, the server works."""
    made = make(connect := Connections())
    for _ in range(MOST_TIMEOUTS - 1):
        await asyncio.gather(*(call(made, "hang", timeout_s=0.01) for _ in range(8)))
    assert not connect.made[0].lost
    for _ in range(MOST_TIMEOUTS):
        late = [asyncio.create_task(call(made, "hang", timeout_s=0.05)) for _ in range(8)]
        await asyncio.sleep(0)
        assert not (await call(made)).error
        await asyncio.gather(*late)
    assert [connection.lost for connection in connect.made] == [False]


async def test_a_session_that_opens_after_the_end_is_closed() -> None:
    made = make(connect := Connections())
    waiting = asyncio.create_task(call(made))
    await asyncio.sleep(0)
    made.close()
    await asyncio.wait([waiting])
    assert all(connection.ended for connection in connect.made)


@pytest.mark.parametrize(("scope", "seen"), [("worker", ["0", "0"]), ("episode", ["1", "2"])])
async def test_episodes_have_sessions_of_their_own_or_share_one(scope: Any, seen: list[str]) -> None:
    connect = Connections()
    async with McpToolbox([a_server(scope=scope)], connect) as toolbox:
        found = []
        for _ in seen:
            with toolbox.episode() as tools:
                found.append((await tools["who"].call({}, timeout_s=30)).text)
        assert found == seen
        assert connect.made[-1].ended == (scope == "episode")
    assert all(connection.ended for connection in connect.made)


async def test_an_episode_without_calls_begins_no_session() -> None:
    connect = Connections()
    async with McpToolbox([a_server()], connect) as toolbox:
        with toolbox.episode() as tools:
            assert [tool.schema["function"]["name"] for tool in tools.values()] == ["who"]
        assert len(connect.made) == 1  # which was asked for the tools


async def test_a_server_that_is_not_there_at_the_start_is_lost() -> None:
    with pytest.raises(McpServerLost, match="no such server"):
        async with McpToolbox([a_server()], Connections(lambda number: False)):
            pass


async def test_a_server_that_is_killed_before_it_lists_its_tools_is_started_again() -> None:
    connect = Connections(lists=lambda number: number == OPENINGS - 1)
    async with McpToolbox([a_server()], connect) as toolbox:
        assert toolbox.offered == [("agent.mcp[0]", "who")]
    assert len(connect.made) == OPENINGS


async def test_a_server_that_never_lists_its_tools_is_lost() -> None:
    connect = Connections(lists=lambda number: False)
    with pytest.raises(McpServerLost, match="it was killed"):
        async with McpToolbox([a_server()], connect):
            raise AssertionError("the toolbox must not open")
    assert len(connect.made) == OPENINGS
