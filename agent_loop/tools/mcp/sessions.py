"""Calls to one server, for one episode or for all of a worker: sessions begin when needed, and again when lost."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rl_async.agent_loop.tools.mcp.descriptions import Listed
from rl_async.agent_loop.tools.mcp.results import as_result
from rl_async.agent_loop.tools.mcp.servers import McpServer
from rl_async.agent_loop.tools.tool import ToolResult, failed
from rl_async.errors import McpServerLost

log = logging.getLogger("rl_async.agent_loop")

MOST_LOST = 3  # sessions in a row, without a successful call, after which a loss fails the sample
MOST_TIMEOUTS = 3  # calls in a row, after which a session counts as lost
OPENINGS = 3
FIRST_PAUSE_S = 0.5  # between openings, doubled each time


class ToolFailed(Exception):
    """The server refused a call or answered it wrongly; the message says how."""


class Connection(Protocol):
    """One session with a server; making one begins it."""

    @property
    def lost(self) -> bool:
        """Whether no call can succeed any more."""
        ...

    async def opened(self) -> None:
        """Wait until the session has begun. Raises McpServerLost if it does not."""
        ...

    async def tools(self) -> list[Listed]:
        """Ask for the server's tools. Raises McpServerLost, or ConfigError for an answer that cannot be used."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Call a tool; return the result as the protocol writes it. Raises ToolFailed; see ``lost`` after it."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the session and the server's processes have ended."""
        ...

    def close(self) -> None:
        """End the session soon."""
        ...

    async def closed(self) -> None:
        """Wait until ``ended``."""
        ...


Connect = Callable[[McpServer], Connection]


class McpSessions:
    """One session at a time. A call that loses it gets an error as its result; the next call begins another session.

    Between openings that fail it pauses, first for ``first_pause_s`` and then twice as long each time.
    """

    def __init__(
        self, server: McpServer, connect: Connect, turns: asyncio.Semaphore, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self._server, self._connect, self._turns = server, connect, turns
        self._first_pause_s = first_pause_s
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._lost = self._timeouts = 0
        # When a call was last answered, or counted as one without an answer, on the loop's clock.
        self._heard = 0.0
        self._closed = False

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """Call a tool; what goes wrong with it becomes a result with an error, as a message to the model.

        Raises McpServerLost if no session can be had, or the last MOST_LOST had no successful call.
        """
        connection = await self.connection()
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await connection.call(name, arguments)
        except TimeoutError:
            # Calls that were made at once count once, and not at all if one was answered meanwhile: the server works.
            if began >= self._heard:
                self._heard = asyncio.get_running_loop().time()
                self._timeouts += 1
            if self._timeouts >= MOST_TIMEOUTS:
                self._lose(connection, f"{self._timeouts} calls in a row had no answer within {timeout_s:g} s")
            return failed("timeout")
        except ToolFailed as error:
            if connection.lost:
                self._lose(connection, str(error))
                return failed(f"the tool's server was lost and is started again: {error}")
            return failed(str(error) or "the tool failed")
        self._lost = self._timeouts = 0
        self._heard = asyncio.get_running_loop().time()
        return as_result(answer)

    async def connection(self) -> Connection:
        """Return a session that has begun; all who wait for one share it. Raises McpServerLost if there is none."""
        if self._connection is not None:
            if not self._connection.lost:
                return self._connection
            self._connection.close()  # it was lost while nobody called
            self._connection = None
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(), name=f"open {self._server.label}")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _open(self) -> Connection:
        """Begin a session, trying again a few times. Waits for a turn, since many starts at once are slow ones."""
        for left in reversed(range(OPENINGS)):
            async with self._turns:
                connection = self._connect(self._server)
                try:
                    await connection.opened()
                    return connection
                except McpServerLost:
                    if not left:
                        raise
            await asyncio.sleep(self._first_pause_s * 2 ** (OPENINGS - 1 - left))
        raise AssertionError("unreachable")

    def _opened(self, task: "asyncio.Task[Connection]") -> None:
        self._opening = None
        if not task.cancelled() and task.exception() is None:
            self._connection, self._timeouts = task.result(), 0
            if self._closed:
                self.close()

    def _lose(self, connection: Connection, reason: str) -> None:
        """Count the loss of a session once, however many calls it had. Raises McpServerLost for one too many."""
        if connection is not self._connection:
            return
        connection.close()
        self._connection = None
        self._lost += 1
        log.warning("%s: a session was lost (%d in a row): %s", self._server.label, self._lost, reason)
        if self._lost >= MOST_LOST:
            raise McpServerLost(
                f"{self._server.label}: its last {self._lost} sessions ended without a successful call: "
                f"{reason}{self._server.said()}"
            )

    def close(self) -> None:
        """End the session soon. Whoever still waits for one gets a CancelledError."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
