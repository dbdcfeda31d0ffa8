"""Engines and a trainer's rank take turns on the device: what is on it when, in updates that end well or do not.

The engines are those of the unit tests, which have no memory on the device; so all that is there is the trainer's.
"""

import asyncio
from collections import deque
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineError, EngineLost
from rl_async.messages import Version
from rl_async.torch_shared import give_back
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.coordinator import Fleet, TakeTurns, Weights
from rl_async.weight_sync.protocol import InitInfo, SyncReport, UpdateInfo
from rl_async.weight_sync.sender import Outlet, RankShards
from rl_async.weight_sync.transports.interface import TRANSPORTS, Transport
from tests.support.python_device import held, moved, reserved
from tests.unit.weight_sync.fleet_engines import Directory, Engine, eventually, make_fleet


class HandedOver:
    """Both ends of a group. The sender gives each of its ``receivers`` every bucket."""

    buckets: ClassVar[dict[str, deque[Bucket]]] = {}  # under way, by group

    def __init__(self, group: str, receivers: int = 1) -> None:
        self._queue, self._receivers = self.buckets.setdefault(group, deque()), receivers
        self._info = InitInfo(backend="nccl", group_name=group)

    def init_info(self, member: int) -> InitInfo:
        return self._info

    def connect(self) -> None: ...

    def stage(self, bucket: Bucket) -> UpdateInfo:
        self._queue.extend([bucket] * self._receivers)
        return bucket.info

    def send(self, bucket: Bucket) -> None: ...

    def unstage(self) -> None: ...

    def close(self) -> None:
        self._queue.clear()

    def receive(self, info: UpdateInfo) -> Tensor:
        return self._queue.popleft().data


def install() -> None:
    """Have it in the place of NCCL."""
    TRANSPORTS["nccl"] = Transport(
        lambda setup: HandedOver(setup.group_name, len(setup.workers)), lambda info: HandedOver(info.group_name)
    )


BUCKET = 16384
SCENARIOS: dict[str, tuple[dict[str, Exception], dict[str, Exception]]] = {  # faults of two engines
    "well": ({}, {}),
    "one dies loading": ({}, {"update 2": EngineLost("gone")}),
    "one fails loading once": ({}, {"update 2": EngineError("again")}),
    "one dies before it is verified": ({}, {"finish": EngineLost("gone")}),
    "one dies on waking": ({}, {"wake kv_cache": EngineLost("gone")}),
    "both die": ({"update 1": EngineLost("gone")}, {"update 2": EngineLost("gone")}),
}


class Measuring(Engine):
    """Notes what the trainer has on the device, in bytes beside ``empty``, and the most that came to the host."""

    def __init__(self, empty: int) -> None:
        super().__init__()
        self._empty = empty
        self.loading: list[int] = []  # on the device, after each bucket of the last update
        self.to_host = 0  # largest tensor, while that update was under way
        self.waking: int | None = None  # of the device, and not given back, when the cache woke

    async def start_update(self, staged: bool = False) -> None:
        self.updates, self.loading = 0, []
        await super().start_update(staged)

    async def update(self, info: UpdateInfo) -> None:
        await super().update(info)
        self.loading.append(held() - self._empty)
        self.to_host = max(moved, default=0)

    async def wake(self, tags: Any) -> None:
        if "kv_cache" in tags:
            self.waking = reserved() - self._empty
        await super().wake(tags)


class Starting(Directory):
    """A registry to which a third engine comes when it has become empty, as if the launcher had replaced one."""

    def __init__(self, empty: int, **engines: Engine) -> None:
        super().__init__(**engines)
        self._empty = empty
        self.third = Measuring(empty)
        self.at_start: int | None = None  # of the device, and not given back, when it came

    async def remove_engine(self, engine_id: str, reason: str) -> None:
        await super().remove_engine(engine_id, reason)
        if not self.records:
            self.at_start = reserved() - self._empty
            self.add("third", self.third)


class Updater:
    """What phases need of a coordinator, over a fleet on this thread's loop."""

    def __init__(self, fleet: Fleet, runner: asyncio.Runner) -> None:
        self._fleet, self._runner = fleet, runner

    def suspend(self) -> None:
        self._runner.run(self._fleet.suspend())

    def publish(self, version: Version, weights: Weights, *, wake: bool = True) -> SyncReport:
        return self._runner.run(self._fleet.publish(version, weights, wake=wake))

    def defer_late(self) -> None:
        raise AssertionError("no device is lent")


def all_turns(there: Fsdp2Backend) -> dict[str, Any]:
    """What each of SCENARIOS finds."""
    return {name: turn(there, *faults) for name, faults in SCENARIOS.items()}


def turn(there: Fsdp2Backend, *faults: dict[str, Exception]) -> dict[str, Any]:
    """The publication at the start of a run, and that after a step, in which the engines have these faults."""
    there.sleep()
    give_back(torch.device(there.device))
    empty = reserved()
    there.wake()
    HandedOver.buckets.clear()
    sync = WeightSyncConfig(transport="nccl", bucket_bytes=BUCKET)
    outlet = Outlet(0, sync, "127.0.0.1", 60.0, there.device)
    shards = RankShards(outlet, {})
    one, other = Measuring(empty), Measuring(empty)
    directory = Starting(empty, one=one, other=other)
    fleet = make_fleet(directory, "nccl", engine_wait_s=30, sync=sync)

    def offload(engines_sleep: bool) -> None:
        outlet.keep(stays=engines_sleep)
        there.sleep()
        give_back(torch.device(there.device))
        moved.clear()

    with asyncio.Runner() as runner:
        phase = TakeTurns(Updater(fleet, runner), lambda: None, there.wake, offload)
        outlet.offer(there.sharded_weights())
        phase.after_train(Version(0, 0), shards)
        at_start = max(one.loading + other.loading)
        phase.before_train()
        one.faults, other.faults = (dict(some) for some in faults)
        weights = there.sharded_weights()
        copy = sum(tensor.nbytes for tensor in weights.held.values())
        outlet.offer(weights)
        del weights
        report = phase.after_train(Version(0, 1), shards)
        after = held() - empty
        late = Measuring(empty)
        directory.add("late", late)
        runner.run(catch_up(fleet, directory))
        runner.run(fleet.close())
    shards.close()
    there.wake()
    served = directory.third if one.dead else one
    return {
        "engines": sorted(report.engines),
        "at the start": at_start,
        "loading": [nbytes / copy for nbytes in one.loading],
        "to the host": one.to_host,
        "waking": [engine.waking for engine in (one, other) if engine.waking is not None],
        "replaced": directory.at_start,
        "after": after,
        "late as others": late.weights == served.weights,
    }


async def catch_up(fleet: Fleet, directory: Directory) -> None:
    """Let the fleet bring an engine up to date."""
    running = asyncio.create_task(fleet.keep_caught_up())
    await eventually(lambda: directory.confirmed)
    running.cancel()
