"""One session with an MCP server, over its standard streams or over HTTP: the only module that imports the SDK.

The SDK parses messages on the event loop, so bytes are measured while they are read, and a message that is too large
is refused before it is parsed. The caller gets the refusal as an error, and the session goes on.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import anyio
import httpx2
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    ErrorData,
    Implementation,
    JSONRPCError,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from rl_async.agent_loop.tools.mcp_toolbox import Listed, McpServer, ToolFailed
from rl_async.concurrency import time_limit
from rl_async.errors import ConfigError, McpServerLost
from rl_async.files import PIECE, JsonValues
from rl_async.process import guard
from rl_async.process.run_files import kill_marked

log = logging.getLogger("rl_async.agent_loop")

# A message may have so many bytes. Of a longer line so many are skipped before the session ends.
MOST_BYTES = 16 << 20
MOST_SKIPPED = 4 * MOST_BYTES
# The id of a refused line is looked for at both of its ends.
ID_BYTES = 1 << 10
# A server has so long to end by itself once its input is closed, and as long again after SIGTERM.
STOP_S = 2.0
_ID = re.compile(rb'"id"\s*:\s*(?:(\d{1,18})|"([^"\\]{1,100})")')
_GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError)

Incoming = SessionMessage | Exception


class TooLarge(httpx2.SSEError, httpx2.StreamError):
    """A message is larger than may be parsed, or goes on after its call. Both bases are those that the SDK makes an
    answer of."""


class Measure:
    """Counts the bytes and JSON values of a message, piece by piece. ``most``: how many values it may have."""

    def __init__(self, label: str, most: int) -> None:
        self._label, self._most = label, most
        self._bytes, self._values = 0, JsonValues()

    def add(self, piece: bytes) -> None:
        """Count a piece. Raises TooLarge, naming the server and the bound."""
        self._bytes += len(piece)
        if self._bytes > MOST_BYTES:
            raise TooLarge(f"{self._label} answered with more than {MOST_BYTES} bytes")
        self._values.add(piece)
        if self._values.count > self._most:
            raise TooLarge(f"{self._label} answered with more than {self._most} JSON values")

    def end_line(self) -> None:
        """Note the end of a line, which no string of JSON contains."""
        self._values.end_line()


class BoundedBody(httpx2.AsyncByteStream):
    """The body of an answer over HTTP: one message, or server-sent events of a message each."""

    def __init__(self, response: httpx2.Response, new: Callable[[], Measure]) -> None:
        # Answers come from an AsyncClient.
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._body, self._new = response.stream, new
        self._events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        # Whether nobody waits for the answer any more.
        self.abandoned = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        measure, blank = self._new(), False
        async for data in self._body:
            if self.abandoned:
                raise TooLarge("an answer to a call that was given up went on")
            for place in range(0, len(data), PIECE):
                piece = data[place : place + PIECE]
                if not self._events:
                    measure.add(piece)
                    continue
                for number, line in enumerate(piece.split(b"\n")):
                    if number:
                        measure = self._new() if blank else measure
                        measure.end_line()
                        blank = True
                    for place_in_line, part in enumerate(line.split(b"\r")):
                        if place_in_line:
                            measure.end_line()
                        if part:
                            blank = False
                            measure.add(part)
            yield data

    async def aclose(self) -> None:
        """Close the stream of the connection, which then takes the next request."""
        await self._body.aclose()


@contextlib.asynccontextmanager
async def server_process(
    argv: Sequence[str], env: Mapping[str, str], errors: IO[str], new: Callable[[], Measure]
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]]:
    """Start a server and hold its standard streams, a message a line; at the end of the block, end it."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: _Process(limit=PIECE, loop=loop), *argv, stderr=errors, env=env, start_new_session=True
    )
    assert protocol.stdin is not None and protocol.stdout is not None
    incoming, session_in = anyio.create_memory_object_stream[Incoming](0)
    session_out, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, protocol.stdout, incoming, new)
        tasks.start_soon(_write, protocol.stdin, outgoing, incoming)
        try:
            yield session_in, session_out
        finally:
            with anyio.CancelScope(shield=True):
                session_in.close()
                session_out.close()
                await _end(transport, protocol, protocol.stdin)
            tasks.cancel_scope.cancel()


async def _read(
    stdout: asyncio.StreamReader, incoming: MemoryObjectSendStream[Incoming], new: Callable[[], Measure]
) -> None:
    """Pass on the server's messages, and errors in the place of those that are too large. Waits for the server or for
    the session to take a message; ends with the server's output, or after a line without end. Once the session is over,
    it reads on, since a server that cannot write does not end."""
    line = _Line(new)
    async with incoming:
        while data := await stdout.read(PIECE):
            *ends, rest = data.split(b"\n")
            try:
                for part in ends:
                    if (message := line.add(part) or line.end()) is not None:
                        await incoming.send(message)
                    line = _Line(new)
                if rest and (message := line.add(rest)) is not None:
                    await incoming.send(message)
            except _GONE:
                break
            except TooLarge as error:
                log.warning("%s in a line without end or without an id, so its session ends", error)
                break
    while await stdout.read(PIECE):
        pass


class _Line:
    """A line that is being read. Of one that is too large only the ends are kept, to find the request's id."""

    def __init__(self, new: Callable[[], Measure]) -> None:
        self._new, self._data = new, bytearray()
        self._measure: Measure | None = None
        self._refusal: TooLarge | None = None
        self._skipped = 0
        self._answered = False

    def add(self, part: bytes) -> Incoming | None:
        """Add a part; return an error in the place of a message that has become too large.

        Raises TooLarge where too much of such a line was skipped.
        """
        self._data += part
        if self._refusal is None:
            # What a message may have depends on when it begins, not on when the one before it ended.
            self._measure = self._measure or self._new()
            try:
                self._measure.add(part)
            except TooLarge as error:
                self._refusal = error
                return self._answer(self._data[:ID_BYTES].partition(b'"result"')[0])
        else:
            self._skipped += len(part)
            del self._data[:-ID_BYTES]
            if self._skipped > MOST_SKIPPED:
                raise self._refusal
        return None

    def end(self) -> Incoming | None:
        """Return the message or an error in its place; None if ``add`` returned one. Raises TooLarge without an id."""
        if self._refusal is None:
            try:
                return SessionMessage(jsonrpc_message_adapter.validate_json(self._data, by_name=False))
            except ValueError as error:
                return error
        if self._answered:
            return None
        if (answer := self._answer(self._data[-ID_BYTES:])) is None:
            raise self._refusal
        return answer

    def _answer(self, part: bytearray) -> Incoming | None:
        """Return the refusal as an answer to the request whose id stands last in ``part``."""
        if not (found := list(_ID.finditer(part))):
            return None
        self._answered = True
        number, text = found[-1].groups()
        error = ErrorData(code=INTERNAL_ERROR, message=str(self._refusal))
        which = int(number) if number else text.decode(errors="replace")
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=which, error=error))


async def _write(
    stdin: asyncio.StreamWriter,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: MemoryObjectSendStream[Incoming],
) -> None:
    """Pass on our messages. Waits for the session's, or for the server to read; ends with either."""
    async with outgoing:
        async for message in outgoing:
            stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            try:
                await stdin.drain()
            # A server may close its input and live on, but it will answer nothing.
            except OSError:
                await incoming.aclose()
                return


class _Process(asyncio.subprocess.SubprocessStreamProtocol):
    """A server's standard streams, and its end.

    ``asyncio.subprocess.Process.wait`` would also wait for the end of its output, which a process that it left behind
    may hold open.
    """

    def __init__(self, *, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=limit, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


async def _end(transport: asyncio.SubprocessTransport, process: _Process, stdin: asyncio.StreamWriter) -> None:
    """Close a server's input, and end it in steps if that does not."""
    stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        with anyio.move_on_after(STOP_S):
            await process.exited.wait()
            break
        if number is not None:
            transport.send_signal(number)
    transport.close()


# This variable marks the processes of a server; its value differs in each session.
MARK = "RL_ASYNC_MCP_FOLDER"
# A server may list so many tools, before agent.mcp[].allow is applied.
MOST_LISTED = 1000
# A message may have so many JSON values, since each takes the SDK and its checks some 20 µs of the event loop. The
# limit is higher while tools are listed, before the first episode.
MOST_VALUES, MOST_VALUES_LISTED = 10_000, 200_000
# A command has 2 s to end by itself and 2 s more after SIGTERM.
CLOSE_S = 10.0
# A session is over after an answer with one of these HTTP statuses.
GONE = (401, 403, 404, 410)
WE = Implementation(name="rl-async", version="0")

# It logs every bad answer with a traceback, while the call that gets one returns it as its error.
logging.getLogger("mcp.client.streamable_http").setLevel(logging.CRITICAL)


class _Cancelled(msgspec.Struct, rename="camel", frozen=True):
    request_id: int | str = ""


class _Sent(msgspec.Struct):
    """What a message of ours is about: its id, its method if it is no answer, and the request that it cancels."""

    id: int | str = ""
    method: str = ""
    params: _Cancelled = _Cancelled()


class SdkConnection:
    """A `Connection` held open by a task of its own: the SDK's contexts must end in the task that entered them."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        # The guard makes this folder, and removes it.
        self._folder = Path(tempfile.gettempdir()) / f"rl-async-mcp-{os.urandom(8).hex()}"
        self._over = asyncio.Event()
        self._scope = anyio.CancelScope()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp {server.label}")
        # The HTTP status of a refusal that ended the session.
        self._status = 0
        self._logged_junk = False
        self._most_values = MOST_VALUES
        # Answers over HTTP, by the ids of their requests.
        self._bodies = weakref.WeakValueDictionary[int | str, BoundedBody]()
        # Calls that were cancelled before their answers began.
        self._given_up = set[int | str]()

    @property
    def lost(self) -> bool:
        return self._task.done() or self._over.is_set() or self._status != 0

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def opened(self) -> None:
        try:
            async with time_limit(self._server.config.start_timeout_s):
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
        try:
            answer = await self._client.result().call_tool(name, arguments)
        except MCPError as error:
            if self._ends(error):
                self.close()
            raise ToolFailed(error.message) from error
        except ValidationError as error:
            raise ToolFailed(f"bad answer: {_first(error)}") from error
        # The result does not fit the tool's own schema, or the server asked too many questions back.
        except RuntimeError as error:
            raise ToolFailed(str(error)) from error
        return answer.model_dump(by_alias=True, mode="json", exclude_none=True)

    def _ends(self, error: MCPError) -> bool:
        """Return whether the session is over with an error. An answer over HTTP that is refused for its size has the
        code of a lost connection, and the next call its own connection."""
        return error.code == CONNECTION_CLOSED and self._server.label not in error.message

    def close(self) -> None:
        self._over.set()
        if self._client.done():
            asyncio.get_running_loop().call_later(CLOSE_S, self._scope.cancel)
        else:
            # The SDK would swallow a plain cancellation of the task while the session begins.
            self._scope.cancel()

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
        # The SDK's task groups wrap the errors of a transport. Any of them means that this session is over.
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
            hooks: dict[str, list[Callable[..., Any]]] = {"request": [self._asked], "response": [self._answered]}
            # Calls have deadlines of their own.
            timeout = httpx2.Timeout(config.start_timeout_s, read=None)
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

    async def _asked(self, request: httpx2.Request) -> None:
        """Give up the answer to a call that was cancelled: the SDK tells the server, and reads its stream on."""
        if request.method == "POST":
            sent = msgspec.json.decode(request.content, type=_Sent)
            if (cancelled := sent.params.request_id) == "":
                return
            if (body := self._bodies.get(cancelled)) is not None:
                body.abandoned = True
            else:
                self._given_up.add(cancelled)

    async def _answered(self, response: httpx2.Response) -> None:
        """Notice answers that end a session: an expired one, say, or a proxy whose server is gone. Bound the others."""
        # An answer that is compressed against our wish is not decompressed, and fails as malformed JSON.
        response.headers.pop("content-encoding", None)
        response.encoding = "utf-8"
        response.stream = body = BoundedBody(response, self._measure)
        if response.request.method == "POST":
            sent = msgspec.json.decode(response.request.content, type=_Sent)
            # A notification has no id, and an answer that of a request of the server's.
            if sent.method and sent.id != "":
                self._bodies[sent.id] = body
                body.abandoned = sent.id in self._given_up
                self._given_up.discard(sent.id)
        over = response.status_code in GONE or response.status_code >= 500
        if over and self._client.done() and response.request.method == "POST":
            self._status = response.status_code

    async def _heard(self, message: object) -> None:
        if isinstance(message, Exception) and not self._logged_junk:
            self._logged_junk = True
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
