"""Answers as server-sent events while they are sampled.

    engine ── tokens so far ──> release.py ── settled text ──> a dialect's events ──> EventStream ──> client

Only text that no further token changes is sent, so what a client has read is always the beginning of the answer that is
recorded. The headers are sent at once, and pings while nothing comes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rl_async.agent_loop.gateway.dialects.chat import Completion
from rl_async.agent_loop.gateway.refusals import FAILURES, refusal
from rl_async.agent_loop.gateway.release import Release
from rl_async.errors import RequestRefused

PING_S = 2.0  # some clients give up after a few seconds without a byte
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or proxies collect the events
]
Event = dict[str, Any]


class AnswerStream(Protocol):
    """The events of one answer in one dialect: ``begin``, ``more`` for each piece of text, then ``end`` or ``fail``.

    ``named``: whether the type of an event is its name, too. ``last``: what follows a whole answer.
    """

    @property
    def named(self) -> bool: ...
    @property
    def ping(self) -> bytes: ...
    @property
    def last(self) -> bytes: ...
    def begin(self) -> Iterator[Event]: ...
    def more(self, reasoning: str, text: str) -> Iterator[Event]: ...
    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]: ...
    def fail(self, error: RequestRefused) -> Iterator[Event]: ...


class EventStream(Response):
    """Sends an answer while ``work`` samples it. A client that hangs up cancels the work."""

    def __init__(
        self, stream: AnswerStream, release: Release, work: Callable[[], Awaitable[Completion]], ping_s: float
    ) -> None:
        super().__init__()
        self._stream, self._release, self._work, self._ping_s = stream, release, work, ping_s
        self._over = False  # the answer is complete, or nobody listens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answer is complete, has failed, or nobody listens any more."""
        working = asyncio.ensure_future(self._work())
        gone = asyncio.ensure_future(receive())  # after the body, the only message is the disconnect
        for task in (working, gone):
            task.add_done_callback(self._end)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await _send(send, self._encode(self._stream.begin()))
            while not self._over:
                await _send(send, await self._next())
            if working.done():
                await _send(send, self._last(working))
                await _send(send, b"", more=False)
        finally:
            working.cancel()
            gone.cancel()

    def _end(self, _: object) -> None:
        self._over = True
        self._release.news.set()

    async def _next(self) -> bytes:
        """Wait for events; return a ping if there are none for some time."""
        try:
            async with asyncio.timeout(self._ping_s):
                while True:
                    await self._release.news.wait()
                    self._release.news.clear()
                    events = self._encode(self._stream.more(*self._release.more()))
                    if events or self._over:
                        return events
        except TimeoutError:
            return self._stream.ping

    def _last(self, working: asyncio.Future[Completion]) -> bytes:
        try:
            done = working.result()
        except FAILURES as error:
            return self._encode(self._stream.fail(refusal(error)))
        return self._encode(self._stream.end(done, *self._release.rest(done.message))) + self._stream.last

    def _encode(self, events: Iterator[Event]) -> bytes:
        lines = bytearray()
        for event in events:
            if self._stream.named:
                lines += b"event: " + event["type"].encode() + b"\n"
            lines += b"data: " + msgspec.json.encode(event) + b"\n\n"
        return bytes(lines)


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})
