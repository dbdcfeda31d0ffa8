"""Which engine gets a request: the one where it costs the least work, counted in tokens. No sockets, no clock.

    cost = tokens that are before it in line / room left in the cache
         + its own prompt, unless the engine has just computed that prompt's beginning

So a conversation stays where its prefix is cached while that saves more than waiting behind others costs, and leaves an
engine whose cache is nearly full, which would soon preempt.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.api import EngineLoad, GenerateRequest

FULL = 0.9  # share of the cache above which preemptions may be the cache's fault; a weight update preempts too, once
BACK_OFF, GROW = 0.75, 1.05
FEWEST = 4
SESSIONS_REMEMBERED = 100_000

C = TypeVar("C")


class Member(Generic[C]):
    """One engine with its client, its load, and how many requests it may have at once.

    ``most``: that many it decodes at once; more would only wait there, where they cannot go elsewhere. The limit starts
    with a quarter above, so that a place never stays empty, falls when the engine preempts for want of cache, and
    grows while it does not.
    """

    def __init__(self, record: EngineRecord, client: C, most: int) -> None:
        self.record, self.client = record, client
        self.requests = self.tokens = 0  # of this pool: in flight, and the most tokens that they may come to
        self.limit = self._most = float(max(FEWEST, math.ceil(1.25 * most)))
        self.set_aside_until = 0.0
        self.silent = 0  # probes in a row without an answer
        self.gone = asyncio.Event()  # it left the registry, or answers no probes
        self.answers: set[asyncio.Task[None]] = set()  # that are waited for
        self._load: EngineLoad | None = None
        self._pressed = False  # it had preempted with a full cache when it was last asked

    @property
    def engine_id(self) -> str:
        """Its name in the registry."""
        return self.record.engine_id

    def serves(self, version: Version, now: float) -> bool:
        """Whether it may be asked for this version at all."""
        confirmed = self.record.version
        return confirmed is not None and confirmed >= version and now >= self.set_aside_until and not self.gone.is_set()

    @property
    def room(self) -> int:
        """How many more requests it may get."""
        return max(0, math.ceil(self.limit - self.requests))

    def lose(self) -> None:
        """It is gone: nobody waits for its answers any more."""
        self.gone.set()
        for answer in self.answers:
            answer.cancel()

    def queued(self, request: GenerateRequest) -> float:
        """Tokens before a new request, others' included, by how much room is left in the cache.

        Other clients' requests are known by number only, and taken to be as long as ours, or as this one.
        """
        if self._load is None:
            return float(self.tokens)
        others = max(0, self._load.requests - self.requests)
        each = self.tokens / self.requests if self.requests else _most_tokens(request)
        return (self.tokens + others * each) / (1.0 - min(self._load.cache_usage, 0.95))

    def observe(self, load: EngineLoad) -> None:
        """It told its load: adapt the limit. Fewer when it was found preempting with a full cache twice in a row."""
        before, self._load = self._load, load
        pressed = before is not None and load.preemptions > before.preemptions and load.cache_usage >= FULL
        twice, self._pressed = pressed and self._pressed, pressed
        if twice:
            self.limit = max(float(FEWEST), self.limit * BACK_OFF)
        elif self.requests >= self.limit - 1:
            self.limit = min(self._most, self.limit * GROW)

    @contextmanager
    def carrying(self, request: GenerateRequest) -> Iterator[None]:
        """While the request is in flight."""
        tokens = _most_tokens(request)
        self.requests, self.tokens = self.requests + 1, self.tokens + tokens
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - 1, self.tokens - tokens


class Router(Generic[C]):
    """Remembers where each conversation was."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}

    def choose(
        self, members: Iterable[Member[C]], request: GenerateRequest, session: str, now: float
    ) -> Member[C] | None:
        """The cheapest engine that serves the request's version and has room; None if there is none."""
        fit = [member for member in members if member.room and member.serves(request.min_version, now)]
        if not fit:
            return None
        home = self._homes.get(session)

        def cost(member: Member[C]) -> tuple[float, int]:
            prompt = 0 if member.engine_id == home else len(request.token_ids)
            return member.queued(request) + prompt, member.requests

        best = min(fit, key=cost)
        self._homes.pop(session, None)  # to its end: the oldest are forgotten first
        self._homes[session] = best.engine_id
        if len(self._homes) > SESSIONS_REMEMBERED:
            del self._homes[next(iter(self._homes))]
        return best


def _most_tokens(request: GenerateRequest) -> int:
    return len(request.token_ids) + request.max_tokens
