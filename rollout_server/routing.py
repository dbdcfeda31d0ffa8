"""Which engine gets a request: the one where it costs the least work, counted in tokens. No sockets, no clock.

    cost = tokens queued or running there / share of its KV cache that is free
         + the request's own prompt, unless the conversation's last request ran there and its prefix is cached

A conversation therefore stays where its prefix is cached while that saves more than waiting behind others costs, and
leaves an engine whose cache is nearly full and which would soon preempt.

Of more than CANDIDATES engines it is the cheapest of that many, drawn at random, and of the conversation's last one:
the cost of a choice does not grow with the number of engines, and the pools of many workers, who all know the same
loads of a moment ago, do not all choose the same engine.

A batch is complete when its slowest answer is, and the tokens of all answers of an engine come at about the same pace.
So an engine whose pace is SLOW times that of the fastest gets a request only to be measured again, one at a time, or if
no other has room and waiting for one would take longer than the slow engine does.
"""

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.api import EngineLoad, GenerateRequest

FULL = 0.9  # cache usage from which preemptions are put down to a full cache; a weight update preempts too, once
SHRINK, GROW = 0.75, 1.05  # factors of the limit
MIN_LIMIT = 4
SESSIONS_REMEMBERED = 100_000
CANDIDATES = 32
SLOW = 2.0
# Paces that differ by less than this, in seconds per token, are alike.
FASTEST_S = 0.001
# An engine has a pace from so many tokens on; what was heard before counts half as much after each HALF_LIFE_S.
EVIDENCE, HALF_LIFE_S = 16, 5.0
# A wait for tokens counts this long at most, or LONGEST_GAP times as long as usual: engines pause for new weights.
LONGEST_GAP_S, LONGEST_GAP = 1.0, 10.0
# A slow engine is measured again after so long, and so many times as long as its last request took.
TRY_AGAIN_S, TRY_AGAIN = 20.0, 20.0
# The fastest of many engines is looked for so often.
FASTEST_EVERY_S = 1.0
# Weight of the newest request in the usual length of one.
NEWEST = 0.1

C = TypeVar("C")


class Pace:
    """How long an engine takes for a token of one answer, a mean over all answers that are read, the newer ones first.

    It does not measure how many answers the engine decodes at once: one that has little to do is not slow.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self.heard_at = -math.inf

    @property
    def seconds(self) -> float | None:
        """Seconds per token; None until EVIDENCE tokens were heard."""
        return self._seconds / self._tokens if self._tokens >= EVIDENCE else None

    def hear(self, tokens: int, seconds: float, now: float) -> None:
        """Take in that ``tokens`` tokens of one answer came ``seconds`` after those before them."""
        usual = tokens * (self.seconds or 0.0)
        kept = 0.5 ** ((now - self.heard_at) / HALF_LIFE_S)
        # Old evidence weighs little, but is evidence until there is newer.
        kept = max(kept, min(1.0, EVIDENCE / max(1.0, self._tokens)))
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + min(seconds, max(LONGEST_GAP_S, LONGEST_GAP * usual))
        self.heard_at = now

    def slowness(self, fastest: float | None) -> float:
        """Return how many times as long as the fastest engine this one takes for a token; 1 if that is unknown."""
        if fastest is None or self.seconds is None:
            return 1.0
        return max(1.0, self.seconds / max(fastest, FASTEST_S))


class PoolMember(Generic[C]):
    """One engine of the pool: its client, its load, and how many requests it may hold at once.

    The engine decodes ``max_batch`` requests at once. More would only wait there, where they cannot move to another
    engine, so ``limit`` starts a quarter above it, just enough to refill a slot at once. It shrinks while the engine
    preempts because its cache is full, and grows back when it does not.
    """

    def __init__(self, record: EngineRecord, client: C, max_batch: int) -> None:
        self.record, self.client = record, client
        self.requests = self.tokens = 0  # of this pool: in flight, and the most tokens that they may come to
        self.limit = self._max_limit = float(max(MIN_LIMIT, math.ceil(1.25 * max_batch)))
        self.backoff_until = 0.0
        # Requests in a row that the engine let run out of time.
        self.swallowed = 0
        self.missed_probes = 0  # in a row
        self.probed_at = 0.0  # when the last probe began
        self.gone = asyncio.Event()  # it left the registry, or does not answer probes
        self.pace = Pace()
        # Seconds that its latest request took.
        self.took_s = 0.0
        self.reads: set[asyncio.Timeout] = set()  # of its answers; to expire at once when it is gone
        self._load: EngineLoad | None = None
        self._pressed = False  # the last load showed preemptions with a full cache

    @property
    def engine_id(self) -> str:
        return self.record.engine_id

    @property
    def is_withdrawn(self) -> bool:
        """Whether it may not be used, though it is there."""
        return self.record.version is None

    def adopt(self, record: EngineRecord) -> None:
        """Take in what the registry says now. The requests of an engine that was withdrawn move elsewhere."""
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
        """The number of requests that it may still take."""
        return max(0, math.ceil(self.limit - self.requests))

    def is_slow(self, fastest: float | None, now: float) -> bool:
        """Whether requests had better go elsewhere: it is slow, and it is not time to measure it again."""
        due = not self.requests and now - self.pace.heard_at >= max(TRY_AGAIN_S, TRY_AGAIN * self.took_s)
        return not due and self.pace.slowness(fastest) >= SLOW

    def mark_gone(self) -> None:
        """Stop routing to the engine, and end the reads of its answers so that their requests move elsewhere."""
        self.gone.set()
        for read in self.reads:
            expire(read)

    def backlog(self, request: GenerateRequest) -> float:
        """Return the tokens ahead of a new request, other clients' included, divided by the free share of the cache.

        Other clients' requests are known by number only; each is taken to be as long as ours on average, or, if we
        have none there, as ``request``.
        """
        if self._load is None:
            return float(self.tokens)
        others = max(0, self._load.requests - self.requests)
        each = self.tokens / self.requests if self.requests else _max_tokens(request)
        return (self.tokens + others * each) / (1.0 - min(self._load.cache_usage, 0.95))

    def observe(self, load: EngineLoad) -> None:
        """Take in a probe's result and adapt the limit, which shrinks when two probes in a row show preemptions with a
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
    """The engines that have room, kept as requests begin and end so that none is looked for among all engines."""

    def __init__(self) -> None:
        self.members: list[PoolMember[C]] = []  # in no order
        self._at: dict[PoolMember[C], int] = {}

    def refresh(self, member: PoolMember[C]) -> None:
        """Add the engine if it has room now, else remove it."""
        if not member.room:
            self.remove(member)
        elif member not in self._at:
            self._at[member] = len(self.members)
            self.members.append(member)

    def remove(self, member: PoolMember[C]) -> None:
        """Remove the engine, if it is here."""
        at = self._at.pop(member, None)
        if at is None:
            return
        last = self.members.pop()
        if last is not member:
            self.members[at], self._at[last] = last, at


class Router(Generic[C]):
    """Chooses engines, and remembers which one served each conversation last."""

    def __init__(self) -> None:
        # By session, least recently used first. A dict looks at all keys that were deleted to find its first one.
        self._last: OrderedDict[str, PoolMember[C]] = OrderedDict()
        self._random = random.Random()
        # Seconds that a request usually takes on an engine that is not slow.
        self._usual_s = 0.0
        self._fastest: tuple[float, float | None] = (-math.inf, None)

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

        None if there is no such engine, or only slow ones, and one of ``everyone`` would end the request, which has
        waited for ``waited_s``, sooner.
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
        """Take in how long a request took on an engine, for what waiting for others is worth."""
        member.took_s = seconds
        if member.pace.slowness(self._fastest[1]) < SLOW:
            self._usual_s += (NEWEST if self._usual_s else 1.0) * (seconds - self._usual_s)

    def _fastest_of(self, members: Collection[PoolMember[C]], version: Version, now: float) -> float | None:
        """Return the pace of the fastest engine that serves ``version``; of many it is not looked for each time."""
        if len(members) <= CANDIDATES or now >= self._fastest[0]:
            paces = [m.pace.seconds for m in members if m.serves(version, now)]
            self._fastest = now + FASTEST_EVERY_S, min((pace for pace in paces if pace is not None), default=None)
        return self._fastest[1]


def expire(read: asyncio.Timeout) -> None:
    """Have the block of a timeout end with TimeoutError now, unless it is ending so already."""
    if not read.expired():
        read.reschedule(0.0)


def _more_preempted(before: EngineLoad, now: EngineLoad) -> bool:
    """Whether the engine preempted in between, or has more requests that wait for it: it reports one of the two."""
    numbers = (before.preemptions, now.preemptions), (before.preempted, now.preempted)
    return any(old is not None and new is not None and new > old for old, new in numbers)


def _max_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids) + request.max_tokens
