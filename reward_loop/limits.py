"""A limit on how often something may start.

aiolimiter would not replace it: its leaky bucket lets up to twice the count start within one period.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

MINUTE_S = 60.0


class RateLimit:
    """At most ``count`` starts within any ``period_s`` seconds; 0: no limit."""

    def __init__(
        self,
        count: int,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._count, self._period_s, self._clock, self._sleep = count, period_s, clock, sleep
        self._started: deque[float] = deque(maxlen=count or 1)
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait until the next start is allowed, in order of arrival; at most one period per start ahead."""
        if not self._count:
            return
        async with self._turn:
            if len(self._started) == self._count:
                await self._sleep(max(0.0, self._started[0] + self._period_s - self._clock()))
            self._started.append(self._clock())
