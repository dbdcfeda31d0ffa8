"""One session with an MCP server, over its standard streams or over HTTP: the only module that imports the SDK."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, Implementation
from pydantic import ValidationError

from rl_async.agent_loop.tools.mcp.descriptions import Listed
from rl_async.agent_loop.tools.mcp.servers import McpServer
from rl_async.agent_loop.tools.mcp.sessions import ToolFailed
from rl_async.agent_loop.tools.mcp.streams import MOST_BYTES, BoundedBody, Measure, server_process
from rl_async.errors import ConfigError, McpServerLost
from rl_async.process import guard
from rl_async.process.kernel import kill_marked

log = logging.getLogger("rl_async.agent_loop")

MARK = "RL_ASYNC_MCP_FOLDER"  # a variable of a server and of what it starts, of another value in each session
MOST_LISTED = 1000  # tools that a server may name, before agent.mcp[].allow
# A message may have so many JSON values, each of which takes the SDK and its checks some 20 µs of the event loop, and
# more while tools are listed, before the first episode.
MOST_VALUES, MOST_VALUES_LISTED = 10_000, 200_000
# A command has 2 s to end by itself and 2 s more after SIGTERM.
CLOSE_S = 10.0
GONE = (401, 403, 404, 410)  # HTTP statuses with which a session is over
WE = Implementation(name="rl-async", version="0")

# It logs every bad answer with a traceback, while the call that gets one returns it as its error.
logging.getLogger("mcp.client.streamable_http").setLevel(logging.CRITICAL)


class SdkConnection:
    """A session, held open by a task of its own, since the SDK's contexts end in the task in which they began."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._folder = Path(tempfile.gettempdir()) / f"rl-async-mcp-{os.urandom(8).hex()}"  # the guard's
        self._over = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp {server.label}")
        self._status = 0  # of the last refusal over HTTP that ends a session
        self._heard_junk = False
        self._most_values = MOST_VALUES

    @property
    def lost(self) -> bool:
        """Whether no call can succeed any more."""
        return self._task.done() or self._over.is_set() or self._status != 0

    @property
    def ended(self) -> bool:
        """Whether the session and the server's processes have ended."""
        return self._task.done()

    async def opened(self) -> None:
        """Wait until the session has begun. Raises McpServerLost if it does not."""
        try:
            async with asyncio.timeout(self._server.config.start_timeout_s):
                either: list[asyncio.Future[Any]] = [self._client, self._task]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self.close()
            limit = f"{self._server.config.start_timeout_s:g} s (start_timeout_s)"
            raise McpServerLost(f"{self._server.label} began no session within {limit}{self._server.said()}") from None
        except asyncio.CancelledError:
            self.close()
            raise
        if not self._client.done():
            raise McpServerLost(f"{self._server.label} {await self._task}{self._server.said()}")

    async def tools(self) -> list[Listed]:
        """Ask for the server's tools. Raises McpServerLost, or ConfigError for an answer that cannot be used."""
        self._most_values = MOST_VALUES_LISTED
        try:
            return await self._tools(self._client.result())
        finally:
            self._most_values = MOST_VALUES

    async def _tools(self, client: Client) -> list[Listed]:
        found, cursor = list[Listed](), None
        while True:
            try:
                page = await client.list_tools(cursor=cursor)
            except MCPError as error:
                if self.lost or self._ends(error):
                    self.close()
                    raise McpServerLost(f"{self._server.label} ended its session{self._server.said()}") from error
                raise ConfigError(f"{self._server.label} lists no tools: {error}") from error
            except ValidationError as error:
                raise ConfigError(f"{self._server.label} describes its tools wrongly: {_first(error)}") from error
            found += [Listed(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            if len(found) > MOST_LISTED:
                raise ConfigError(f"{self._server.label} lists more than {MOST_LISTED} tools")
            if not (cursor := page.next_cursor):
                return found

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool. Raises ToolFailed, after which ``lost`` tells whether the session is over."""
        try:
            answer = await self._client.result().call_tool(name, arguments)
        except MCPError as error:
            if self._ends(error):
                self.close()
            raise ToolFailed(error.message) from error
        except ValidationError as error:
            raise ToolFailed(f"bad answer: {_first(error)}") from error
        except RuntimeError as error:  # a result that is not of the tool's own schema; too many questions back
            raise ToolFailed(str(error)) from error
        return answer.model_dump(by_alias=True, mode="json", exclude_none=True)

    def _ends(self, error: MCPError) -> bool:
        """Return whether the session is over with an error. An answer over HTTP that is refused for its size has the
        code of a lost connection, and the next call its own connection."""
        return error.code == CONNECTION_CLOSED and self._server.label not in error.message

    def close(self) -> None:
        """End the session soon; ``closed`` waits for it."""
        self._over.set()
        if self._client.done():
            asyncio.get_running_loop().call_later(CLOSE_S, self._scope.cancel)
        else:
            self._scope.cancel()  # it is still beginning; the SDK swallows a plain cancellation of the task

    async def closed(self) -> None:
        """Wait for the end of the session and of the server's processes."""
        await asyncio.wait([self._task])

    async def _hold(self) -> str:
        """Hold the session until ``close``; return why it ended. Consumes and produces nothing; waits for ``close``,
        or for the transport to fail."""
        try:
            with self._scope:
                async with (
                    self._transport() as transport,
                    Client(transport, client_info=WE, message_handler=self._heard) as client,
                ):
                    self._client.set_result(client)
                    await self._over.wait()
            return "was closed"
        # The SDK's task groups wrap whatever a transport raises. All of it means that this session is over.
        except Exception as error:
            return f"cannot be used: {describe(error)}"
        finally:
            self._over.set()
            if not self._server.config.url:
                await asyncio.to_thread(self._sweep)

    def _sweep(self) -> None:
        """Do what the guard could not if it was killed, which the SDK does not tell."""
        kill_marked(MARK, str(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        config = self._server.config
        if config.url:
            hooks = {"response": [self._answered]}
            timeout = httpx2.Timeout(config.start_timeout_s, read=None)  # calls have deadlines of their own
            # A compressed answer cannot be measured.
            headers = self._server.headers | {"accept-encoding": "identity"}
            async with httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks) as http:
                yield streamable_http_client(config.url, http_client=http, max_sse_event_size=MOST_BYTES)
            return
        with self._server.log() as errors:
            yield server_process(*self._command(), errors, self._measure)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Return the guard's command line, with the server's in it, and its environment."""
        folder = str(self._folder)
        argv = [text.replace("{workspace}", folder) for text in self._server.argv]
        env = {name: text.replace("{workspace}", folder) for name, text in self._server.environment.items()}
        env[MARK] = folder
        return [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), folder, *argv], env

    def _measure(self) -> Measure:
        return Measure(self._server.label, self._most_values)

    async def _answered(self, response: httpx2.Response) -> None:
        """Notice answers that end a session: an expired one, say, or a proxy whose server is gone. Bound the others."""
        # An answer that is compressed against our wish is read as it is, which is no JSON.
        response.headers.pop("content-encoding", None)
        response.encoding = "utf-8"
        response.stream = BoundedBody(response, self._measure)
        over = response.status_code in GONE or response.status_code >= 500
        if over and self._client.done() and response.request.method == "POST":
            self._status = response.status_code

    async def _heard(self, message: object) -> None:
        if isinstance(message, Exception) and not self._heard_junk:
            self._heard_junk = True
            log.warning("%s wrote what is no message of the protocol (logged once per session)", self._server.label)
        await anyio.lowlevel.checkpoint()


def describe(error: BaseException) -> str:
    """Return the message of an error, or of the first in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
