"""Many engines as one Generator: routing, version gate, stickiness, replay of what an engine lost.

A conversation stays on its engine for the prefix cache, unless that engine is gone, too old, or has
``STICKY_SLACK`` more requests than the least loaded one. A request whose engine is lost is sent again elsewhere, or to
the same machine when it comes back, until its deadline; never to two engines at once, since the first to finish would
favour short answers.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rl_async.errors import EngineLost, EngineRejected, QueueLost
from rl_async.messages import EngineList, EngineRecord, Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult

STICKY_SLACK = 16
SET_ASIDE_S = 1.0
PROBE_S = 5.0
WATCH_S = 10.0
SESSIONS_REMEMBERED = 100_000

log = logging.getLogger("rl_async.pool")


class Engine(Protocol):
    """What the pool needs of an engine client."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult: ...
    async def health(self) -> bool: ...
    async def is_sleeping(self) -> bool: ...
    async def close(self) -> None: ...


class Directory(Protocol):
    """Where the registry of engines is kept."""

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList: ...


class _Member:
    """One engine with its client, its load as this pool sees it, and whether it is set aside after a failure."""

    def __init__(self, record: EngineRecord, client: Engine) -> None:
        self.record, self.client = record, client
        self.requests = 0
        self.set_aside_until = 0.0

    def serves(self, version: Version) -> bool:
        confirmed = self.record.version
        return confirmed is not None and confirmed >= version and time.monotonic() >= self.set_aside_until


@dataclass
class _Deadline:
    """Of one request, as monotonic seconds; it moves while the request's engine sleeps."""

    at: float

    @property
    def left(self) -> float:
        return max(0.001, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


class EnginePool:
    """See the module. ``connect`` makes the client of a newly registered engine."""

    def __init__(self, connect: Callable[[EngineRecord], Engine], timeout_s: float) -> None:
        self._connect, self._timeout_s = connect, timeout_s
        self._members: dict[str, _Member] = {}
        self._sessions: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self.replayed = 0

    def update(self, engines: EngineList) -> None:
        """Take over a registry: new engines join, missing ones leave, versions advance."""
        current = {record.engine_id: record for record in engines.engines}
        for engine_id in self._members.keys() - current.keys():
            gone = self._members.pop(engine_id)
            task = asyncio.ensure_future(gone.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for engine_id, record in current.items():
            if engine_id in self._members:
                self._members[engine_id].record = record
            else:
                self._members[engine_id] = _Member(record, self._connect(record))
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self, directory: Directory) -> None:
        """Follow the registry for ever.

        Consumes the queue's engine list; produces routes; waits for a change of the list, at most WATCH_S a time.
        Ends only by cancellation, or with ProtocolError.
        """
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

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample on some engine that serves at least ``request.min_version``.

        What an engine had sampled when it gave a request up (abort) is kept: the rest is asked for as a
        continuation. Raises EngineRejected at once, EngineLost when the deadline has passed.
        """
        deadline = _Deadline(time.monotonic() + self._timeout_s)
        done = GenerateResult(token_ids=[], logprobs=[], versions=[], finish_reason="abort")
        while done.finish_reason == "abort" and len(done.token_ids) < request.max_tokens:
            part = await self._once(_continuation(request, done), session, deadline)
            done = _join(done, part)
        return done

    async def close(self) -> None:
        """Close all clients."""
        for member in self._members.values():
            await member.client.close()
        await asyncio.gather(*self._closing)

    async def _once(self, request: GenerateRequest, session: str, deadline: _Deadline) -> GenerateResult:
        """One answer, from whichever engine gives one."""
        while True:
            member = await self._route(request.min_version, session, deadline)
            member.requests += 1
            try:
                return await self._answer(member, request, session, deadline)
            except (EngineLost, TimeoutError) as error:
                log.warning("request %s lost with %s: %s", request.request_id, member.record.engine_id, error)
                if deadline.passed:
                    raise EngineLost(f"no engine answered within {self._timeout_s:.0f} s: {error}") from error
            finally:
                member.requests -= 1
            member.set_aside_until = time.monotonic() + SET_ASIDE_S
            self.replayed += 1

    async def _answer(
        self, member: _Member, request: GenerateRequest, session: str, deadline: _Deadline
    ) -> GenerateResult:
        """The engine's answer. While it sleeps (the trainer has its device) the deadline moves on; a hung engine does
        not say that it sleeps. Raises EngineLost, EngineRejected or TimeoutError."""
        answer = asyncio.ensure_future(member.client.generate(request, session=session))
        try:
            while True:
                await asyncio.wait({answer}, timeout=deadline.left)
                if answer.done():
                    return answer.result()
                if not await _sleeps(member.client):
                    raise TimeoutError(f"no answer in {self._timeout_s:g} s")
                deadline.at = time.monotonic() + self._timeout_s
        finally:
            answer.cancel()

    async def _route(self, version: Version, session: str, deadline: _Deadline) -> _Member:
        while True:
            fit = [member for member in self._members.values() if member.serves(version)]
            if fit:
                return self._choose(fit, session)
            if deadline.passed:
                known = ", ".join(f"{m.record.engine_id} at {m.record.version}" for m in self._members.values())
                raise EngineLost(
                    f"no engine serves version {version} after {self._timeout_s:.0f} s (rollout.request_timeout_s); "
                    f"known: {known or 'none'}"
                )
            try:
                async with asyncio.timeout(min(deadline.left, SET_ASIDE_S)):
                    await self._changed.wait()
            except TimeoutError:
                continue  # an engine that was set aside may be back

    def _choose(self, fit: list[_Member], session: str) -> _Member:
        least = min(fit, key=lambda member: member.requests)
        sticky = self._members.get(self._sessions.get(session, ""))
        if sticky in fit and sticky is not None and sticky.requests <= least.requests + STICKY_SLACK:
            return sticky
        if len(self._sessions) >= SESSIONS_REMEMBERED:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[session] = least.record.engine_id
        return least


async def _sleeps(engine: Engine) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            return await engine.is_sleeping()
    except (EngineLost, EngineRejected, TimeoutError):
        return False


def _continuation(request: GenerateRequest, done: GenerateResult) -> GenerateRequest:
    if not done.token_ids:
        return request
    return GenerateRequest(
        request_id=f"{request.request_id}+{len(done.token_ids)}",
        token_ids=request.token_ids + done.token_ids,
        sampling=request.sampling,
        max_tokens=request.max_tokens - len(done.token_ids),
        stop_token_ids=request.stop_token_ids,
        seed=request.seed,
        min_version=request.min_version,
    )


def _join(first: GenerateResult, second: GenerateResult) -> GenerateResult:
    offset = len(first.token_ids)
    runs = list(first.versions)
    for run in second.versions:
        if runs and runs[-1].version == run.version:
            runs[-1] = VersionRun(run.version, runs[-1].start, run.end + offset)
        else:
            runs.append(VersionRun(run.version, run.start + offset, run.end + offset))
    return GenerateResult(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        versions=runs,
        finish_reason=second.finish_reason,
    )
