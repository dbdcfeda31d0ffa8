"""A request's samples as server-sent events, part by part while they are being sampled.

Not Starlette's StreamingResponse, which opens a task group for each answer: for a short answer that would take longer
than all else that the server does.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import msgspec
from starlette.types import Receive, Scope, Send

from rl_async.rollout_server.embedded import dialect
from rl_async.rollout_server.embedded.sequence import Sequence

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
END = b"data: [DONE]\n\n"

SequenceEvents: TypeAlias = "asyncio.Queue[Sequence | None]"  # a sequence that may have grown; None: disconnected


class SequenceStream:
    """An ASGI response. ``abort`` is called with each sequence that is unfinished when the client disconnects.

    The head goes out with the first part: by itself it would wake the client, which cannot do anything with it.
    """

    def __init__(self, sequences: list[Sequence], events: SequenceEvents, abort: Callable[[Sequence], object]) -> None:
        self._events, self._abort = events, abort
        self._sent = dict.fromkeys(sequences, 0)  # tokens sent, of each sequence whose last part was not
        self._begun = False  # the head was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send parts until all sequences are finished or the client disconnects."""
        disconnect = asyncio.ensure_future(receive())  # after the request's body, the only message is the disconnect
        disconnect.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while self._sent:
                changed = {await self._events.get(): None}  # an ordered set
                while not self._events.empty():
                    changed[self._events.get_nowait()] = None
                if None in changed:
                    return
                if stuck := dialect.stuck(sequence for sequence in changed if sequence):
                    await self._send(send, {"error": {"message": stuck, "code": 400}}, more=False)
                    return
                if parts := [part for sequence in changed if sequence and (part := self._part(sequence))]:
                    await self._send(send, {"choices": parts}, more=bool(self._sent))
        finally:
            disconnect.cancel()
            for sequence in self._sent:
                if sequence.finish_reason is None:
                    self._abort(sequence)

    def _part(self, sequence: Sequence) -> dict[str, object] | None:
        """Build the entry for the tokens that were not sent yet; None if there are none."""
        start = self._sent.get(sequence)
        if start is None:
            return None
        finished = sequence.finish_reason is not None
        count = len(sequence.logprobs)  # the engine's thread appends the log-probability after its token
        if finished:
            del self._sent[sequence]
            return dialect.choice(sequence, start)
        self._sent[sequence] = count
        return dialect.delta(sequence, start, count) if count > start else None

    async def _send(self, send: Send, event: dict[str, object], *, more: bool) -> None:
        """Send an event, before the first one the head, and after the last one the mark of the end."""
        body = b"data: " + msgspec.json.encode(event) + (b"\n\n" if more else b"\n\n" + END)
        if not self._begun:
            self._begun = True
            length = [] if more else [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *length]})
        await send({"type": "http.response.body", "body": body, "more_body": more})
