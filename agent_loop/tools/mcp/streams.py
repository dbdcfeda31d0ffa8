"""What comes from a server, measured while it is read: over its standard streams, and over HTTP.

The SDK parses messages on the event loop, so one that is too large for that is refused before it is parsed. The caller
gets the refusal as an error, and the session goes on.
"""

import asyncio
import contextlib
import logging
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import IO

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

log = logging.getLogger("rl_async.agent_loop")

# A message may have so many bytes. Of a longer line so many are skipped before the session ends.
MOST_BYTES = 16 << 20
MOST_SKIPPED = 4 * MOST_BYTES
PIECE = 1 << 16
# The id of a refused line is looked for at both of its ends.
ID_BYTES = 1 << 10
# A server has so long to end by itself once its input is closed, and as long again after SIGTERM.
STOP_S = 2.0
_ID = re.compile(rb'"id"\s*:\s*(?:(\d{1,18})|"([^"\\]{1,100})")')
_GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError)

Incoming = SessionMessage | Exception


class TooLarge(httpx2.SSEError, httpx2.StreamError):
    """A message is larger than may be parsed. Both bases are those that the SDK makes an answer of."""


class Measure:
    """Counts the bytes and JSON values of a message, piece by piece. ``most``: how many values it may have."""

    def __init__(self, label: str, most: int) -> None:
        self._label, self._most = label, most
        self._bytes = self._values = 0
        self._quoted = self._escaped = False

    def add(self, piece: bytes) -> None:
        """Count a piece. Raises TooLarge, naming the server and the bound."""
        self._bytes += len(piece)
        if self._bytes > MOST_BYTES:
            raise TooLarge(f"{self._label} answered with more than {MOST_BYTES} bytes")
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        # Backslashes stand in strings alone, and each escapes one character.
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escaped = plain.endswith(b"\\")
        parts = plain.split(b'"')
        outside = b"".join(parts[self._quoted :: 2])
        self._quoted ^= len(parts) % 2 == 0
        # Each value but the first of a container follows a comma, each first one the container's bracket.
        self._values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        if self._values > self._most:
            raise TooLarge(f"{self._label} answered with more than {self._most} JSON values")

    def end_line(self) -> None:
        """Note the end of a line, which no string of JSON contains."""
        self._quoted = self._escaped = False


class BoundedBody(httpx2.AsyncByteStream):
    """The body of an answer over HTTP: one message, or server-sent events of a message each."""

    def __init__(self, response: httpx2.Response, new: Callable[[], Measure]) -> None:
        # Answers come from an AsyncClient.
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._body, self._new = response.stream, new
        self._events = response.headers.get("content-type", "").lower().startswith("text/event-stream")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        measure, blank = self._new(), False
        async for data in self._body:
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
        lambda: _Process(limit=PIECE, loop=loop),
        *argv,
        stderr=errors,
        env=env,
        start_new_session=True,
    )
    assert protocol.stdin is not None and protocol.stdout is not None  # they are pipes
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
        self._new, self._parts = new, list[bytes]()
        self._measure: Measure | None = None
        self._refusal: TooLarge | None = None
        self._skipped = 0
        self._answered = False

    def add(self, part: bytes) -> Incoming | None:
        """Add a part; return an error in the place of a message that has become too large.

        Raises TooLarge where too much of such a line was skipped.
        """
        self._parts.append(part)
        if self._refusal is None:
            # What a message may have depends on when it begins, not on when the one before it ended.
            self._measure = self._measure or self._new()
            try:
                self._measure.add(part)
            except TooLarge as error:
                self._refusal = error
                return self._answer(b"".join(self._parts)[:ID_BYTES].partition(b'"result"')[0])
        else:
            self._skipped += len(part)
            self._parts = [b"".join(self._parts)[-ID_BYTES:]]
            if self._skipped > MOST_SKIPPED:
                raise self._refusal
        return None

    def end(self) -> Incoming | None:
        """Return the message or an error in its place; None if ``add`` returned one. Raises TooLarge without an id."""
        data = b"".join(self._parts)
        if self._refusal is None:
            try:
                return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))
            except ValueError as error:
                return error
        if self._answered:
            return None
        if (answer := self._answer(data[-ID_BYTES:])) is None:
            raise self._refusal
        return answer

    def _answer(self, part: bytes) -> Incoming | None:
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
            except OSError:  # a server may close its input and live on, but it will answer nothing
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
