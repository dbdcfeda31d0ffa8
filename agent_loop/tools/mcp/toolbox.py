"""All servers of a config, in one worker: asked for their tools at its start, closed at its end."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rl_async.agent_loop.tools.mcp.descriptions import Listed, Offer, chosen, offers
from rl_async.agent_loop.tools.mcp.servers import McpServer
from rl_async.agent_loop.tools.mcp.sessions import FIRST_PAUSE_S, OPENINGS, Connect, Connection, McpSessions
from rl_async.agent_loop.tools.tool import CallableTool, ToolResult
from rl_async.concurrency import gather_or_cancel, to_the_end
from rl_async.errors import McpServerLost

STARTS_AT_ONCE = 8  # sessions of one server that begin together


class McpTool:
    """A tool of a server, with the sessions of one episode or of the worker."""

    def __init__(self, offer: Offer, sessions: McpSessions) -> None:
        self.name: str = offer.schema["function"]["name"]
        self.schema = offer.schema
        self._at_server, self._sessions = offer.name, sessions

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the tool at its server, which checks the arguments. Raises McpServerLost."""
        return await self._sessions.call(self._at_server, arguments, timeout_s)


class McpToolbox:
    """The tools of all servers. ``taken``: names of other tools. For ``first_pause_s`` see ``McpSessions``.

    Entering raises McpServerLost for a server that cannot be started or asked, and ConfigError, naming the key, for
    tools that cannot be used.
    """

    def __init__(
        self,
        servers: Sequence[McpServer],
        connect: Connect,
        taken: Sequence[str] = (),
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._connect_to, self._taken, self._first_pause_s = connect, taken, first_pause_s
        self._connections = list[Connection]()
        self._servers = [(server, asyncio.Semaphore(STARTS_AT_ONCE)) for server in servers]
        self._shared = [self._sessions(server, turns) for server, turns in self._servers]
        self._offers: list[Offer] = []

    async def __aenter__(self) -> Self:
        try:
            found = await gather_or_cancel(*(self._listed(place) for place in range(len(self._servers))))
            named = [(s.key, s.config.name, tools) for (s, _), tools in zip(self._servers, found, strict=True)]
            self._offers = offers(named, self._taken)
        except BaseException:
            await self._close()
            raise
        for (server, _), sessions in zip(self._servers, self._shared, strict=True):
            if server.config.scope == "episode":
                sessions.close()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def offered(self) -> list[tuple[str, str]]:
        """The key of its server and the name of each tool."""
        return [(self._servers[offer.place][0].key, offer.schema["function"]["name"]) for offer in self._offers]

    @contextlib.contextmanager
    def episode(self) -> Iterator[Mapping[str, CallableTool]]:
        """Give an episode its tools by name, with sessions of its own where the scope is ``episode``.

        They begin with the first call and end, soon, with the block.
        """
        sessions = [
            self._sessions(server, turns) if server.config.scope == "episode" else shared
            for (server, turns), shared in zip(self._servers, self._shared, strict=True)
        ]
        try:
            tools = [McpTool(offer, sessions[offer.place]) for offer in self._offers]
            yield {tool.name: tool for tool in tools}
        finally:
            for own, shared in zip(sessions, self._shared, strict=True):
                if own is not shared:
                    own.close()

    async def _listed(self, place: int) -> list[Listed]:
        """Return a server's tools. If it is lost before it lists them, it gets another session, OPENINGS in all."""
        server, _ = self._servers[place]
        limit = server.config.start_timeout_s
        lost: McpServerLost | None = None
        for _ in range(OPENINGS):
            connection = await self._shared[place].connection()
            try:
                async with asyncio.timeout(limit):
                    return chosen(await connection.tools(), server.config.allow, server.key)
            except McpServerLost as error:
                lost = error
            except TimeoutError:
                raise McpServerLost(f"{server.label} listed no tools within {limit:g} s (start_timeout_s)") from None
        assert lost is not None  # OPENINGS are more than none
        raise lost

    def _sessions(self, server: McpServer, turns: asyncio.Semaphore) -> McpSessions:
        return McpSessions(server, self._connect, turns, self._first_pause_s)

    def _connect(self, server: McpServer) -> Connection:
        self._connections = [connection for connection in self._connections if not connection.ended]
        self._connections.append(self._connect_to(server))
        return self._connections[-1]

    async def _close(self) -> None:
        """End all sessions, those of episodes that were cut off, too, and wait for their servers' processes."""
        for sessions in self._shared:
            sessions.close()
        for connection in self._connections:
            connection.close()
        await to_the_end(*(connection.closed() for connection in self._connections))
