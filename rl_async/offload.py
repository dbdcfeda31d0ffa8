"""Keeps the event loop free while a long text is read: leases are renewed and health probes answered on it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

SHORT = 16_384  # characters or bytes, tokenised within a few milliseconds
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="tokenise")  # more would only take the cores from the event loop


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function``, in a thread if it works on a text longer than SHORT, of ``size`` characters or bytes."""
    if size <= SHORT:
        return function(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: function(*args, **kwargs))
