"""The trainer's blocking view of weight synchronisation; the work happens on an event loop in a thread of its own."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, Self, TypeVar

from rl_async.errors import WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.fleet import Fleet
from rl_async.weight_sync.options import PLAIN, SyncOptions
from rl_async.weight_sync.protocol import Backend, EngineControl, EngineDirectory, SyncReport

T = TypeVar("T")

START_S = 60.0
CLOSE_S = 2.0

log = logging.getLogger("rl_async.weight_sync")


class WeightCoordinator:
    """Publishes weights from rank 0 of the trainer, and keeps late engines caught up in the background.

    ``open_directory`` and ``connect`` are called on the coordinator's own event loop, because sockets belong to the
    loop on which they are made. Blocks until the directory is open; raises what opening it raised.
    """

    def __init__(
        self,
        open_directory: Callable[[], AbstractAsyncContextManager[EngineDirectory]],
        connect: Callable[[EngineRecord], EngineControl],
        transport: Backend,
        timeout_s: float,
        engine_wait_s: float = 180.0,
        options: SyncOptions = PLAIN,
    ) -> None:
        self._exits = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-coordinator", daemon=True)
        self._thread.start()

        async def start() -> tuple[Fleet, asyncio.Task[None]]:
            directory = await self._exits.enter_async_context(open_directory())
            fleet = Fleet(directory, connect, transport, timeout_s, engine_wait_s, options)
            return fleet, asyncio.create_task(fleet.keep_caught_up(), name="catch-up")

        try:
            self._fleet, self._catching_up = self._wait(start(), START_S)
        except BaseException:
            self._stop_loop()
            raise

    def publish(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Bring all engines to ``version`` and tell the directory; keeps the buckets for late engines.

        Engines that fail are cut off and named in the report. Raises WeightSyncError when none is left and none
        registers in time, QueueLost when the directory is gone. Each request to an engine has its deadline.
        """
        self._check_catch_up()
        return self._wait(self._fleet.publish(version, buckets))

    def suspend(self) -> None:
        """Pause all engines and take their device memory until the next publication."""
        self._check_catch_up()
        self._wait(self._fleet.suspend())

    def close(self) -> None:
        """Stop catching up and close the connections. The engines keep serving."""

        async def stop() -> None:
            self._catching_up.cancel()
            await asyncio.wait([self._catching_up])
            await self._fleet.close()
            await self._exits.aclose()

        try:
            self._wait(stop(), CLOSE_S)
        except TimeoutError:
            log.warning("weight synchronisation did not end within %g s", CLOSE_S)
        self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_catch_up(self) -> None:
        """The catch-up loop ends only by a bug; better told here than by engines that never come back."""
        if self._catching_up.done():
            raise WeightSyncError("the catch-up of engines has ended") from self._catching_up.exception()

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()  # when this wait was interrupted; else it is done

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        with suppress(RuntimeError):  # still running: a daemon, it ends with the process
            self._loop.close()
