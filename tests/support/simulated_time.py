"""A pytest plugin whose fixture lets an event loop's clock jump to the next timer instead of waiting for it.

A deadline then passes only where nothing else is left to do, however busy the machine is, and costs no time.
"""

import asyncio
import selectors
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest


@pytest.fixture
async def simulated_time(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Simulate ``time.monotonic`` and the clock of the test's loop, which must not await threads or sockets under a
    timeout: their work takes no simulated time."""
    loop = asyncio.get_running_loop()
    selector: selectors.BaseSelector = cast(Any, loop)._selector
    select, now = selector.select, time.monotonic()

    def jump(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        nonlocal now
        events = select(None if timeout is None else 0)
        if not events and timeout:
            now += timeout
        return events

    # The patches are undone before the loop is closed, which awaits the threads of its executor.
    with monkeypatch.context() as patched:
        patched.setattr(selector, "select", jump)
        patched.setattr(time, "monotonic", lambda: now)
        yield
