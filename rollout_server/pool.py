"""Many engines as one Generator: routing, version gate, probes, and replay of what an engine lost.

Answers come in parts; what an engine had sampled before it was lost is kept, and only the rest is asked for elsewhere,
or of the same machine when it comes back, until the request's deadline. A request is never with two engines at once:
the first to finish would favour short answers. ``routing.py`` chooses the engine.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

import msgspec

from rl_async.errors import EngineLost, EngineRejected, QueueLost
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.rollout_server.api import EngineLoad, GenerateRequest, GenerateResult
from rl_async.rollout_server.parts import NOTHING, continuation, join
from rl_async.rollout_server.routing import Member, Router

SET_ASIDE_S = 1.0
PROBE_EVERY_S = 2.0
PROBE_S = 5.0
SILENT_PROBES = 2  # so many in a row without an answer, and its requests go elsewhere
WATCH_S = 10.0

log = logging.getLogger("rl_async.pool")


class Engine(Protocol):
    """What the pool needs of an engine client. Methods raise EngineLost and EngineRejected."""

    def stream(self, request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]: ...
    async def load(self) -> EngineLoad: ...
    async def is_sleeping(self) -> bool: ...
    async def close(self) -> None: ...


class Directory(Protocol):
    """Where the registry of engines is kept."""

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList: ...


class _Progress:
    """A request: what was sampled for it so far, and when it is given up unless more comes."""

    def __init__(self, request: GenerateRequest, session: str, timeout_s: float) -> None:
        self.request, self.session, self._timeout_s = request, session, timeout_s
        self.done = NOTHING
        self.move_on()

    @property
    def unfinished(self) -> bool:
        """Whether more is to be sampled. Its engine may have been lost between the last token and the word that it was
        the last."""
        return self.done.finish_reason == "abort" and not (self._full or self._stopped)

    @property
    def rest(self) -> GenerateRequest:
        """The request for what is missing."""
        return continuation(self.request, self.done)

    @property
    def result(self) -> GenerateResult:
        """The whole answer."""
        if self.done.finish_reason != "abort":
            return self.done
        return msgspec.structs.replace(self.done, finish_reason="stop" if self._stopped else "length")

    @property
    def _full(self) -> bool:
        return len(self.done.token_ids) >= self.request.max_tokens

    @property
    def _stopped(self) -> bool:
        return self.done.token_ids[-1:] != [] and self.done.token_ids[-1] in self.request.stop_token_ids

    def take(self, part: GenerateResult) -> None:
        """More of the answer."""
        self.done = join(self.done, part)
        if part.token_ids:
            self.move_on()

    def move_on(self) -> None:
        """Something happened, or nothing could have: the deadline starts again."""
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def left_s(self) -> float:
        """Seconds to the deadline; never none at all."""
        return max(0.001, self._deadline - time.monotonic())

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._deadline


class _Place:
    """Of a request in the line, from where it is called when an engine has room and is new enough."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.called = asyncio.Event()


class EnginePool:
    """See the module. ``connect`` makes the client of a newly registered engine, which decodes ``most`` at once;
    ``timeout_s`` is how long a request may go without a new token while its engine is awake."""

    def __init__(self, connect: Callable[[EngineRecord], Engine], timeout_s: float, most: int) -> None:
        self._connect, self._timeout_s, self._most = connect, timeout_s, most
        self._members: dict[str, Member[Engine]] = {}
        self._router: Router[Engine] = Router()
        self._line: dict[_Place, None] = {}  # of requests that wait for an engine, in their order
        self._closing: set[asyncio.Task[None]] = set()
        self.replayed = 0

    def update(self, engines: EngineList) -> None:
        """Take over a registry: new engines join, missing ones leave, versions advance."""
        current = {record.engine_id: record for record in engines.engines}
        for engine_id in self._members.keys() - current.keys():
            member = self._members.pop(engine_id)
            member.lose()
            task = asyncio.ensure_future(member.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for engine_id, record in current.items():
            if engine_id in self._members:
                self._members[engine_id].record = record
            else:
                self._members[engine_id] = Member(record, self._connect(record), self._most)
        self._announce()

    async def watch(self, directory: Directory) -> None:
        """Follow the registry for ever, and the health of its engines.

        Consumes the queue's engine list and the engines' load; produces routes; waits for a change of the list, at most
        WATCH_S a time, and for the clock. Ends only by cancellation, or with ProtocolError in an ExceptionGroup.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(directory), name="engine registry")
            group.create_task(self._probe_all(), name="engine probes")

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample on engines that serve at least ``request.min_version``.

        What an engine had sampled when it was lost or gave the request up (abort) is kept. Raises EngineRejected at
        once, EngineLost when there was no new token within the deadline.
        """
        progress = _Progress(request, session, self._timeout_s)
        while progress.unfinished:
            member = await self._route(progress)
            try:
                with member.carrying(progress.rest):
                    await self._answer(member, progress)
            except (EngineLost, TimeoutError) as error:
                engine = member.engine_id
                log.warning(
                    "request %s: %s after %d tokens: %s",
                    request.request_id,
                    engine,
                    len(progress.done.token_ids),
                    error,
                )
                if progress.late:
                    raise EngineLost(f"no engine answered within {self._timeout_s:.0f} s: {error}") from error
                member.set_aside_until = time.monotonic() + SET_ASIDE_S
                self.replayed += 1
            finally:
                self._announce()  # there is room for another
        return progress.result

    async def close(self) -> None:
        """Close all clients."""
        for member in self._members.values():
            await member.client.close()
        await asyncio.gather(*self._closing)

    def _announce(self) -> None:
        """Wake those at the head of the line for whom there is room now, and no others: waking everybody for every
        request that ends would cost its square."""
        now = time.monotonic()
        room = {member: member.room for member in self._members.values() if member.room}
        for place in self._line:
            if not room:
                break
            member = next((member for member in room if member.serves(place.version, now)), None)
            if member is None:
                continue
            place.called.set()
            room[member] -= 1
            if not room[member]:
                del room[member]

    async def _follow(self, directory: Directory) -> None:
        """The registry's half of ``watch``."""
        revision = -1
        while True:
            try:
                engines = await directory.engines(revision, WATCH_S)
            except QueueLost as error:
                log.warning("the engine registry is out of reach, keeping the last one: %s", error)
                continue
            if engines.revision != revision:
                revision = engines.revision
                self.update(engines)

    async def _probe_all(self) -> None:
        """The engines' half of ``watch``."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            await asyncio.gather(*(self._probe(member) for member in list(self._members.values())))

    async def _probe(self, member: Member[Engine]) -> None:
        """Ask for its load. One that is silent for long loses its requests to others until it answers again."""
        try:
            async with asyncio.timeout(PROBE_S):
                member.observe(await member.client.load())
        except (EngineLost, EngineRejected, TimeoutError) as error:
            member.silent += 1
            if member.silent == SILENT_PROBES and not member.gone.is_set():
                log.warning("%s answers no probe: %s", member.engine_id, error or type(error).__name__)
                member.lose()
            return
        member.silent = 0
        if member.gone.is_set() and self._members.get(member.engine_id) is member:
            log.info("%s answers again", member.engine_id)
            member.gone = asyncio.Event()
            self._announce()

    async def _answer(self, member: Member[Engine], progress: _Progress) -> None:
        """Take the engine's answer. While it sleeps (the trainer has its device) the deadline moves on; a hung engine
        does not say that it sleeps. Raises EngineLost, EngineRejected or TimeoutError."""
        answer = asyncio.ensure_future(_read(member.client, progress))
        member.answers.add(answer)
        try:
            while True:
                await asyncio.wait((answer,), timeout=progress.left_s)
                if answer.cancelled():
                    raise EngineLost("it is gone")
                if answer.done():
                    return answer.result()
                if not progress.late:
                    continue  # a part came meanwhile
                if not await _sleeps(member.client):
                    raise TimeoutError(f"no token in {self._timeout_s:g} s")
                progress.move_on()
        finally:
            member.answers.discard(answer)
            answer.cancel()

    async def _route(self, progress: _Progress) -> Member[Engine]:
        place = _Place(progress.request.min_version)
        try:
            return await self._wait_in(place, progress)
        finally:
            self._line.pop(place, None)
            if place.called.is_set():
                self._announce()  # it leaves, or found room elsewhere: the next one has it

    async def _wait_in(self, place: _Place, progress: _Progress) -> Member[Engine]:
        version = place.version
        while True:
            members, now = self._members.values(), time.monotonic()
            member = self._router.choose(members, progress.rest, progress.session, now)
            if member is not None:
                return member
            self._line[place] = None
            if any(other.serves(version, now) for other in members):
                progress.move_on()  # it only waits for its turn
            elif progress.late:
                known = ", ".join(f"{m.record.engine_id} at {m.record.version}" for m in members)
                raise EngineLost(
                    f"no engine serves version {version} after {self._timeout_s:.0f} s (rollout.request_timeout_s); "
                    f"known: {known or 'none'}"
                )
            try:
                async with asyncio.timeout(min(progress.left_s, SET_ASIDE_S)):
                    await place.called.wait()
            except TimeoutError:
                continue  # an engine that was set aside may be back
            place.called.clear()


async def _read(engine: Engine, progress: _Progress) -> None:
    before = len(progress.done.token_ids)
    async with aclosing(engine.stream(progress.rest, session=progress.session)) as parts:
        async for part in parts:
            progress.take(part)
    if progress.unfinished and len(progress.done.token_ids) == before:
        raise EngineLost("it gave the request up without a token")


async def _sleeps(engine: Engine) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            return await engine.is_sleeping()
    except (EngineLost, EngineRejected, TimeoutError):
        return False
