"""The blocking facade: errors reach the caller, and the thread ends."""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import QueueLost, TrainerReplaced, WeightSyncError
from rl_async.messages import EngineList, Version
from rl_async.weight_sync import coordinator as coordinator_module
from rl_async.weight_sync.coordinator import FINISH_S, IdleCoordinator, WeightCoordinator
from rl_async.weight_sync.protocol import UpdateInfo
from tests.unit.weight_sync.fleet_engines import Directory as EngineDirectory
from tests.unit.weight_sync.fleet_engines import Engine, buckets

SYNC = WeightSyncConfig(transport="ipc", timeout_s=1.0)


class Directory:
    """A registry without engines."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.opened_in, self.closed = broken, "", False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        self.opened_in = threading.current_thread().name
        if self.broken:
            raise QueueLost("no queue")
        yield self
        self.closed = True

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        await asyncio.sleep(wait_s)
        return EngineList(revision=0, engines=[], published=Version())


def coordinator_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "weight-coordinator"]


def test_errors_reach_the_caller_and_close_ends_the_thread() -> None:
    directory = Directory()
    with WeightCoordinator(directory.open, lambda _: None, SYNC, engine_wait_s=0.05) as coordinator:
        assert directory.opened_in == "weight-coordinator"
        with pytest.raises(WeightSyncError, match=r"0\.0 .*0\.05 s"):
            coordinator.publish(Version(), [])
        coordinator.suspend()
    assert directory.closed
    assert coordinator_threads() == []


def test_a_directory_that_cannot_be_opened_is_reported_at_once() -> None:
    with pytest.raises(QueueLost, match="no queue"):
        WeightCoordinator(Directory(broken=True).open, lambda _: None, SYNC)
    assert coordinator_threads() == []


@pytest.mark.parametrize(
    ("error", "kind"), [(ZeroDivisionError(), WeightSyncError), (TrainerReplaced("by lineage 1"), TrainerReplaced)]
)
def test_a_catch_up_that_ended_is_not_hidden(error: Exception, kind: type[Exception]) -> None:
    class Buggy(Directory):
        async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
            if wait_s > 0:  # only the catch-up waits
                raise error
            return await super().engines(after, wait_s)

    ended = pytest.raises(kind)
    with WeightCoordinator(Buggy().open, lambda _: None, SYNC) as coordinator, ended:
        for _ in range(1000):
            coordinator.suspend()
            time.sleep(0.005)


@pytest.mark.parametrize("end", ["finished", "stopped", "failed"])
def test_an_engine_under_way_gets_all_weights_if_the_run_is_over_and_holds_up_no_other_end(end: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        async def update(self, info: UpdateInfo) -> None:
            begun.set()
            await asyncio.to_thread(go_on.wait, 30)
            await super().update(info)

    class WithLateOne(EngineDirectory):
        @asynccontextmanager
        async def open(self) -> AsyncIterator[Any]:
            yield self

        async def publish(self, version: Version, engines: list[str]) -> None:
            await super().publish(version, engines)
            self.add("late", late)

    directory, late = WithLateOne(first=Engine()), Slow()
    sync = WeightSyncConfig(transport="ipc", timeout_s=60)
    with suppress(ZeroDivisionError), WeightCoordinator(directory.open, directory.connect, sync) as coordinator:
        coordinator.publish(Version(0, 1), buckets())
        assert begun.wait(30)
        if end == "failed":
            raise ZeroDivisionError
        if end == "finished":
            threading.Timer(0.2, go_on.set).start()
            coordinator.finish()
        left = time.monotonic()
    assert end == "failed" or time.monotonic() - left < FINISH_S
    go_on.set()
    assert directory.confirmed == ([("late", Version(0, 1))] if end == "finished" else [])
    assert late.calls[-1] == ("resume" if end == "finished" else "start")


class Registry(EngineDirectory):
    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        yield self


def test_ranks_wait_for_a_publication_that_takes_longer_than_a_collective_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "MEET_S", 0.01)
    met, go_on = queue.Queue[bool](), threading.Event()

    class Slow(Engine):
        async def update(self, info: UpdateInfo) -> None:
            await asyncio.to_thread(go_on.wait, 30)
            await super().update(info)

    def collective(mine: bool) -> bool:
        return met.get(timeout=20)

    other, directory = IdleCoordinator(collective), Registry(slow=Slow())
    with WeightCoordinator(directory.open, directory.connect, SYNC, meet=met.put) as rank_0:
        publishing = threading.Thread(target=lambda: rank_0.publish(Version(0, 1), buckets()))
        publishing.start()
        # Rank 0 says that it goes on, more than once.
        assert collective(False) and collective(False)
        go_on.set()
        assert other.publish(Version(0, 1), []).engines == []
        assert directory.published == (Version(0, 1), ["slow"]) and met.empty()
        publishing.join(30)
