"""Many engines as one Generator: routing, version gate, probes, and replay of requests lost with an engine.

Answers arrive in parts. Tokens sampled before an engine was lost are kept; only the rest is requested from another
engine, or from the same one when it is back, until the request's deadline. A request is never sent to two engines at
once, since taking the first to finish would favour short answers.

A request goes to the engine where it costs the least work, counted in tokens:

    cost = tokens queued or running there / share of its KV cache that is free
         + the request's own prompt, unless the conversation's last request ran there and its prefix is cached

A conversation therefore stays where its prefix is cached while that saves more than waiting behind others costs, and
leaves an engine whose cache is nearly full and which would soon preempt. With more than CANDIDATES engines, the choice
is among that many random ones and the conversation's last engine. Its cost then does not grow with the number of
engines, and the pools of many workers, which see the same slightly outdated loads, do not all choose the same engine.
A batch is complete when its slowest answer is, so an engine whose pace is SLOW times that of the fastest only gets
single requests to be measured again, or requests that would wait even longer for room elsewhere.

``connect``, at the end, makes the client of each kind of engine, and ``engine_pool`` the pool of a run.
"""

import asyncio
import heapq
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Generic, Protocol, TypeVar, get_args

import msgspec

from rl_async.concurrency import gather_or_cancel, time_limit, to_the_end
from rl_async.configs.engines import EngineKind
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.errors import EngineError, EngineLost, EngineRejected, ProtocolError, QueueLost, QueueReplaced
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.rollout_server.api import (
    EMPTY,
    EngineLoad,
    GenerateRequest,
    GenerateResult,
    Heard,
    ReadVersion,
    continuation,
    join,
)
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine

# Above this cache usage, preemptions are attributed to a full cache. A weight update also preempts, but only once.
FULL = 0.9
# The factors that adapt a member's limit.
SHRINK, GROW = 0.75, 1.05
MIN_LIMIT = 4
SESSIONS_REMEMBERED = 100_000
CANDIDATES = 32
SLOW = 2.0
# No engine counts as faster than this many seconds per token.
FASTEST_S = 0.001
# An engine's pace is known after this many tokens; older observations lose half their weight with each HALF_LIFE_S.
EVIDENCE, HALF_LIFE_S = 16, 5.0
# A wait for tokens counts for at most this long, or LONGEST_GAP times the usual, since engines pause for new weights.
LONGEST_GAP_S, LONGEST_GAP = 1.0, 10.0
# A slow engine is measured again after this long, and after this many times the length of its last request.
TRY_AGAIN_S, TRY_AGAIN = 20.0, 20.0
# The fastest of many engines is determined this often.
FASTEST_EVERY_S = 1.0
# The weight of the newest request in the moving average of their lengths.
NEWEST = 0.1
# An engine that failed a request gets no other for BACKOFF_S, doubled for each request that it let run out of time.
BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
# If a deadline is checked this late, this process itself was held up.
LATE_S = 1.0
PROBE_EVERY_S = 2.0
# With more engines, those that failed recently are probed first, and then those probed longest ago.
PROBES_AT_ONCE = 128
PROBE_S = 5.0
# After this many missed probes in a row, an engine's requests go elsewhere.
MAX_MISSED_PROBES = 2
WATCH_S = 10.0

log = logging.getLogger("rl_async.pool")

C = TypeVar("C")

# --- choosing an engine


class Pace:
    """The time of an engine for a token of one answer: a mean over all answers, weighted towards newer ones.

    It does not measure throughput, since an engine with little to do is not slow.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self.heard_at = -math.inf

    @property
    def seconds(self) -> float | None:
        """Seconds per token; None until EVIDENCE tokens have arrived."""
        return self._seconds / self._tokens if self._tokens >= EVIDENCE else None

    def hear(self, tokens: int, seconds: float, now: float) -> None:
        """Record that ``tokens`` tokens of one answer came ``seconds`` after the previous ones."""
        usual = tokens * (self.seconds or 0.0)
        kept = 0.5 ** ((now - self.heard_at) / HALF_LIFE_S)
        # Old observations weigh little, but still EVIDENCE tokens until newer ones replace them.
        kept = max(kept, min(1.0, EVIDENCE / max(1.0, self._tokens)))
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + min(seconds, max(LONGEST_GAP_S, LONGEST_GAP * usual))
        self.heard_at = now

    def slowness(self, fastest: float | None) -> float:
        """Return this engine's time per token relative to the fastest engine, or 1 if that is unknown."""
        if fastest is None or self.seconds is None:
            return 1.0
        return max(1.0, self.seconds / max(fastest, FASTEST_S))


class PoolMember(Generic[C]):
    """One engine of the pool: its client, its load, and the number of requests that it may hold at once.

    The engine decodes ``max_batch`` requests at once. More would only wait there, unable to move to another engine, so
    ``limit`` starts a quarter above it, just enough to refill slots immediately. It shrinks while the engine preempts
    because its cache is full, and grows back when it does not.
    """

    def __init__(self, record: EngineRecord, client: C, max_batch: int) -> None:
        self.record, self.client = record, client
        # This pool's requests in flight, and an upper bound for their tokens.
        self.requests = self.tokens = 0
        self.limit = self._max_limit = float(max(MIN_LIMIT, math.ceil(1.25 * max_batch)))
        self.backoff_until = 0.0
        # Consecutive requests that the engine let run out of time.
        self.swallowed = 0
        # Consecutive missed probes, and the time of the latest probe.
        self.missed_probes = 0
        self.probed_at = 0.0
        # Set when the engine has left the registry or does not answer probes.
        self.gone = asyncio.Event()
        self.pace = Pace()
        # The seconds of its latest request.
        self.took_s = 0.0
        # The reads of its answers, which expire at once when it is gone.
        self.reads: set[asyncio.Timeout] = set()
        self._load: EngineLoad | None = None
        # Whether the last probe showed preemptions with a full cache.
        self._pressed = False

    @property
    def engine_id(self) -> str:
        return self.record.engine_id

    def adopt(self, record: EngineRecord) -> None:
        """Adopt the engine's new entry in the registry. The requests of a withdrawn engine move elsewhere."""
        withdrawn = self.record.version is not None and record.version is None
        returned = self.record.version is None and record.version is not None
        self.record = record
        if withdrawn:
            self.mark_gone()
        elif returned:
            self.gone, self.backoff_until, self.missed_probes = asyncio.Event(), 0.0, 0

    def serves(self, version: Version, now: float) -> bool:
        """Return whether the engine is up, not backing off, and has confirmed at least this version."""
        confirmed = self.record.version
        return confirmed is not None and confirmed >= version and now >= self.backoff_until and not self.gone.is_set()

    @property
    def room(self) -> int:
        """The number of further requests that it may take."""
        return max(0, math.ceil(self.limit - self.requests))

    def is_slow(self, fastest: float | None, now: float) -> bool:
        """Whether requests should go elsewhere, since it is slow and not yet due to be measured again."""
        due = not self.requests and now - self.pace.heard_at >= max(TRY_AGAIN_S, TRY_AGAIN * self.took_s)
        return not due and self.pace.slowness(fastest) >= SLOW

    def mark_gone(self) -> None:
        """Stop routing to the engine, and end the reads of its answers so that their requests move elsewhere."""
        self.gone.set()
        for read in self.reads:
            expire(read)

    def backlog(self, request: GenerateRequest) -> float:
        """Return the tokens ahead of a new request, including other clients', divided by the free share of the cache.

        Only the number of other clients' requests is known. Each is assumed to be as long as the average of this pool's
        requests there or, without any, as ``request``.
        """
        if self._load is None:
            return float(self.tokens)
        others = max(0, self._load.requests - self.requests)
        each = self.tokens / self.requests if self.requests else _max_tokens(request)
        return (self.tokens + others * each) / (1.0 - min(self._load.cache_usage, 0.95))

    def observe(self, load: EngineLoad) -> None:
        """Record a probe's result and adapt the limit, which shrinks when two probes in a row show preemptions with a
        full cache."""
        before, self._load = self._load, load
        pressed = before is not None and load.cache_usage >= FULL and _more_preempted(before, load)
        twice, self._pressed = pressed and self._pressed, pressed
        if twice:
            self.limit = max(float(MIN_LIMIT), self.limit * SHRINK)
        elif self.requests >= self.limit - 1:
            self.limit = min(self._max_limit, self.limit * GROW)

    @contextmanager
    def in_flight(self, request: GenerateRequest) -> Iterator[None]:
        """Count the request against the engine's room while the block runs."""
        tokens = _max_tokens(request)
        self.requests, self.tokens = self.requests + 1, self.tokens + tokens
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - 1, self.tokens - tokens


class OpenMembers(Generic[C]):
    """The engines with room, updated as requests begin and end, so that no choice has to search all engines."""

    def __init__(self) -> None:
        # Unordered, so that a removal is quick.
        self.members: list[PoolMember[C]] = []
        self._at: dict[PoolMember[C], int] = {}

    def refresh(self, member: PoolMember[C]) -> None:
        """Add or remove the engine, depending on whether it has room now."""
        if not member.room:
            self.remove(member)
        elif member not in self._at:
            self._at[member] = len(self.members)
            self.members.append(member)

    def remove(self, member: PoolMember[C]) -> None:
        at = self._at.pop(member, None)
        if at is None:
            return
        last = self.members.pop()
        if last is not member:
            self.members[at], self._at[last] = last, at


class Router(Generic[C]):
    """Chooses engines, and remembers the last engine of each conversation."""

    def __init__(self) -> None:
        # The last engine by session, least recently used first. Finding a plain dict's first key would scan all deleted
        # ones.
        self._last: OrderedDict[str, PoolMember[C]] = OrderedDict()
        self._random = random.Random()
        # The usual length of a request in seconds, on engines that are not slow.
        self._usual_s = 0.0
        # The pace of the fastest engine at the last request, and those by version, which are cached for a while.
        self._fastest: float | None = None
        self._paces: dict[Version, float | None] = {}
        self._paces_until = -math.inf

    def choose(
        self,
        members: Sequence[PoolMember[C]],
        request: GenerateRequest,
        session: str,
        now: float,
        everyone: Collection[PoolMember[C]] = (),
        waited_s: float = math.inf,
    ) -> PoolMember[C] | None:
        """Return the cheapest candidate among ``members`` that serves the request's version and has room.

        Return None if all of them are unfit, or if only slow ones are left and a request that has waited for
        ``waited_s`` would end sooner on one of ``everyone``.
        """
        last = self._last.get(session)

        def fit(some: Sequence[PoolMember[C]]) -> list[PoolMember[C]]:
            return [member for member in some if member.room and member.serves(request.min_version, now)]

        def cost(member: PoolMember[C]) -> tuple[float, int]:
            prompt = 0 if member is last else len(request.token_ids)
            return member.backlog(request) + prompt, member.requests

        found: list[PoolMember[C]] = []
        if len(members) > CANDIDATES:
            found = fit(self._random.sample(members, CANDIDATES)) + fit([] if last is None else [last])
        found = found or fit(members)
        if not found:
            return None
        fastest = self._fastest_of(everyone or members, request.min_version, now)
        quick = [member for member in found if not member.is_slow(fastest, now)]
        if not quick:
            least = min(member.pace.slowness(fastest) for member in found)
            if waited_s < (least - 1.0) * self._usual_s:
                return None
        best = min(quick or found, key=cost)
        self._last[session] = best
        self._last.move_to_end(session)
        if len(self._last) > SESSIONS_REMEMBERED:
            self._last.popitem(last=False)
        return best

    def ended(self, member: PoolMember[C], seconds: float) -> None:
        """Record the length of a request on an engine, to estimate how long waiting for another one pays."""
        member.took_s = seconds
        if member.pace.slowness(self._fastest) < SLOW:
            self._usual_s += (NEWEST if self._usual_s else 1.0) * (seconds - self._usual_s)

    def _fastest_of(self, members: Collection[PoolMember[C]], version: Version, now: float) -> float | None:
        """Return the pace of the fastest engine that serves ``version``, cached for a while if there are many."""
        if len(members) <= CANDIDATES or now >= self._paces_until:
            self._paces, self._paces_until = {}, now + FASTEST_EVERY_S
        if version not in self._paces:
            paces = [m.pace.seconds for m in members if m.serves(version, now)]
            self._paces[version] = min((pace for pace in paces if pace is not None), default=None)
        self._fastest = self._paces[version]
        return self._fastest


def expire(read: asyncio.Timeout) -> None:
    """Make the block of a timeout end with TimeoutError now, unless it already does."""
    if not read.expired():
        read.reschedule(0.0)


def _more_preempted(before: EngineLoad, now: EngineLoad) -> bool:
    """Whether preemptions or preempted requests, of which the engine reports one, have increased."""
    numbers = (before.preemptions, now.preemptions), (before.preempted, now.preempted)
    return any(old is not None and new is not None and new > old for old, new in numbers)


def _max_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids) + request.max_tokens


# --- the pool


class StreamingClient(Protocol):
    """The pool's view of an engine's client. Methods raise EngineLost and EngineRejected."""

    def stream(self, request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]: ...
    async def load(self) -> EngineLoad: ...
    async def is_sleeping(self) -> bool: ...
    async def close(self) -> None: ...


class RegistryReader(Protocol):
    """The registry of engines, which the transfer queue keeps."""

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList: ...


class _Progress:
    """A request, its answer so far, and its deadline, which each new token extends."""

    def __init__(self, request: GenerateRequest, session: str, timeout_s: float, heard: Heard | None) -> None:
        self.request, self.session, self._timeout_s, self._heard = request, session, timeout_s, heard
        self.done = EMPTY
        # The last engine that got the request.
        self.engine = ""
        # Engines that have let the deadline pass.
        self._tried: set[str] = set()
        self.extend_deadline()

    @property
    def unfinished(self) -> bool:
        """Whether tokens are missing.

        The tokens decide too, since an engine may be lost after the last token and before it reports a finish reason.
        """
        return self.done.finish_reason == "abort" and not (self._full or self._stopped)

    @property
    def rest(self) -> GenerateRequest:
        """The request for the missing tokens."""
        return continuation(self.request, self.done)

    @property
    def result(self) -> GenerateResult:
        """The joined parts. If no engine reported a finish reason, the tokens imply it."""
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
        """Record that ``engine_id`` let the deadline pass; restart it if an engine serves that has not yet done so."""
        self._tried.add(engine_id)
        others = [member for name, member in members.items() if name not in self._tried]
        if not any(member.serves(self.request.min_version, now) for member in others):
            return False
        self.extend_deadline()
        return True

    def extend_deadline(self) -> None:
        """Restart the timeout, since a token arrived or none could have."""
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline, at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())

    def expired(self, by_s: float = 0.0) -> bool:
        """Whether the deadline passed at least ``by_s`` ago."""
        return time.monotonic() - self._deadline >= by_s


class _Waiter:
    """A request that waits for room on an engine with at least ``version``; ``called`` is set when one has room."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.called = asyncio.Event()


class EnginePool:
    """Sends each request to one of the registered engines, and moves it when that engine is lost.

    ``connect`` makes the client of a newly registered engine, which decodes ``max_batch`` requests at once. A request
    fails after ``timeout_s`` without a new token while its engine is awake.
    """

    def __init__(self, connect: Callable[[EngineRecord], StreamingClient], timeout_s: float, max_batch: int) -> None:
        self._connect, self._timeout_s, self._max_batch = connect, timeout_s, max_batch
        self._members: dict[str, PoolMember[StreamingClient]] = {}
        self._open: OpenMembers[StreamingClient] = OpenMembers()
        self._router: Router[StreamingClient] = Router()
        # An ordered set, so that waiters are served in the order of their arrival.
        self._waiters: dict[_Waiter, None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.replayed = 0

    def update(self, engines: EngineList) -> None:
        """Adopt the state of the registry: new engines join, missing ones leave, versions advance."""
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

        Consumes the queue's engine list and the engines' loads; produces routes; waits for a change of the list, at
        most WATCH_S at a time, and for the clock. A ProtocolError also ends it, in an ExceptionGroup.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(registry), name="engine registry")
            group.create_task(self._probe_all(), name="engine probes")

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        """Sample on engines that serve at least ``request.min_version``, keeping the tokens of engines that were lost
        or aborted the request. ``heard`` gets the tokens as they arrive.

        If an engine lets the deadline pass, each other serving engine gets the request with a new deadline. Raises
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
                    logging.DEBUG if member.record.version is None else logging.WARNING,
                    "request %s: %s was lost after %d tokens: %s",
                    request.request_id,
                    member.engine_id,
                    len(progress.done.token_ids),
                    error,
                )
                now = time.monotonic()
                member.backoff_until = now + BACKOFF_S
                if progress.expired():
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
        """Close the clients of all engines, including those that have left."""
        for member in self._members.values():
            await member.client.close()
        await to_the_end(*self._closing)

    def _wake_waiters(self) -> None:
        """Wake waiters in their order, as many as there is room for. Waking all of them after every request would cost
        the square of their number."""
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

        The bound matters because the pool of every worker does so.
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
            async with time_limit(PROBE_S):
                member.observe(await member.client.load())
            self._refresh(member)
        except (EngineLost, EngineRejected, TimeoutError) as error:
            member.missed_probes += 1
            if member.missed_probes == MAX_MISSED_PROBES and not member.gone.is_set():
                reason = str(error) or type(error).__name__
                log.warning("%s missed %d probes: %s", member.engine_id, MAX_MISSED_PROBES, reason)
                member.mark_gone()
            return
        member.missed_probes = 0
        if member.gone.is_set() and self._members.get(member.engine_id) is member:
            log.info("%s answers probes again", member.engine_id)
            member.gone = asyncio.Event()
            self._wake_waiters()

    def _refresh(self, member: PoolMember[StreamingClient]) -> None:
        """Update the engine's place among those with room, unless it has left."""
        if self._members.get(member.engine_id) is member:
            self._open.refresh(member)

    async def _read_answer(self, member: PoolMember[StreamingClient], progress: _Progress) -> None:
        """Read the engine's answer, extending the deadline while the engine reports that it sleeps.

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
        """Return an engine for the request, waiting for room. Raises EngineLost if none serves until the deadline."""
        waiter, began = _Waiter(progress.request.min_version), time.monotonic()
        try:
            while True:
                members, now = self._members.values(), time.monotonic()
                waited_s = now - began
                member = self._router.choose(
                    self._open.members, progress.rest, progress.session, now, members, waited_s
                )
                if member is not None:
                    return member
                self._waiters[waiter] = None
                if any(other.serves(waiter.version, now) for other in members):
                    # The engines that serve this version are busy.
                    progress.extend_deadline()
                elif progress.expired():
                    known = ", ".join(f"{m.record.engine_id} at {m.record.version}" for m in members)
                    raise EngineLost(
                        f"no engine serves version {waiter.version} after {self._timeout_s:.0f} s "
                        f"(rollout.request_timeout_s); known: {known or 'none'}"
                    )
                try:
                    async with asyncio.timeout(min(progress.remaining_s, BACKOFF_S)):
                        await waiter.called.wait()
                except TimeoutError:
                    # An engine may have finished backing off.
                    continue
                waiter.called.clear()
        finally:
            self._waiters.pop(waiter, None)
            # This request did not use the room that it was woken for, so the next one may have it.
            if waiter.called.is_set():
                self._wake_waiters()


class _Deadline:
    """Expires a ``read`` without a token until its deadline, unless the engine sleeps.

    It uses a timer and not a task per read: answers are short, and each further task costs a turn of the event loop.
    """

    def __init__(self, read: asyncio.Timeout, client: StreamingClient, progress: _Progress) -> None:
        self._read, self._client, self._progress = read, client, progress
        self._asking: asyncio.Task[None] | None = None
        self._wait()

    def cancel(self) -> None:
        """Stop the timer, since the read is over."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._progress.remaining_s, self._check)

    def _check(self) -> None:
        if self._progress.expired(by_s=LATE_S):
            # Tokens that the engine sent meanwhile are read first.
            self._progress.extend_deadline()
            self._wait()
        elif self._progress.expired():
            self._asking = asyncio.ensure_future(self._ask())
        else:
            # A part that arrived meanwhile has extended the deadline.
            self._wait()

    async def _ask(self) -> None:
        try:
            async with time_limit(PROBE_S):
                sleeps = await self._client.is_sleeping()
        except (EngineLost, EngineRejected, TimeoutError):
            sleeps = False
        if sleeps:
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


# --- the clients of a run's engines

EngineClient = VllmEngine | SglangEngine


def connect(
    kind: str,
    url: str,
    timeout_s: float | None = 600.0,
    read_version: ReadVersion = Version.parse,
    max_coalesced: int = 1,
    lineage: int | None = None,
    *,
    token: str = "",
) -> EngineClient:
    """Return a client of the engine at ``url``, without connecting. Raises ProtocolError for an unknown kind.

    Up to ``max_coalesced`` requests for one prompt are sent as one, if the dialect supports that. ``lineage`` is that
    of the trainer that updates the engine's weights, ``token`` that of the run that the engine serves.
    """
    match kind:
        case "embedded" | "vllm":
            return VllmEngine(
                url,
                max_coalesced=max_coalesced,
                timeout_s=timeout_s,
                read_version=read_version,
                lineage=lineage,
                token=token,
            )
        case "sglang":
            return SglangEngine(url, timeout_s=timeout_s, read_version=read_version, lineage=lineage, token=token)
    raise ProtocolError(f"the engine at {url} is of kind {kind!r}; known: {', '.join(get_args(EngineKind))}")


def engine_pool(config: RolloutConfig, token: str) -> EnginePool:
    """Return a pool without engines, which its ``watch`` adds. ``token`` is the run's token for engines."""

    def client(record: EngineRecord) -> EngineClient:
        # The client has no deadline: the pool keeps it, since the time while engines sleep does not count.
        return connect(record.kind, record.url, timeout_s=None, max_coalesced=config.max_batch_size, token=token)

    return EnginePool(client, config.request_timeout_s, config.max_batch_size)


async def ask_loads(engines: Sequence[EngineClient], within_s: float) -> list[EngineLoad | None]:
    """Ask all engines for their loads at once, and close the clients. An engine that is silent or lost answers None."""

    async def ask(client: EngineClient) -> EngineLoad | None:
        try:
            async with asyncio.timeout(within_s):
                return await client.load()
        except (EngineError, TimeoutError):
            return None
        finally:
            await client.close()

    return await gather_or_cancel(*map(ask, engines))
