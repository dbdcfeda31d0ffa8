"""How often something may start."""

import asyncio
import time
from collections import deque

MINUTE_S = 60.0


class RateLimit:
    """At most ``count`` starts within any ``period_s`` seconds; 0: no limit."""

    def __init__(self, count: int, period_s: float) -> None:
        self._count, self._period_s = count, period_s
        self._started: deque[float] = deque(maxlen=count or 1)
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Return when the next start is due, first come first served; at the latest after one period per start."""
        if not self._count:
            return
        async with self._turn:
            if len(self._started) == self._count:
                await asyncio.sleep(max(0.0, self._started[0] + self._period_s - time.monotonic()))
            self._started.append(time.monotonic())
