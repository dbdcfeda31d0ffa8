"""A request's samples as server-sent events, part by part while they run.

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
    """An ASGI answer. ``abort`` is called with each sequence that has not ended when the client hangs up."""

    def __init__(self, sequences: list[Sequence], news: News, abort: Callable[[Sequence], object]) -> None:
        self._news, self._abort = news, abort
        self._sent = dict.fromkeys(sequences, 0)  # tokens of each whose end was not sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the sequences are finished or the client is gone."""
        gone = asyncio.ensure_future(receive())  # after the request's body, the only message is the disconnect
        gone.add_done_callback(lambda _: self._news.put_nowait(None))
        try:
            await send(HEAD)
            while self._sent:
                changed = {await self._news.get(): None}  # in this order, each once
                while not self._news.empty():
                    changed[self._news.get_nowait()] = None
                if None in changed:
                    return
                if parts := [part for sequence in changed if sequence and (part := self._part(sequence))]:
                    await send(self._message(parts))
        finally:
            gone.cancel()
            for sequence in self._sent:
                if sequence.finish_reason is None:
                    self._abort(sequence)

    def _part(self, sequence: Sequence) -> dict[str, object] | None:
        """What is new of it; None if nothing is."""
        start = self._sent.get(sequence)
        if start is None:
            return None
        finished = sequence.finish_reason is not None
        count = len(sequence.logprobs)  # the engine's thread adds the log-probability after its token
        if finished:
            del self._sent[sequence]
            return dialect.choice(sequence, start)
        self._sent[sequence] = count
        return dialect.delta(sequence, start, count) if count > start else None

    def _message(self, parts: list[dict[str, object]]) -> dict[str, object]:
        body = b"data: " + msgspec.json.encode({"choices": parts}) + b"\n\n"
        return {"type": "http.response.body", "body": body if self._sent else body + END, "more_body": bool(self._sent)}
