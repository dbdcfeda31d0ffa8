"""Work in a daemon thread: unlike an executor's, it never holds up the end of its process, however long it blocks."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar


class Closeable(Protocol):
    """What must be closed by whoever opened it."""

    def close(self) -> None: ...


T = TypeVar("T")
C = TypeVar("C", bound=Closeable)

MOST_OVERDUE = 64  # threads of one kind that go on past their deadline, which nothing can end


def in_daemon_thread(work: Callable[[], T], name: str) -> "Future[T]":
    """Start ``work`` in a thread of its own; the future has its result or its exception, and cannot be cancelled.

    Coroutines await it through ``asyncio.wrap_future``.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on only the thread settles it

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # raised again where the future is awaited
            future.set_exception(error)
        except BaseException as error:  # SystemExit, say, must not end whoever awaits
            future.set_exception(RuntimeError(f"thread {name} ended by {error!r}"))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def opened_in_thread(opening: Callable[[], C], name: str) -> C:
    """Await what ``opening`` returns, called in a daemon thread. A caller that is cancelled meanwhile does not get it;
    then it is closed once it is open.
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


def together(works: Sequence[Callable[[], T]], name: str) -> list[T]:
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


class DaemonCalls:
    """Blocking calls of users' code, each in a daemon thread of its own, which their callers may stop waiting for.

    ``key``: the config key of their deadline, for the error.
    """

    def __init__(self, name: str, key: str) -> None:
        self._name, self._key = name, key
        self._overdue: set[Future[Any]] = set()

    @property
    def overdue(self) -> int:
        """How many calls still run whose callers have stopped waiting."""
        return len(self._overdue)

    async def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` and await its result. Raises RuntimeError once too many calls are overdue."""
        if len(self._overdue) >= MOST_OVERDUE:
            raise RuntimeError(f"{MOST_OVERDUE} earlier calls still run past their deadline ({self._key})")
        work = in_daemon_thread(function, self._name)
        try:
            return await asyncio.wrap_future(work)
        finally:
            if not work.done():
                self._overdue.add(work)
                work.add_done_callback(self._overdue.discard)
