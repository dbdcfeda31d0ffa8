"""Coroutines at once, none of which outlives the call, and deadlines that a process which stood still does not miss.

When one coroutine fails under ``asyncio.gather``, the others go on, beside whatever their caller closes. The timer of
``asyncio.timeout`` fires after a pause of the machine before the answers are read that came meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

# One look at a deadline counts this much at most.
LOOK_S = 1.0
# A deadline that is as near as this is taken to have passed.
SOON_S = 1e-4


class Overdue(TimeoutError):
    """A deadline of ``within`` has passed."""


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of ``work``. Raises Overdue after ``seconds``, when the work was cancelled and has ended.

    The time in which this process stood still (stopped, swapped out, in a machine that was suspended) counts for
    LOOK_S at most.
    """
    task, left = asyncio.ensure_future(work), seconds
    try:
        while not task.done():
            if left < SOON_S:
                raise Overdue
            began, look = time.monotonic(), min(left, LOOK_S)
            await asyncio.wait([task], timeout=look)
            left -= min(time.monotonic() - began, look)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    return task.result()


async def together(*work: Awaitable[T]) -> list[T]:
    """Do all of it at once; return the results in order.

    If one fails, the others are cancelled, and its error is raised when they have ended.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    if not tasks:
        return []
    failed: list[asyncio.Future[T]] = []
    pending = set(tasks)
    try:
        while pending and not failed:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = [task for task in tasks if task in done and (task.cancelled() or task.exception() is not None)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [task.result() for task in failed or tasks]


async def to_the_end(*work: Awaitable[T]) -> list[T]:
    """Do all of it at once, each to its end whatever becomes of the others; raise the first error of any then."""
    tasks = [asyncio.ensure_future(each) for each in work]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return [task.result() for task in tasks]


async def outcomes(*work: Awaitable[T]) -> list[T | BaseException]:
    """Do all of it at once, each to its end; return each result, or the error in its place."""
    return await asyncio.gather(*work, return_exceptions=True)
