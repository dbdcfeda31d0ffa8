"""Coalesces requests for one prompt that are made at the same moment into one request for several samples (``n``).

The samples of a group begin with the same prompt. As one request they cost one HTTP round trip, and the engine, which
gets them together, computes the prompt once. Callers see no difference: each gets its own answer, in parts, and may
leave before its end; the engine continues for the others, and is told to stop when all have left.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from typing import TypeAlias

from rl_async.concurrency import to_the_end
from rl_async.errors import EngineError, EngineLost, EngineRejected, SchemaRejected
from rl_async.rollout_server.api import GenerateRequest, GenerateResult


class PendingRequest:
    """One of the coalesced requests, with the parts of its answer that its caller has not read yet."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.begun = self.ended = False  # the first part has arrived; all have
        self.over = False  # all parts have arrived, or the caller has left
        self._parts: asyncio.Queue[GenerateResult | BaseException | None] = asyncio.Queue()

    def add(self, part: GenerateResult) -> None:
        """Append a part of the answer."""
        self.begun = True
        self._parts.put_nowait(part)

    def end(self, error: BaseException | None = None) -> None:
        """End the answer, with ``error`` if it is incomplete. Does nothing when it is over already."""
        if not self.over:
            self.over = self.ended = True
            self._parts.put_nowait(error)

    async def parts(self) -> AsyncGenerator[GenerateResult, None]:
        """Yield the parts as they arrive. Raises the error that the answer ended with."""
        while (part := await self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part


Group: TypeAlias = list[PendingRequest]
SendGroup: TypeAlias = Callable[[Sequence[PendingRequest]], Awaitable[None]]


class Coalescer:
    """Collects requests until the event loop has run everything that was ready, then passes them to ``send``.

    ``send`` gets at most ``max_size`` requests, which differ only in their ids. It adds the parts of each answer to its
    PendingRequest and ends it, and may raise EngineLost or EngineRejected for those that have not ended.
    """

    def __init__(self, send: SendGroup, max_size: int) -> None:
        self._send, self._max_size = send, max_size
        self._unsent: dict[Hashable, tuple[Group, asyncio.Task[None]]] = {}

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateResult, None]:
        """Yield the parts of the answer to ``request``. Raises EngineLost or EngineRejected."""
        pending = PendingRequest(request)
        group, task = self._join(pending)
        try:
            async for part in pending.parts():
                yield part
        finally:
            pending.over = True
            if all(other.over for other in group) and not all(other.ended for other in group):
                task.cancel()  # else it reads the answer to its end, so that the connection can be used again

    def _join(self, pending: PendingRequest) -> tuple[Group, "asyncio.Task[None]"]:
        key = _coalescing_key(pending.request)
        if key in self._unsent and len(self._unsent[key][0]) < self._max_size:
            self._unsent[key][0].append(pending)
            return self._unsent[key]
        group: Group = [pending]
        task = asyncio.create_task(self._run(key, group))  # starts after everything that is ready now
        self._unsent[key] = group, task
        task.add_done_callback(lambda done: _end(group, done))
        return group, task

    async def _run(self, key: Hashable, group: Group) -> None:
        if self._unsent[key][0] is group:
            del self._unsent[key]
        try:
            await self._send(group)
        except EngineRejected as error:
            if isinstance(error, SchemaRejected) or len(group) == 1 or any(pending.begun for pending in group):
                raise
            waiting = [pending for pending in group if not pending.over]
            # The engine may not accept so many at once.
            await to_the_end(*map(self._send_separately, waiting))

    async def _send_separately(self, pending: PendingRequest) -> None:
        try:
            await self._send([pending])
        except EngineError as error:
            pending.end(error)


def _coalescing_key(request: GenerateRequest) -> Hashable:
    """Return a key that is equal for requests that may be coalesced: those that differ only in their ids.

    A request with its own seed is never coalesced, nor is a greedy one, of which vLLM refuses several samples, or one
    of an episode with a trace, since a request can name only one span.
    """
    unique = request.request_id if request.seed is not None or request.sampling.greedy else ""
    tokens, stops = tuple(request.token_ids), tuple(request.stop_token_ids)
    limits = request.max_tokens, request.min_version, request.routed_from
    return tokens, stops, request.sampling, limits, request.json_schema, request.traceparent, unique


def _end(group: Group, task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    for pending in group:
        pending.end(error or EngineLost("the answer broke off"))
