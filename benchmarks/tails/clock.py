"""An event loop on a simulated clock: what waits for time waits no time, so that code of asyncio runs as it is."""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

from rl_async.errors import RlAsyncError


class _Jumping(selectors.BaseSelector):
    """Moves the clock on by as long as the loop would sleep. Sockets are looked at, and never waited for."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Raises RlAsyncError if nothing would ever happen again."""
        if timeout is None:
            raise RlAsyncError("the simulated run has stopped: every task waits for another, and none for the clock")
        self.now += max(0.0, timeout)
        return self._selector.select(0)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()

    def close(self) -> None:
        self._selector.close()


class SimulatedLoop(asyncio.SelectorEventLoop):
    """``time()`` is in simulated seconds from 0 on. Threads and sockets must not be waited for."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now
