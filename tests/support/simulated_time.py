"""A pytest plugin whose fixture lets an event loop's clock jump to the next timer instead of waiting for it.

A deadline then passes only where nothing else is left to do, however busy the machine is, and costs no time. Work in
threads takes no simulated time: the clock stands while the executor has jobs, or a thread runs that the test started.
"""

import asyncio
import selectors
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

POLL_S = 0.002  # between looks whether threads have ended


@pytest.fixture
async def simulated_time(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Simulate ``time.monotonic`` and the clock of the test's loop, which must not await sockets under a timeout."""
    loop = asyncio.get_running_loop()
    selector: selectors.BaseSelector = cast(Any, loop)._selector
    select, now = selector.select, time.monotonic()
    submit, before = loop.run_in_executor, set(threading.enumerate())
    jobs: set[asyncio.Future[Any]] = set()

    def in_executor(*work: Any) -> asyncio.Future[Any]:
        jobs.add(job := submit(*work))
        job.add_done_callback(jobs.discard)
        return job

    def threads_work() -> bool:
        started = set(threading.enumerate()) - before
        return bool(jobs) or not all(thread.name.startswith("asyncio_") for thread in started)

    def jump(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        nonlocal now
        if timeout and threads_work():
            return select(POLL_S)
        events = select(None if timeout is None else 0)
        if not events and timeout:
            now += timeout
        return events

    # The patches are undone before the loop is closed, which awaits the threads of its executor.
    with monkeypatch.context() as patched:
        patched.setattr(selector, "select", jump)
        patched.setattr(loop, "run_in_executor", in_executor)
        patched.setattr(time, "monotonic", lambda: now)
        yield
