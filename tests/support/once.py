"""What is computed once for many tests, and fails once."""

import functools
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def once(function: Callable[[K], T]) -> Callable[[K], T]:
    """Call ``function`` once for each argument; raise its error again for the same one, as a fixture does."""

    @functools.cache
    def outcome(argument: K) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(argument))
        except Exception as error:
            future.set_exception(error)
        return future

    return lambda argument: outcome(argument).result()
