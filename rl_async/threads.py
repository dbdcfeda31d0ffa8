"""Work in a daemon thread: unlike an executor's, it never holds up the end of its process, however long it blocks."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
