"""Requests for one prompt that are made at the same moment become one, which asks for several samples of it (``n``).

The samples of a group begin with the same prompt. Asked for together they cost one HTTP request, and the engine, which
gets them at once, computes the prompt once. Whoever asks notices nothing: each has its own answer, in parts, and may
leave before its end; the engine goes on for the others, and is told to stop when nobody is left.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from typing import TypeAlias

from rl_async.errors import EngineError, EngineLost, EngineRejected
from rl_async.rollout_server.api import GenerateRequest, GenerateResult


class Asked:
    """One of the requests, and the parts of its answer until they are fetched."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.begun = self.ended = False  # the first part is here; all are
        self.over = False  # all parts are here, or nobody waits for more
        self._parts: asyncio.Queue[GenerateResult | BaseException | None] = asyncio.Queue()

    def add(self, part: GenerateResult) -> None:
        """A part of the answer."""
        self.begun = True
        self._parts.put_nowait(part)

    def end(self, error: BaseException | None = None) -> None:
        """All parts are here, or ``error`` is why there are no more. Ignored when it is over already."""
        if not self.over:
            self.over = self.ended = True
            self._parts.put_nowait(error)

    async def parts(self) -> AsyncGenerator[GenerateResult, None]:
        """As they come. Raises what the request ended with."""
        while (part := await self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part


Group: TypeAlias = list[Asked]
Sample: TypeAlias = Callable[[Sequence[Asked]], Awaitable[None]]


class Together:
    """Collects requests for as long as the event loop runs what is ready, then has ``sample`` ask for them.

    ``sample`` gets at most ``most`` requests, which differ in their ids alone. It adds each answer's parts to its Asked
    and ends it, and may raise EngineLost or EngineRejected for those that have not ended.
    """

    def __init__(self, sample: Sample, most: int) -> None:
        self._sample, self._most = sample, most
        self._open: dict[Hashable, tuple[Group, asyncio.Task[None]]] = {}  # not asked for yet

    async def ask(self, request: GenerateRequest) -> AsyncGenerator[GenerateResult, None]:
        """The parts of its answer. Raises EngineLost or EngineRejected."""
        asked = Asked(request)
        group, task = self._join(asked)
        try:
            async for part in asked.parts():
                yield part
        finally:
            asked.over = True
            if all(other.over for other in group) and not all(other.ended for other in group):
                task.cancel()  # else it reads the answer to its end, so that the connection can be used again

    def _join(self, asked: Asked) -> tuple[Group, "asyncio.Task[None]"]:
        key = _prompt(asked.request)
        if key in self._open and len(self._open[key][0]) < self._most:
            self._open[key][0].append(asked)
            return self._open[key]
        group: Group = [asked]
        task = asyncio.create_task(self._run(key, group))  # it begins after all that is ready now
        self._open[key] = group, task
        task.add_done_callback(lambda done: _end(group, done))
        return group, task

    async def _run(self, key: Hashable, group: Group) -> None:
        if self._open[key][0] is group:
            del self._open[key]
        try:
            await self._sample(group)
        except EngineRejected:
            if len(group) == 1 or any(asked.begun for asked in group):
                raise
            waiting = [asked for asked in group if not asked.over]
            await asyncio.gather(*map(self._alone, waiting))  # perhaps the engine does not take so many at once

    async def _alone(self, asked: Asked) -> None:
        try:
            await self._sample([asked])
        except EngineError as error:
            asked.end(error)


def _prompt(request: GenerateRequest) -> Hashable:
    """The same for requests that differ in their ids alone. One with a seed of its own is like no other, nor is a
    greedy one, of which vLLM refuses to take several samples."""
    alone = request.request_id if request.seed is not None or request.sampling.greedy else ""
    tokens, stops = tuple(request.token_ids), tuple(request.stop_token_ids)
    return tokens, stops, request.sampling, request.max_tokens, request.min_version, alone


def _end(group: Group, task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    for asked in group:
        asked.end(error or EngineLost("the answer broke off"))
