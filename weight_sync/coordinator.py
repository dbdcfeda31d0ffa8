"""The trainer's blocking interface to weight synchronisation, whose event loop runs in its own thread."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import TrainerReplaced, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync.fleet import Fleet, NoteStage, Weights
from rl_async.weight_sync.protocol import EngineControl, EngineDirectory, SyncReport

T = TypeVar("T")

START_S = 60.0
CLOSE_S = 2.0
FINISH_S = 20.0  # for the update of a late engine that is under way when the run is over
# How often the other ranks, which wait in a collective, are told that a call still goes on.
MEET_S = 1.0

log = logging.getLogger("rl_async.weight_sync")


class WeightCoordinator:
    """Publishes weights from rank 0 of the trainer, and keeps late engines caught up in the background.

    ``open_directory`` and ``connect`` are called on the coordinator's own event loop, because sockets belong to the
    loop on which they are created. ``sync``, ``engine_wait_s``, ``host``, ``note``, ``shares`` and ``stores`` are as
    for ``Fleet``. The constructor blocks until the directory is open and raises what opening it raised.

    A publication may take longer than a collective may. So ``meet`` is called with True every MEET_S while a call that
    all ranks make alike lasts, and with False at its end: the other ranks (``phases.IdleCoordinator``) meet this one.
    """

    def __init__(
        self,
        open_directory: Callable[[], AbstractAsyncContextManager[EngineDirectory]],
        connect: Callable[[EngineRecord], EngineControl],
        sync: WeightSyncConfig,
        engine_wait_s: float = 180.0,
        host: str = "127.0.0.1",
        note: NoteStage = lambda engine, version, stage: None,
        shares: Callable[[EngineRecord], bool] = lambda record: True,
        stores: Path | None = None,
        meet: Callable[[bool], object] = lambda more: None,
    ) -> None:
        self._meet = meet
        self._exits = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-coordinator", daemon=True)
        self._thread.start()

        async def start() -> tuple[Fleet, asyncio.Task[None]]:
            directory = await self._exits.enter_async_context(open_directory())
            fleet = Fleet(directory, connect, sync, engine_wait_s, host, note, shares, stores)
            return fleet, asyncio.create_task(fleet.keep_caught_up(), name="catch-up")

        try:
            self._fleet, self._catching_up = self._wait(start(), START_S)
        except BaseException:
            self._stop_loop()
            raise

    def publish(self, version: Version, weights: Weights) -> SyncReport:
        """Bring all engines to ``version`` and record it in the directory; keep the weights for late engines.

        Engines that fail are cut off and named in the report. Raises WeightSyncError when none is left and none
        registers in time, QueueLost when the directory is gone, RanksLost when a rank that sends is. Each request to an
        engine has its own deadline.
        """
        self._check_catch_up()
        return self._with_ranks(self._fleet.publish(version, weights))

    def publish_beside(self, version: Version, weights: Weights) -> SyncReport:
        """Publish as ``publish`` does, but suspended engines sleep on."""
        self._check_catch_up()
        return self._with_ranks(self._fleet.publish_beside(version, weights))

    def suspend(self) -> None:
        """Pause the engines on the trainer's devices and release their memory until the next ``publish``."""
        self._check_catch_up()
        self._with_ranks(self._fleet.suspend())

    def defer_late(self) -> None:
        """Let late engines wait for the next publication, and one that is being updated end before this returns."""
        self._check_catch_up()
        self._with_ranks(self._fleet.defer_late())

    def finish(self) -> None:
        """Stop catching up, once the engine under way is up to date or after FINISH_S: the run is over."""

        async def stop() -> None:
            await self._fleet.idle(FINISH_S)
            self._catching_up.cancel()

        self._wait(stop())

    def close(self) -> None:
        """Stop catching up at once, and close the connections.

        The engines keep serving, but for one that was cut short: it holds mixed weights, and stays paused.
        """

        async def stop() -> None:
            self._catching_up.cancel()
            await asyncio.wait([self._catching_up])
            await self._fleet.close()
            await self._exits.aclose()

        try:
            self._wait(stop(), CLOSE_S)
        except TimeoutError:
            log.warning("the weight coordinator did not close within %g s and is left behind", CLOSE_S)
        self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_catch_up(self) -> None:
        """Raise TrainerReplaced if the catch-up loop has met it, WeightSyncError if a bug has ended the loop."""
        if not self._catching_up.done():
            return
        error = self._catching_up.exception()
        if isinstance(error, TrainerReplaced):
            raise error
        raise WeightSyncError("the task that updates late engines has ended unexpectedly") from error

    def _with_ranks(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work, and meet the other ranks meanwhile. After an error they are not met: this rank ends."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while wait([future], MEET_S).not_done:
                self._meet(True)
            result = future.result()
        finally:
            # Without effect unless this wait was interrupted.
            future.cancel()
        self._meet(False)
        return result

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()  # no effect unless this wait was interrupted

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        with suppress(RuntimeError):  # still running: it is a daemon thread and ends with the process
            self._loop.close()
