"""A sequence's samples as server-sent events, part by part while it runs.

Starlette's StreamingResponse opens a task group for each answer, which takes longer than anything else that the server
does for a short one.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import msgspec
from starlette.types import Receive, Scope, Send

from rl_async.rollout_server.embedded import dialect
from rl_async.rollout_server.embedded.sequence import Sequence

HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
END = b"data: [DONE]\n\n"

News: TypeAlias = "asyncio.Queue[Sequence | None]"  # an item: there may be more of the sequence; None: nobody listens


class SequenceStream:
    """An ASGI answer. ``abort`` is called with the sequence when the client hangs up before its end."""

    def __init__(self, sequence: Sequence, news: News, abort: Callable[[Sequence], object]) -> None:
        self._sequence, self._news, self._abort = sequence, news, abort

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the sequence is finished or the client is gone."""
        gone = asyncio.ensure_future(receive())  # after the request's body, the only message is the disconnect
        gone.add_done_callback(lambda _: self._news.put_nowait(None))
        sent = 0
        try:
            await send(HEAD)
            while await self._news.get() is not None:
                finished = self._sequence.finish_reason is not None
                count = len(self._sequence.logprobs)  # the engine's thread adds the log-probability after its token
                if count > sent or finished:
                    await send(self._message(sent, count, finished))
                    sent = count
                if finished:
                    return
        finally:
            gone.cancel()
            if self._sequence.finish_reason is None:
                self._abort(self._sequence)

    def _message(self, start: int, end: int, finished: bool) -> dict[str, object]:
        sequence = self._sequence
        part = dialect.choice(sequence, start) if finished else dialect.delta(sequence, start, end)
        body = b"data: " + msgspec.json.encode({"choices": [part]}) + b"\n\n"
        return {"type": "http.response.body", "body": body + END if finished else body, "more_body": not finished}
