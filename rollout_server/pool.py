"""Many engines as one Generator: routing, version gate, probes, and replay of requests lost with an engine.

Answers arrive in parts. What an engine sampled before it was lost is kept; only the rest is requested from another
engine, or from the same one when it is back, until the request's deadline. A request is never sent to two engines at
once: taking the first to finish would favour short answers. ``routing.py`` chooses the engine.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Protocol

import msgspec

from rl_async.concurrency import gather_or_cancel, to_the_end
from rl_async.errors import EngineLost, EngineRejected, QueueLost, QueueReplaced
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.rollout_server.answers import EMPTY, continuation, join
from rl_async.rollout_server.api import EngineLoad, GenerateRequest, GenerateResult, Heard
from rl_async.rollout_server.routing import OpenMembers, PoolMember, Router, expire

# An engine that failed a request gets no other for BACKOFF_S, which is doubled for each one that it swallowed.
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
# A deadline that is looked at so late passed while this process itself was held up.
LATE_S = 1.0
PROBE_EVERY_S = 2.0
PROBES_AT_ONCE = 128  # of more engines, those that failed lately and then those whose last probe is longest ago
PROBE_S = 5.0
MAX_MISSED_PROBES = 2  # after so many in a row the engine's requests go elsewhere
WATCH_S = 10.0

log = logging.getLogger("rl_async.pool")


class StreamingClient(Protocol):
    """What the pool needs of an engine's client. Methods raise EngineLost and EngineRejected."""

    def stream(self, request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]: ...
    async def load(self) -> EngineLoad: ...
    async def is_sleeping(self) -> bool: ...
    async def close(self) -> None: ...


class RegistryReader(Protocol):
    """What the pool needs of the registry of engines, which the transfer queue keeps."""

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList: ...


class _Progress:
    """A request, what was sampled for it so far, and its deadline, which every new token extends."""

    def __init__(self, request: GenerateRequest, session: str, timeout_s: float, heard: Heard | None) -> None:
        self.request, self.session, self._timeout_s, self._heard = request, session, timeout_s, heard
        self.done = EMPTY
        self.engine = ""  # that was asked last
        # Engines that let the deadline pass.
        self._tried: set[str] = set()
        self.extend_deadline()

    @property
    def unfinished(self) -> bool:
        """Whether more is to be sampled. The tokens are examined too, since an engine may be lost after the last token
        and before it reported the finish reason."""
        return self.done.finish_reason == "abort" and not (self._full or self._stopped)

    @property
    def rest(self) -> GenerateRequest:
        """The request for the tokens that are still missing."""
        return continuation(self.request, self.done)

    @property
    def result(self) -> GenerateResult:
        """The joined parts, with the finish reason that the tokens imply if no engine reported one."""
        implied = "stop" if self._stopped else "length"
        reason = implied if self.done.finish_reason == "abort" else self.done.finish_reason
        return msgspec.structs.replace(self.done, finish_reason=reason, engine=self.engine)

    @property
    def _full(self) -> bool:
        return len(self.done.token_ids) >= self.request.max_tokens

    @property
    def _stopped(self) -> bool:
        return self.done.token_ids[-1:] != [] and self.done.token_ids[-1] in self.request.stop_token_ids

    def add(self, part: GenerateResult) -> None:
        """Append a part of the answer."""
        self.done = join(self.done, part)
        if part.token_ids:
            self.extend_deadline()
            if self._heard is not None:
                self._heard(self.done.token_ids)

    def moves_from(self, engine_id: str, members: "Mapping[str, PoolMember[StreamingClient]]", now: float) -> bool:
        """Start the timeout again if an engine serves that has not yet let it pass, as ``engine_id`` has now."""
        self._tried.add(engine_id)
        others = [member for name, member in members.items() if name not in self._tried]
        if not any(member.serves(self.request.min_version, now) for member in others):
            return False
        self.extend_deadline()
        return True

    def extend_deadline(self) -> None:
        """Start the timeout again: a token arrived, or none could have."""
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline, at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())

    @property
    def overdue_s(self) -> float:
        """How many seconds ago the deadline was; negative before it."""
        return time.monotonic() - self._deadline

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._deadline


class _Waiter:
    """A request that waits for an engine with room and with at least ``version``; ``called`` is set when there is
    one."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.called = asyncio.Event()


class EnginePool:
    """Sends each request to one of the registered engines, whatever happens to the others.

    ``connect`` makes the client of a newly registered engine, which decodes ``max_batch`` requests at once.
    ``timeout_s`` is how long a request may go without a new token while its engine is awake.
    """

    def __init__(self, connect: Callable[[EngineRecord], StreamingClient], timeout_s: float, max_batch: int) -> None:
        self._connect, self._timeout_s, self._max_batch = connect, timeout_s, max_batch
        self._members: dict[str, PoolMember[StreamingClient]] = {}
        self._open: OpenMembers[StreamingClient] = OpenMembers()
        self._router: Router[StreamingClient] = Router()
        self._waiters: dict[_Waiter, None] = {}  # an ordered set, first come first served
        self._closing: set[asyncio.Task[None]] = set()
        self.replayed = 0

    def update(self, engines: EngineList) -> None:
        """Adopt a registry: new engines join, missing ones leave, versions advance."""
        current = {record.engine_id: record for record in engines.engines}
        for engine_id in self._members.keys() - current.keys():
            member = self._members.pop(engine_id)
            member.mark_gone()
            self._open.remove(member)
            task = asyncio.ensure_future(member.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for engine_id, record in current.items():
            if engine_id in self._members:
                self._members[engine_id].adopt(record)
            else:
                self._members[engine_id] = PoolMember(record, self._connect(record), self._max_batch)
                self._open.refresh(self._members[engine_id])
        self._wake_waiters()

    async def watch(self, registry: RegistryReader) -> None:
        """Follow the registry, and the health of its engines, until cancelled.

        Consumes the queue's engine list and the engines' load; produces routes; waits for a change of the list, at most
        WATCH_S at a time, and for the clock. A ProtocolError ends it too, in an ExceptionGroup.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(registry), name="engine registry")
            group.create_task(self._probe_all(), name="engine probes")

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        """Sample on engines that serve at least ``request.min_version``, keeping the tokens of engines that were lost
        or gave the request up. ``heard`` gets the tokens as they come.

        A request that an engine swallowed goes to each other one that serves, with a deadline of its own. Raises
        EngineRejected at once, and EngineLost when no token arrived within the deadline.
        """
        progress = _Progress(request, session, self._timeout_s, heard)
        while progress.unfinished:
            member = await self._route(progress)
            progress.engine = member.engine_id
            try:
                began = time.monotonic()
                with member.in_flight(progress.rest):
                    self._refresh(member)
                    await self._read_answer(member, progress)
            except (EngineLost, TimeoutError) as error:
                log.log(
                    logging.DEBUG if member.is_withdrawn else logging.WARNING,
                    "request %s: %s was lost after %d tokens: %s",
                    request.request_id,
                    member.engine_id,
                    len(progress.done.token_ids),
                    error,
                )
                now = time.monotonic()
                member.backoff_until = now + BACKOFF_S
                if progress.expired:
                    member.swallowed += 1
                    member.backoff_until = now + min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** min(member.swallowed, 16))
                    if not progress.moves_from(member.engine_id, self._members, now):
                        raise EngineLost(
                            f"request {request.request_id}: no new token within {self._timeout_s:.0f} s "
                            f"(rollout.request_timeout_s): {error}"
                        ) from error
                self.replayed += 1
            else:
                member.swallowed = 0
                self._router.ended(member, time.monotonic() - began)
            finally:
                self._refresh(member)
                self._wake_waiters()
        return progress.result

    async def close(self) -> None:
        """Close the clients of all engines, those that have left included."""
        for member in self._members.values():
            await member.client.close()
        await to_the_end(*self._closing)

    def _wake_waiters(self) -> None:
        """Wake as many waiters, in their order, as there is room for. Waking all of them for every request that ends
        would cost the square of their number."""
        if not self._waiters:
            return
        now = time.monotonic()
        room = {member: member.room for member in self._open.members}
        unserved: set[Version] = set()
        for waiter in self._waiters:
            if not room:
                break
            if waiter.version in unserved:
                continue
            member = next((member for member in room if member.serves(waiter.version, now)), None)
            if member is None:
                unserved.add(waiter.version)
                continue
            waiter.called.set()
            room[member] -= 1
            if not room[member]:
                del room[member]

    async def _follow(self, registry: RegistryReader) -> None:
        """Keep the members equal to the registry; see ``watch``."""
        revision = -1
        while True:
            try:
                engines = await registry.engines(revision, WATCH_S)
            except QueueReplaced:
                raise
            except QueueLost as error:
                log.warning("cannot reach the engine registry, keeping the engines known so far: %s", error)
                await asyncio.sleep(BACKOFF_S)
                continue
            if engines.revision != revision:
                revision = engines.revision
                self.update(engines)

    async def _probe_all(self) -> None:
        """Probe members each PROBE_EVERY_S seconds, at most PROBES_AT_ONCE; see ``watch``.

        The pool of every worker does so: without a bound, workers times engines would be probed.
        """
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            now = time.monotonic()

            def urgency(member: PoolMember[StreamingClient], now: float = now) -> tuple[bool, float]:
                failed = member.backoff_until > now - PROBE_EVERY_S or 0 < member.missed_probes < MAX_MISSED_PROBES
                return not failed, member.probed_at

            due = heapq.nsmallest(PROBES_AT_ONCE, self._members.values(), key=urgency)
            await gather_or_cancel(*map(self._probe, due))

    async def _probe(self, member: PoolMember[StreamingClient]) -> None:
        """Read the engine's load. After MAX_MISSED_PROBES its requests go elsewhere until it answers again."""
        member.probed_at = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_S):
                member.observe(await member.client.load())
            self._refresh(member)
        except (EngineLost, EngineRejected, TimeoutError) as error:
            member.missed_probes += 1
            if member.missed_probes == MAX_MISSED_PROBES and not member.gone.is_set():
                reason = error or type(error).__name__
                log.warning("%s missed %d probes: %s", member.engine_id, MAX_MISSED_PROBES, reason)
                member.mark_gone()
            return
        member.missed_probes = 0
        if member.gone.is_set() and self._members.get(member.engine_id) is member:
            log.info("%s answers probes again", member.engine_id)
            member.gone = asyncio.Event()
            self._wake_waiters()

    def _refresh(self, member: PoolMember[StreamingClient]) -> None:
        """Note whether the engine has room, unless it has left."""
        if self._members.get(member.engine_id) is member:
            self._open.refresh(member)

    async def _read_answer(self, member: PoolMember[StreamingClient], progress: _Progress) -> None:
        """Read the engine's answer. While the engine sleeps (the trainer has its device) the deadline is extended; a
        hung engine does not report that it sleeps.

        Raises EngineLost, EngineRejected, or TimeoutError after the deadline.
        """
        gone = member.gone
        try:
            async with asyncio.timeout(None) as read:
                deadline = _Deadline(read, member.client, progress)
                member.reads.add(read)
                try:
                    await _read(member, progress)
                finally:
                    member.reads.discard(read)
                    deadline.cancel()
        except TimeoutError:
            if not read.expired():
                raise
            if gone.is_set():
                raise EngineLost("the engine left the registry, was withdrawn or does not answer probes") from None
            raise TimeoutError(f"no token in {self._timeout_s:g} s") from None

    async def _route(self, progress: _Progress) -> PoolMember[StreamingClient]:
        waiter = _Waiter(progress.request.min_version)
        try:
            return await self._wait_for_room(waiter, progress)
        finally:
            self._waiters.pop(waiter, None)
            if waiter.called.is_set():
                self._wake_waiters()  # it leaves, or found room elsewhere: the next one may have its room

    async def _wait_for_room(self, waiter: _Waiter, progress: _Progress) -> PoolMember[StreamingClient]:
        version, began = waiter.version, time.monotonic()
        while True:
            members, now = self._members.values(), time.monotonic()
            member = self._router.choose(self._open.members, progress.rest, progress.session, now, members, now - began)
            if member is not None:
                return member
            self._waiters[waiter] = None
            if any(other.serves(version, now) for other in members):
                progress.extend_deadline()  # engines are there and busy
            elif progress.expired:
                known = ", ".join(f"{m.record.engine_id} at {m.record.version}" for m in members)
                raise EngineLost(
                    f"no engine serves version {version} after {self._timeout_s:.0f} s (rollout.request_timeout_s); "
                    f"known: {known or 'none'}"
                )
            try:
                async with asyncio.timeout(min(progress.remaining_s, BACKOFF_S)):
                    await waiter.called.wait()
            except TimeoutError:
                continue  # the back-off of an engine may be over
            waiter.called.clear()


class _Deadline:
    """Expires a ``read`` that has got no token until its deadline, unless the engine sleeps. Not a task for each read:
    answers are short, and every task in the way of one is a turn of the event loop in which other requests go first."""

    def __init__(self, read: asyncio.Timeout, client: StreamingClient, progress: _Progress) -> None:
        self._read, self._client, self._progress = read, client, progress
        self._asking: asyncio.Task[None] | None = None
        self._wait()

    def cancel(self) -> None:
        """Let the read be: it is over."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._progress.remaining_s, self._check)

    def _check(self) -> None:
        if self._progress.overdue_s > LATE_S:
            # What the engine sent meanwhile is read first.
            self._progress.extend_deadline()
            self._wait()
        elif self._progress.expired:
            self._asking = asyncio.ensure_future(self._ask())
        else:
            self._wait()  # a part arrived meanwhile

    async def _ask(self) -> None:
        if await _sleeps(self._client):
            self._progress.extend_deadline()
            self._wait()
        else:
            expire(self._read)


async def _read(member: PoolMember[StreamingClient], progress: _Progress) -> None:
    before, heard_at = len(progress.done.token_ids), time.monotonic()
    async with aclosing(member.client.stream(progress.rest, session=progress.session)) as parts:
        async for part in parts:
            progress.add(part)
            if part.token_ids:
                now = time.monotonic()
                member.pace.hear(len(part.token_ids), now - heard_at, now)
                heard_at = now
    if progress.unfinished and len(progress.done.token_ids) == before:
        raise EngineLost("the engine gave the request up before its first token")


async def _sleeps(client: StreamingClient) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            return await client.is_sleeping()
    except (EngineLost, EngineRejected, TimeoutError):
        return False
