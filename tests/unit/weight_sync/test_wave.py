"""The next bucket is staged, and its size told, while engines still have one in hand."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
import torch

from rl_async.errors import EngineError, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.wave import BucketShipment, FleetMember, RequestTimes, connect, slow_ones, transfer
from tests.support.weights import make_buckets

V1 = Version(0, 1)
DEADLINE_S = 20.0


class Sender:
    """Notes what is asked of it; ``refuses`` is the bucket (from 0) that it cannot stage."""

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        self.stages = self.unstages = self.most = 0
        self.sent: list[Bucket] = []

    def init_info(self, member: int) -> InitInfo:
        return InitInfo(backend="ipc")

    def connect(self) -> None: ...

    def stage(self, bucket: Bucket) -> UpdateInfo:
        if self.stages == self.refuses:
            raise WeightSyncError("no space left")
        self.stages += 1
        self.most = max(self.most, self.stages - self.unstages)
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        self.sent.append(bucket)

    def unstage(self) -> None:
        self.unstages += 1

    def close(self) -> None: ...


class Engine:
    """Has done with bucket k only when ``ahead[k]`` buckets are staged; fails at bucket ``fails``."""

    def __init__(self, sender: Sender, ahead: Mapping[int, int], fails: int | None = None) -> None:
        self.sender, self.ahead, self.fails = sender, ahead, fails
        self.staged_at_pause: int | None = None  # None: it was not paused
        self.infos: list[UpdateInfo] = []
        self.serves: Version | None = None

    async def update(self, info: UpdateInfo) -> None:
        self.infos.append(info)
        number = len(self.infos) - 1
        while self.sender.stages < self.ahead.get(number, 0):  # noqa: ASYNC110  (stage is called in a thread)
            await asyncio.sleep(0.001)
        if number == self.fails:
            raise EngineError("the checksum differs")

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        self.staged_at_pause = self.sender.stages

    async def resume(self) -> None: ...

    async def init_transfer(self, init: InitInfo) -> None: ...

    async def start_update(self, staged: bool = False) -> None: ...

    async def finish_update(self, version: Version) -> None:
        self.serves = version

    async def version(self) -> Version | None:
        return self.serves

    async def sleep(self, level: int) -> None: ...

    async def wake(self, tags: Sequence[str]) -> None: ...

    async def boxes(self, tensors: Mapping[str, list[int]]) -> None:
        return None

    async def workers(self) -> int:
        return 1

    async def is_sleeping(self) -> bool:
        return False

    async def close(self) -> None: ...


BUCKETS = list(make_buckets([(f"w{i}", torch.ones(4 + i)) for i in range(4)], 28))
SIZES = [bucket.nbytes for bucket in BUCKETS]


def member(engine: Engine) -> FleetMember:
    return FleetMember(EngineRecord(engine_id="e", url="e", kind="test"), engine)


async def test_a_bucket_is_staged_while_the_one_before_is_in_hand_and_no_more_than_that() -> None:
    sender = Sender()
    engine = Engine(sender, {0: 2, 1: 3, 2: 4})
    outcome = await transfer([member(engine)], BucketShipment(sender, BUCKETS), V1, DEADLINE_S)
    assert outcome.clean and engine.serves == V1
    assert sender.sent == BUCKETS and engine.staged_at_pause == 1
    assert (sender.stages, sender.unstages, sender.most) == (4, 4, 2)
    assert [info.next_bytes for info in engine.infos] == [*SIZES[1:], 0] == [20, 24, 28, 0]


async def test_nothing_follows_a_bucket_that_failed() -> None:
    sender = Sender()
    engine = Engine(sender, {1: 3}, fails=1)
    outcome = await transfer([member(engine)], BucketShipment(sender, BUCKETS), V1, DEADLINE_S)
    (failure,) = outcome.failures
    assert failure.engine_id == "e" and "bucket 2/4: EngineError: the checksum differs" in str(failure)
    assert (len(engine.infos), sender.stages, engine.serves) == (2, 3, None)


@pytest.mark.parametrize("refuses", [0, 2])
async def test_a_bucket_that_cannot_be_staged_is_a_fault_of_this_process(refuses: int) -> None:
    sender = Sender(refuses)
    engine = Engine(sender, {})
    with pytest.raises(WeightSyncError, match="no space left"):
        await transfer([member(engine)], BucketShipment(sender, BUCKETS), V1, DEADLINE_S)
    assert (len(engine.infos), engine.serves) == (refuses, None)
    assert engine.staged_at_pause == (None if refuses == 0 else 1), "no engine stops for weights that cannot come"


async def test_where_an_engine_failed_as_well_the_engine_is_named() -> None:
    sender = Sender(refuses=2)
    outcome = await transfer([member(Engine(sender, {}, fails=1))], BucketShipment(sender, BUCKETS), V1, DEADLINE_S)
    assert [failure.engine_id for failure in outcome.failures] == ["e"]


def updated(engine: FleetMember, *seconds: float) -> None:
    engine.times.begin()
    for each in seconds:
        engine.times.took(each, answered=True)


@pytest.mark.parametrize("at", [0, 3, 7])
def test_an_engine_is_slow_whichever_request_of_an_update_it_keeps_waiting(at: int) -> None:
    """As one that stands still nine tenths of the time does, which answers the other requests in between."""
    quick, halting = member(Engine(Sender(), {})), member(Engine(Sender(), {}))
    updated(quick, *[0.01] * 8)
    updated(halting, *[0.9 if number == at else 0.01 for number in range(8)])
    assert slow_ones([quick, halting]) == [halting]
    updated(halting, *[0.01] * 8)
    assert slow_ones([quick, halting]) == []


def test_an_unanswered_request_never_makes_an_engine_seem_quicker() -> None:
    times = RequestTimes()
    times.took(1.0, answered=True)
    usual = times.request_s
    for answered, changes in ((False, False), (True, True)):
        times.begin()
        times.took(0.01, answered=answered)
        assert (times.request_s < usual) == changes
    times.begin()
    times.took(9.0, answered=False)
    assert times.request_s > usual


async def test_joining_a_group_makes_no_engine_slow_since_it_waits_for_the_others() -> None:
    sender = Sender()
    joining = member(Engine(sender, {}))
    outcome = await connect([joining], sender, DEADLINE_S)
    assert outcome.clean and joining.times.requests == 0
