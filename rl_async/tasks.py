"""Several coroutines at once, none of which outlives the call.

When one fails under ``asyncio.gather``, the others go on, beside whatever their caller closes.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


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
