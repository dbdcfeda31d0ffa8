"""Concurrent coroutines that do not outlive the call, deadlines, and blocking work in threads.

When one coroutine fails under ``asyncio.gather``, the others go on while their caller closes resources. After a pause
of the machine, the timer of ``asyncio.timeout`` fires before the answers are read that have come meanwhile. A daemon
thread, unlike an executor's, never holds up the end of its process, however long it blocks.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

T = TypeVar("T")

# One look at a deadline counts this much at most.
LOOK_S = 1.0
# A deadline that is as near as this is taken to have passed.
SOON_S = 1e-4


class Overdue(TimeoutError):
    """A deadline of ``within`` has passed."""


class TimeLeft:
    """The rest of a deadline that several waits share, in seconds.

    While this process does not run (stopped, swapped out, on a suspended machine), LOOK_S at most are counted.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._seconds < SOON_S

    async def within(self, work: Awaitable[T], seconds: float = math.inf) -> T:
        """Return the result of ``work``.

        Raises Overdue after ``seconds``, or at the deadline if it comes before, once the cancelled work has ended.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                left = min(self._seconds, seconds)
                if left < SOON_S:
                    raise Overdue
                began, look = time.monotonic(), min(left, LOOK_S)
                await asyncio.wait([task], timeout=look)
                counted = min(time.monotonic() - began, look)
                self._seconds, seconds = self._seconds - counted, seconds - counted
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        return task.result()


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of ``work``. Raises Overdue after ``seconds``, as TimeLeft counts them."""
    return await TimeLeft(seconds).within(work)


@asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Limit the time of a block, which stays in the caller's task, as ``asyncio.timeout`` does; None means no limit.

    Time is counted as by ``within``.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look(left: float, length: float) -> None:
        nonlocal timer
        left -= length
        if left < SOON_S:
            limit.reschedule(loop.time())
        else:
            length = min(left, LOOK_S)
            timer = loop.call_later(length, look, left, length)

    async with asyncio.timeout(None) as limit:
        if seconds is not None:
            look(seconds, 0.0)
        try:
            yield limit
        finally:
            if timer is not None:
                timer.cancel()


async def gather_or_cancel(*work: Awaitable[T]) -> list[T]:
    """Do all of it at once; return the results in order.

    If one fails, the others are cancelled, and its error is raised when they have ended.
    """
    # A single one needs no task.
    if len(work) == 1:
        return [await work[0]]
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
    """Do all of it at once, each to its end even if others fail; then raise the first error."""
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


async def end_other_tasks() -> None:
    """Cancel the other tasks of this event loop, which is about to stop, and wait until they have ended."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest)


class Closeable(Protocol):
    """A resource that its opener must close."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)

# The threads of one kind that may run past their deadline, since a thread cannot be ended.
MOST_OVERDUE = 64
# The threads that are kept for further calls, and for how long.
MOST_IDLE, IDLE_S = 64, 10.0


def in_daemon_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Start ``work`` in a thread of its own; the future has its result or its exception, and cannot be cancelled.

    Coroutines await it through ``asyncio.wrap_future``.
    """
    future: Future[T] = Future()
    # From here on only the thread settles it.
    future.set_running_or_notify_cancel()

    threading.Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    return future


def _settle(future: "Future[T]", work: Callable[[], T]) -> None:
    """Do the work, and give the future its result or its exception."""
    try:
        future.set_result(work())
    # Errors are raised again where the future is awaited.
    except BaseException as error:
        future.set_exception(_awaitable(error))


def _awaitable(error: BaseException) -> Exception:
    """Return an error in place of one that asyncio takes for its own: an end of the process, of a task, or of a
    coroutine, which nothing can await."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"raised {error!r:.200}")


async def contained(work: Awaitable[T]) -> T:
    """Return the result of users' ``work``, whose errors are all Exceptions.

    SystemExit would end the event loop, and a CancelledError look as if somebody had cancelled this task.
    """
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _awaitable(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise _awaitable(error) from error


async def opened_in_thread(opening: Callable[[], C], name: str) -> C:
    """Call ``opening`` in a daemon thread and await its result. If the caller is cancelled meanwhile, the resource is
    closed once it is open.
    """
    future = in_daemon_thread(opening, name)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(_close_opened)
        raise


def _close_opened(future: "Future[C]") -> None:
    if future.exception() is None:
        future.result().close()


def run_in_threads(works: Sequence[Callable[[], T]], name: str) -> list[T]:
    """Do all at the same time, the first in this thread, and return what they return.

    If some fail, the error of the first of them is raised once all have ended.
    """
    others = [in_daemon_thread(work, name) for work in works[1:]]
    try:
        mine = [work() for work in works[:1]]
    finally:
        for other in others:
            other.exception()
    return mine + [other.result() for other in others]


class CallThreads:
    """Daemon threads for blocking calls. No call waits for another: it gets an idle thread or, without one, a new one.

    The start of a thread holds up the event loop until the thread runs, and costs several times as much as a short
    call, so up to MOST_IDLE threads wait for further calls, each for IDLE_S.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # An entry for each thread that waits for a call and was not promised one.
        self._idle: deque[None] = deque()

    def start(self, call: Callable[[], None]) -> None:
        """Start ``call``, which must not raise."""
        try:
            self._idle.pop()
        except IndexError:
            # The thread keeps its arguments as long as it lives: the list, which it empties.
            threading.Thread(target=self._work, args=([call],), name="blocking call", daemon=True).start()
        else:
            self._calls.put(call)

    def _work(self, first: list[Callable[[], None]]) -> None:
        call: Callable[[], None] | None = first.pop()
        while call is not None:
            call()
            # An idle thread must not keep the call's arguments and result alive.
            del call
            call = self._next()

    def _next(self) -> Callable[[], None] | None:
        """Wait for a call; None if enough threads wait, or none came in time."""
        if len(self._idle) >= MOST_IDLE:
            return None
        self._idle.append(None)
        try:
            return self._calls.get(timeout=IDLE_S)
        except Empty:
            pass
        try:
            self._idle.pop()
        # A call was promised a thread just now.
        except IndexError:
            return self._calls.get()
        return None


_THREADS_FOR_CALLS = CallThreads()


class DaemonCalls:
    """Runs blocking calls of users' code in daemon threads, which callers may stop waiting for.

    ``key`` is the config key of their deadline, for the error.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._overdue: set[Future[Any]] = set()

    @property
    def overdue(self) -> int:
        """How many calls still run whose callers have stopped waiting."""
        return len(self._overdue)

    async def call(self, function: Callable[[], T], seconds: float) -> T:
        """Call ``function`` and await its result.

        Raises Overdue after ``seconds``, counted as by ``within``, and RuntimeError once too many calls are overdue.
        """
        if len(self._overdue) >= MOST_OVERDUE:
            raise RuntimeError(f"{MOST_OVERDUE} earlier calls still run past their deadline ({self._key})")
        work: Future[T] = Future()
        # From here on only the thread settles it.
        work.set_running_or_notify_cancel()
        # As in a new thread, the call finds no context variables of an earlier one.
        _THREADS_FOR_CALLS.start(partial(Context().run, _settle, work, function))
        try:
            return await within(seconds, asyncio.wrap_future(work))
        finally:
            if not work.done():
                self._overdue.add(work)
                work.add_done_callback(self._overdue.discard)


P = ParamSpec("P")

# Characters or bytes that are tokenised within a few milliseconds.
SHORT = 16_384
# More threads would only take the cores from the event loop.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="tokenise")


async def off_loop(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call ``function``, in a thread if it works on a text longer than SHORT, of ``size`` characters or bytes."""
    if size <= SHORT:
        return function(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: function(*args, **kwargs))
