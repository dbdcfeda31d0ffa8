"""Publications, late engines and failures: the fleet, the trainer's blocking interface to it, and the phases."""

import asyncio
import gc
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineError, EngineLost, EngineRejected, QueueLost, TrainerReplaced, WeightSyncError
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.weight_sync import coordinator as coordinator_module
from rl_async.weight_sync import coordinator as fleet_module
from rl_async.weight_sync import wave
from rl_async.weight_sync.buckets import Bucket, as_adapters
from rl_async.weight_sync.coordinator import (
    FINISH_S,
    EngineUpdater,
    Fleet,
    IdleCoordinator,
    Lending,
    Mode,
    Phase,
    TakeTurns,
    WeightCoordinator,
    build_phase,
    shares_devices,
)
from rl_async.weight_sync.protocol import Hold, InitInfo, SyncReport, TransportName, UpdateInfo
from rl_async.weight_sync.sender import RankShards
from rl_async.weight_sync.transports import SharedMemorySender
from rl_async.weight_sync.wave import (
    CUT_OFF,
    BucketShipment,
    EngineFailed,
    FleetMember,
    RequestTimes,
    WaveOutcome,
    connect,
    drain,
    slow_ones,
    suspend,
    transfer,
)
from tests.support.weights import make_buckets
from tests.unit.weight_sync.fleet_engines import V0, V1, Directory, Engine, buckets, eventually, make_fleet, sparse
from tests.unit.weight_sync.fleet_engines import Directory as EngineDirectory


@pytest.mark.parametrize("transport", ["nearest", "ipc", "gloo"])
async def test_an_engine_goes_through_all_phases_and_the_group_is_made_once(transport: TransportName) -> None:
    engine = Engine()
    directory = Directory(a=engine)
    fleet = make_fleet(directory, transport, timeout_s=30)
    report = await fleet.publish(V0, buckets())
    update = ["pause keep", "start", "update 1", "update 2", "finish", "version", "resume"]
    assert engine.calls == ["version", "init", "is_sleeping", *update]
    assert directory.published == (V0, ["a"])
    assert (report.engines, report.failures, report.nbytes) == (["a"], [], 32)

    engine.calls.clear()
    await fleet.publish(V1, buckets(2.0))
    assert engine.calls == ["version", *[c.replace("1", "3").replace("2", "4") for c in update]]
    assert engine.weights == {"a": 8.0, "b": 8.0}
    await fleet.close()
    assert engine.closed


async def test_each_stage_of_an_update_is_told_with_its_engine_and_version() -> None:
    told: list[tuple[str, str, str]] = []
    directory = Directory(good=Engine(), bad=Engine({"finish": EngineLost("gone")}))
    fleet = make_fleet(directory, note=lambda *stage: told.append(stage))
    await fleet.publish(V0, buckets())
    assert {version for _, version, _ in told} == {str(V0)}
    good = [stage for engine, _, stage in told if engine == "good"]
    assert good[:1] == ["probe"] and good[-3:] == ["verify", "resume", ""]
    assert [stage for stage in good if "bucket" in stage] == ["update, bucket 1/2"], "the next came within a second"
    bad = [stage for engine, _, stage in told if engine == "bad"]
    assert "finish" in bad and "resume" not in bad and bad[-1] == CUT_OFF


@pytest.mark.parametrize("transport", ["nearest", "ipc", "gloo", "disk"])
async def test_every_worker_of_an_engine_takes_the_weights(transport: TransportName, tmp_path: Path) -> None:
    engines = {"two": Engine(workers=2), "one": Engine(), "three": Engine(workers=3)}
    sync = WeightSyncConfig(folder=str(tmp_path / "weights"))
    fleet = make_fleet(Directory(**engines), transport, timeout_s=30, sync=sync)
    for step in (1, 2):
        report = await fleet.publish(Version(0, step), buckets(float(step)))
        assert (report.engines, report.failures) == (list(engines), [])
        for engine in engines.values():
            assert engine.of_workers == [{"a": 4.0 * step, "b": 4.0 * step}] * len(engine.receivers)
    await fleet.close()


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("version", "probe"),
        ("init", "init"),
        ("pause keep", "pause"),
        ("start", "start"),
        ("update 2", "update, bucket 2/2"),
        ("finish", "finish"),
        ("resume", "resume"),
    ],
)
async def test_a_lost_engine_is_named_with_its_phase_and_the_other_is_served(call: str, phase: str) -> None:
    good, bad = Engine(), Engine({call: EngineLost("gone")})
    directory = Directory(good=good, bad=bad)
    report = await make_fleet(directory).publish(V0, buckets())
    assert report.engines == ["good"]
    (why,) = report.failures
    assert why.startswith("bad ") and phase in why and "EngineLost: gone" in why
    assert directory.removed == {"bad": why}
    assert directory.published == (V0, ["good"])
    assert good.calls[-1] == "resume"
    assert good.weights == {"a": 4.0, "b": 4.0}
    assert bad.closed


async def test_an_error_that_may_be_anothers_fault_gets_a_second_chance_alone() -> None:
    engines = {"a": Engine(), "b": Engine({"update 1": EngineError("connection closed by peer")})}
    directory = Directory(**engines)
    report = await make_fleet(directory).publish(V0, buckets())
    assert (sorted(report.engines), report.failures) == (["a", "b"], [])
    assert [engine.calls.count("resume") for engine in engines.values()] == [1, 1]


async def test_a_group_that_failed_is_not_used_again() -> None:
    engines = {"a": Engine(), "b": Engine({"update 1": EngineError("connection closed by peer")})}
    fleet = make_fleet(Directory(**engines))
    for version, opened in ((V0, "together and alone"), (V1, "together"), (Version(0, 2), "")):
        for engine in engines.values():
            engine.calls.clear()
        assert (await fleet.publish(version, buckets())).failures == []
        expected = len(opened.split(" and ")) if opened else 0
        assert [engine.calls.count("init") for engine in engines.values()] == [expected] * 2, version


class Joining(Engine):
    """Keeps how it was told to join each group."""

    def __init__(self, faults: Mapping[str, Exception] | None = None) -> None:
        super().__init__(faults)
        self.joined: list[InitInfo] = []

    async def init_transfer(self, init: InitInfo) -> None:
        self.joined.append(init)
        await super().init_transfer(init)


async def test_engines_are_tried_together_once_more_after_a_loss_and_then_each_alone(tmp_path: Path) -> None:
    """On disk each group has a folder of its own."""
    a, b = Joining(), Joining()
    directory = Directory(
        a=a, b=b, first=Engine({"init": EngineLost("gone")}), second=Engine({"start": EngineLost("gone")})
    )
    fleet = make_fleet(directory, "disk", sync=WeightSyncConfig(folder=str(tmp_path / "weights")))
    report = await fleet.publish(V0, buckets())
    assert sorted(report.engines) == ["a", "b"] and sorted(directory.removed) == ["first", "second"]
    assert [one.folder == other.folder for one, other in zip(a.joined, b.joined, strict=True)] == [True, True, False]


async def test_a_group_s_collectives_end_before_the_requests_that_wait_for_them() -> None:
    engine = Joining()
    await make_fleet(Directory(a=engine), "gloo", timeout_s=30).publish(V0, buckets())
    assert [info.timeout_s for info in engine.joined] == [15.0]


async def test_a_living_engine_is_not_blamed_for_the_death_of_another() -> None:
    victim, dead = Engine({"update 1": EngineError("connection closed by peer")}), Engine({"update 1": EngineLost("")})
    report = await make_fleet(Directory(victim=victim, dead=dead)).publish(V0, buckets())
    assert report.engines == ["victim"]
    assert [failure.split()[0] for failure in report.failures] == ["dead"]
    assert victim.calls.count("start") == 2


async def test_an_engine_that_fails_alone_is_cut_off() -> None:
    faults = {f"update {n}": EngineError("out of memory") for n in (1, 2)}
    directory = Directory(a=Engine(), b=Engine(faults))
    report = await make_fleet(directory).publish(V0, buckets())
    assert report.engines == ["a"]
    (why,) = report.failures
    assert why.startswith("b ") and "bucket 1/2" in why and "EngineError: out of memory" in why


async def test_damaged_bytes_are_never_served() -> None:
    engine, damaged = Engine(), buckets()
    damaged[1].data[0] ^= 1
    directory = Directory(a=engine)
    with pytest.raises(WeightSyncError, match=r"bucket 2/2: EngineError: .*'b'.* checksum"):
        await make_fleet(directory).publish(V0, damaged)
    assert "finish" not in engine.calls
    assert "resume" not in engine.calls
    assert "checksum" in directory.removed["a"]


async def test_an_engine_that_serves_another_version_is_cut_off() -> None:
    class Stubborn(Engine):
        async def finish_update(self, version: Version) -> None:
            self.serves = Version(0, 7)

    directory = Directory(a=Engine(), b=Stubborn())
    report = await make_fleet(directory).publish(V0, buckets())
    (why,) = report.failures
    assert why.startswith("b ") and "verify" in why and "0.7" in why


@pytest.mark.usefixtures("simulated_time")
async def test_an_engine_without_an_answer_is_cut_off_at_the_deadline() -> None:
    class Silent(Engine):
        async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
            await asyncio.Event().wait()

    directory = Directory(a=Engine(), b=Silent())
    report = await make_fleet(directory, timeout_s=0.1).publish(V0, buckets())
    (why,) = report.failures
    assert why.startswith("b ") and "pause" in why and "0.1 s" in why


class Slow(Engine):
    """Takes ``SECONDS`` for each bucket once it is ``slow``."""

    SECONDS, slow, loading, most = 1.5, True, 0, 0

    async def update(self, info: UpdateInfo) -> None:
        if self.slow:
            Slow.loading += 1
            Slow.most = max(Slow.most, Slow.loading)
            try:
                await asyncio.sleep(self.SECONDS)
            finally:
                Slow.loading -= 1
        await super().update(info)


@pytest.mark.usefixtures("simulated_time")
@pytest.mark.parametrize("delta", [True, False])
async def test_a_slow_engine_alone_is_cut_off_at_the_deadline_of_the_update(delta: bool) -> None:
    engines = {name: Engine() for name in "abc"}
    directory = Directory(**engines)
    sync = WeightSyncConfig(way="delta" if delta else "auto", sync_timeout_s=2.0)
    fleet = make_fleet(directory, sync=sync)
    await fleet.publish(V0, sparse(1))
    directory.add("slow", Slow())
    report = await fleet.publish(V1, sparse(2))
    assert sorted(report.engines) == ["a", "b", "c"] and list(directory.removed) == ["slow"]
    assert {engine.serves for engine in engines.values()} == {V1}


@pytest.mark.usefixtures("simulated_time")
async def test_engines_that_all_owe_an_answer_get_one_more_chance_alone() -> None:
    """Of engines that wait for each other in a group's collective, the requests do not tell which one is slow."""

    class SilentOnce(Engine):
        async def update(self, info: UpdateInfo) -> None:
            if not self.updates:
                self.updates += 1
                await asyncio.Event().wait()
            await super().update(info)

    engines = {name: SilentOnce() for name in "ab"}
    directory = Directory(**engines)
    fleet = make_fleet(directory, sync=WeightSyncConfig(sync_timeout_s=2.0))
    report = await fleet.publish(V0, buckets())
    assert (sorted(report.engines), report.failures, directory.removed) == (["a", "b"], [], {})
    assert all(engine.weights == {"a": 4.0, "b": 4.0} for engine in engines.values())


@pytest.mark.usefixtures("simulated_time")
async def test_no_engine_is_cut_off_for_a_slow_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, asked = wave.connect, 0

    async def slow_once(*given: Any) -> WaveOutcome:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return await connect(*given)

    monkeypatch.setattr(wave, "connect", slow_once)
    directory = Directory(a=Engine(), b=Engine())
    report = await make_fleet(directory, sync=WeightSyncConfig(sync_timeout_s=2.0)).publish(V0, buckets())
    assert (sorted(report.engines), directory.removed) == (["a", "b"], {})


@pytest.mark.usefixtures("simulated_time")
async def test_late_engines_come_up_together_and_give_way_to_a_publication() -> None:
    directory = Directory(a=Engine())
    fleet = make_fleet(directory)
    loop = asyncio.create_task(fleet.keep_caught_up())
    await fleet.publish(V0, buckets())
    Slow.most = 0
    late = {f"late-{number}": Slow() for number in range(4)}
    for name, engine in late.items():
        engine.SECONDS = 1e6
        directory.add(name, engine)
    await eventually(lambda: Slow.most == 4)
    for engine in late.values():
        engine.slow = False
    report = await fleet.publish(V1, buckets(2.0))
    assert sorted(report.engines) == ["a", *sorted(late)] and not directory.removed
    assert all(engine.serves == V1 and engine.weights == {"a": 8.0, "b": 8.0} for engine in late.values())
    loop.cancel()


class Paced(Engine):
    """Answers each request of an update after ``wait_s``."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s

    async def start_update(self, staged: bool = False) -> None:
        await asyncio.sleep(self.wait_s)
        await super().start_update(staged)

    async def update(self, info: UpdateInfo) -> None:
        await asyncio.sleep(self.wait_s)
        await super().update(info)

    async def finish_update(self, version: Version) -> None:
        await asyncio.sleep(self.wait_s)
        await super().finish_update(version)

    async def version(self) -> Version | None:
        await asyncio.sleep(self.wait_s)
        return await super().version()


@pytest.mark.usefixtures("simulated_time")
async def test_one_slow_engine_of_eight_is_waited_for_once_and_then_catches_up_beside_the_others() -> None:
    async def seconds(fleet: Fleet, version: Version) -> float:
        began = time.monotonic()
        report = await fleet.publish(version, buckets(float(version.step)))
        assert len(report.engines) >= 7
        return time.monotonic() - began

    engines = {f"engine-{n}": Paced(0.1) for n in range(8)}
    usual = await seconds(make_fleet(Directory(**engines)), V0)

    engines = {f"engine-{n}": Paced(0.1) for n in range(8)}
    directory, slow = Directory(**engines), engines["engine-5"]
    fleet = make_fleet(directory, shares=lambda record: False)
    slow.wait_s = 1.0
    catching_up = asyncio.create_task(fleet.keep_caught_up())
    assert await seconds(fleet, V0) > 5 * usual, "nobody knew that it is slow"
    assert await seconds(fleet, V1) < 1.1 * usual
    assert slow.serves == V0 and not directory.removed
    await eventually(lambda: ("engine-5", V1) in directory.confirmed)

    joined = [engine.calls.count("init") for engine in engines.values()]
    assert await seconds(fleet, Version(0, 2)) < 1.1 * usual
    await eventually(lambda: ("engine-5", Version(0, 2)) in directory.confirmed)
    assert [engine.calls.count("init") for engine in engines.values()] == joined, "the groups of both stay"

    slow.wait_s = 0.1
    for step in range(3, 5):
        await seconds(fleet, Version(0, step))
        await eventually(lambda step=step: directory.records["engine-5"].version == Version(0, step))
    assert directory.published == (Version(0, 4), list(engines)), "it is as fast as the others again"
    assert list(fleet._groups) == [tuple(engines)]
    catching_up.cancel()


async def test_the_group_of_an_engine_that_left_is_closed() -> None:
    directory = Directory(a=Engine(), b=Engine())
    fleet = make_fleet(directory)
    await fleet.publish(V0, buckets())
    (group,) = fleet._groups.values()
    closed: list[str] = []
    group.close = lambda: closed.append("closed")  # type: ignore[method-assign]
    await directory.remove_engine("a", "it left")
    await directory.remove_engine("b", "it left")
    directory.add("c", Engine())
    await fleet.publish(V1, buckets(2.0))
    assert closed == ["closed"] and list(fleet._groups) == [("c",)]


class AnswersLate(Engine):
    """Refuses an update unless it is paused, and resumes long before it answers that it did, once."""

    def __init__(self) -> None:
        super().__init__()
        self.paused, self.resumes = False, 0

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        await super().pause(mode)
        self.paused = True

    async def start_update(self, staged: bool = False) -> None:
        if not self.paused:
            raise EngineRejected("pause the engine before an update")
        await super().start_update(staged)

    async def resume(self) -> None:
        await super().resume()
        self.paused, self.resumes = False, self.resumes + 1
        if self.resumes == 1:
            await asyncio.Event().wait()


async def test_an_engine_whose_catching_up_was_interrupted_after_it_resumed_is_paused_again() -> None:
    late, directory = AnswersLate(), Directory(a=Engine())
    fleet = make_fleet(directory)
    catching_up = asyncio.create_task(fleet.keep_caught_up())
    await fleet.publish(V0, buckets())
    directory.add("late", late)
    await eventually(lambda: late.resumes)
    report = await fleet.publish(V1, buckets(2.0))
    assert (sorted(report.engines), report.failures, directory.removed) == (["a", "late"], [], {})
    assert late.weights == {"a": 8.0, "b": 8.0} and not late.paused
    catching_up.cancel()


@pytest.mark.usefixtures("simulated_time")
async def test_a_slow_engine_that_never_catches_up_is_waited_for_again() -> None:
    directory = Directory(a=Paced(0.1), slow=Paced(1.0))
    sync = WeightSyncConfig(sync_timeout_s=8.0)
    fleet = make_fleet(directory, shares=lambda record: False, sync=sync)
    served = []
    for step in range(20):
        report = await fleet.publish(Version(0, step), buckets(float(step)))
        served.append(sorted(report.engines))
    # The first knows nothing, and the slow engine takes part again once it was behind for more than 8 s.
    assert served[:3] == [["a", "slow"], ["a"], ["a"]]
    assert 1 <= served[3:].count(["a", "slow"]) < 5 and not directory.removed


@pytest.mark.usefixtures("simulated_time")
async def test_the_pause_is_that_of_engines_that_generate_beside_the_trainer() -> None:
    engines = {"own": Paced(0.1), "lent": Paced(0.1)}
    fleet = make_fleet(Directory(**engines), shares=lambda record: record.engine_id == "lent")
    engines["lent"].wait_s = 1.0
    report = await fleet.publish(V0, buckets())
    own, lent = (fleet._members[name].pause_seconds for name in engines)
    assert 1.0 < report.pause_seconds == own < lent < 10.0


@pytest.mark.usefixtures("simulated_time")
async def test_only_a_request_without_any_answer_is_owed() -> None:
    member = FleetMember(EngineRecord(engine_id="a", url="a", kind="test"), Engine())

    async def refuse() -> None:
        raise EngineError("no")

    await wave.call(member, "pause", asyncio.sleep(0.1), 1.0)
    assert not member.unanswered
    with pytest.raises(EngineFailed):
        await wave.call(member, "start", refuse(), 1.0)
    assert not member.unanswered
    with pytest.raises(EngineFailed):
        await wave.call(member, "finish", asyncio.sleep(3600), 1.0)
    assert member.unanswered and member.phase == "finish"


@pytest.mark.parametrize(
    ("hold", "sync"),
    [("no", WeightSyncConfig()), ("keep", WeightSyncConfig(way="delta")), ("stage", WeightSyncConfig(way="staged"))],
)
@pytest.mark.usefixtures("simulated_time")
async def test_shards_are_begun_with_their_version_and_leave_the_devices_while_no_engine_is_there(
    hold: Hold, sync: WeightSyncConfig
) -> None:
    class Recorded(RankShards):
        def __init__(self) -> None:
            self.calls: list[tuple[Any, ...]] = []

        def begin(self, version: Version, hold: Hold) -> None:
            self.calls.append((version, hold))

        def leave(self) -> None:
            self.calls.append(())

    shards = Recorded()
    with pytest.raises(WeightSyncError):
        await make_fleet(Directory(), sync=sync, engine_wait_s=0.1).publish(V1, shards)
    assert shards.calls[:2] == [(V1, hold), ()]


@pytest.mark.usefixtures("simulated_time")
async def test_publication_waits_for_a_first_engine() -> None:
    directory, engine = Directory(a=Engine({"version": EngineLost("gone")})), Engine()
    publication = asyncio.create_task(make_fleet(directory, engine_wait_s=5).publish(V0, buckets()))
    await eventually(lambda: directory.removed)
    await asyncio.sleep(0.05)
    directory.add("b", engine)
    report = await publication
    assert report.engines == ["b"]
    assert 0.05 <= report.waiting_seconds <= report.seconds


@pytest.mark.usefixtures("simulated_time")
async def test_without_any_engine_the_publication_fails_at_the_deadline() -> None:
    with pytest.raises(WeightSyncError, match=r"0\.0 .*0\.1 s"):
        await make_fleet(Directory(), engine_wait_s=0.1).publish(V0, buckets())


async def test_late_engines_are_caught_up_whatever_happens_to_one_of_them_or_to_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "RETRY_S", 0.01)
    directory = Directory(a=Engine())
    fleet = make_fleet(directory)
    loop = asyncio.create_task(fleet.keep_caught_up())
    await fleet.publish(V0, buckets())
    directory.lost = 2
    bad, late = Engine({"start": EngineLost("gone")}), Engine()
    directory.add("bad", bad)
    directory.add("late", late)
    await eventually(lambda: directory.confirmed)
    assert directory.confirmed == [("late", V0)]
    assert directory.removed == {"bad": "bad failed in start: EngineLost: gone"}
    assert late.weights == {"a": 4.0, "b": 4.0}
    assert sorted((await fleet.publish(V1, buckets())).engines) == ["a", "late"]
    assert not loop.done()
    loop.cancel()


async def test_suspended_engines_sleep_through_training_and_go_on_with_new_weights() -> None:
    engine, dying = Engine(), Engine({"sleep 2": EngineLost("gone")})
    directory = Directory(a=engine, dying=dying)
    fleet = make_fleet(directory)
    loop = asyncio.create_task(fleet.keep_caught_up())
    await fleet.publish(V0, buckets())
    engine.calls.clear()
    await fleet.suspend()
    await fleet.suspend()
    assert engine.calls == ["pause keep", "sleep 2"]
    assert directory.removed == {"dying": "dying failed in sleep: EngineLost: gone"}

    late = Engine()
    directory.add("late", late)
    await eventually(lambda: late.asleep)  # the devices belong to the trainer
    assert not any(call.startswith(("start", "update")) for call in late.calls)

    engine.calls.clear()
    assert (await fleet.publish(V1, buckets())).engines == ["a", "late"]
    wake, ready = engine.calls.index("wake weights"), engine.calls.index("wake kv_cache")
    assert wake < engine.calls.index("start") < engine.calls.index("finish") < ready < engine.calls.index("resume")
    assert "pause keep" not in engine.calls
    assert engine.asleep == late.asleep == set()
    loop.cancel()


async def test_an_engine_that_serves_another_version_has_failed_and_is_not_lost() -> None:
    class Forgets(Engine):
        async def finish_update(self, version: Version) -> None:
            await super().finish_update(V1)

    member, sender = FleetMember(EngineRecord(engine_id="a", url="a", kind="test"), Forgets()), SharedMemorySender()
    assert (await connect([member], sender, 5.0)).clean
    outcome = await transfer([member], BucketShipment(sender, buckets()), V0, 5.0)
    (failure,) = outcome.failures
    assert "verify" in str(failure) and not failure.lost and not outcome.done
    sender.close()


async def test_an_engine_that_a_failed_wave_left_half_awake_gives_all_its_memory_back() -> None:
    engine = Engine({"start": EngineError("not yet")})
    member, sender = FleetMember(EngineRecord(engine_id="a", url="a", kind="test"), engine), SharedMemorySender()
    await suspend(member, 5.0)
    outcome = await transfer([member], BucketShipment(sender, buckets()), V0, 5.0)
    sender.close()
    assert outcome.failures and engine.asleep == {"kv_cache"}
    await suspend(member, 5.0)
    assert engine.asleep == member.asleep == {"weights", "kv_cache"}


async def test_lent_engines_leave_the_pool_to_the_others_while_the_trainer_works() -> None:
    own, lent = Engine(), Engine()
    directory = Directory(own=own, lent=lent)
    fleet = make_fleet(directory, shares=lambda record: record.engine_id.startswith("lent"))
    loop = asyncio.create_task(fleet.keep_caught_up())
    await fleet.publish(V0, buckets())
    assert {record.version for record in directory.records.values()} == {V0}
    own.calls.clear()

    await fleet.suspend()
    assert directory.records["lent"].version is None and lent.asleep
    assert lent.calls[-2:] == ["pause abort", "sleep 2"], "requests go on elsewhere, with what was sampled"
    assert own.calls == [] and directory.records["own"].version == V0
    again = Engine()
    directory.add("lent.1", again)
    await eventually(lambda: again.asleep)

    assert (await fleet.publish(V1, buckets(2.0), wake=False)).engines == ["own"]
    await asyncio.sleep(0.05)
    assert lent.asleep and again.asleep, "nor are they caught up"
    assert directory.records["lent"].version is None and directory.records["own"].version == V1

    assert (await fleet.publish(Version(0, 2), buckets(3.0))).engines == ["own", "lent", "lent.1"]
    assert not lent.asleep and lent.weights == again.weights == own.weights == {"a": 12.0, "b": 12.0}
    assert directory.records["lent"].version == Version(0, 2)
    loop.cancel()


async def test_a_lent_engine_that_a_failed_wave_left_paused_gives_its_requests_up_before_it_sleeps() -> None:
    engine = Engine()
    member = FleetMember(EngineRecord(engine_id="lent", url="lent", kind="test"), engine, paused_at=1.0)
    await drain(member, 5.0)
    assert engine.calls == ["pause abort"] and member.paused_at == 1.0


@pytest.mark.parametrize("call", ["pause abort", "sleep 2"])
async def test_a_lent_engine_that_dies_on_its_way_to_sleep_is_cut_off_and_the_others_go_on(call: str) -> None:
    own = Engine()
    directory = Directory(own=own, lent=Engine({call: EngineLost("killed")}))
    fleet = make_fleet(directory, shares=lambda record: record.engine_id == "lent")
    await fleet.publish(V0, buckets())
    await fleet.suspend()
    assert list(directory.removed) == ["lent"] and list(directory.records) == ["own"]
    assert (await fleet.publish(V1, buckets())).engines == ["own"]


async def test_a_new_trainer_wakes_engines_that_sleep_since_the_last_one_died() -> None:
    engine = Engine()
    directory = Directory(a=engine)
    first = make_fleet(directory)
    await first.publish(V0, buckets())
    await first.suspend()  # and here its trainer is killed

    second = make_fleet(directory)
    assert (await second.publish(V1, buckets())).engines == ["a"]
    assert engine.asleep == set()
    assert engine.serves == V1
    assert directory.removed == {}


@pytest.mark.parametrize("call", ["version", "init", "pause keep", "start", "update 2", "finish", "resume"])
async def test_a_replaced_trainer_ends_and_cuts_no_engine_off(call: str) -> None:
    engines = {"a": Engine({call: TrainerReplaced("by lineage 1")}), "b": Engine()}
    directory = Directory(**engines)
    fleet = make_fleet(directory)
    with pytest.raises(TrainerReplaced):
        await fleet.publish(V0, buckets())
    assert directory.removed == {} and directory.published is None
    await fleet.close()


async def test_a_replaced_trainer_stops_bringing_engines_up_to_date() -> None:
    directory = Directory(a=Engine())
    fleet = make_fleet(directory)
    await fleet.publish(V0, buckets())
    directory.add("late", Engine({"start": TrainerReplaced("by lineage 1")}))
    async with asyncio.timeout(30):
        with pytest.raises(TrainerReplaced):
            await fleet.keep_caught_up()
    assert directory.removed == {}
    await fleet.close()


DELTA = WeightSyncConfig(way="delta")


async def test_an_engine_that_holds_the_last_version_gets_deltas_and_a_late_one_everything() -> None:
    engine, late = Engine(), Engine()
    directory = Directory(a=engine)
    fleet = make_fleet(directory, sync=DELTA)
    assert (await fleet.publish(V0, sparse(1))).nbytes == 800
    report = await fleet.publish(V1, sparse(2))
    assert (engine.kinds, report.nbytes) == (["full", "full", "delta", "delta"], 2 * (4 + 2 + 4))
    assert engine.weights == {"a": 2.0, "b": 2.0}

    directory.add("late", late)
    assert sorted((await fleet.publish(Version(0, 2), sparse(3))).engines) == ["a", "late"]
    assert (engine.kinds[4:], late.kinds) == (["delta", "delta"], ["full", "full"])
    assert late.weights == engine.weights == {"a": 3.0, "b": 3.0}
    await fleet.publish(Version(0, 3), sparse(4))
    assert (engine.kinds[6:], late.kinds[2:]) == (["delta", "delta"], ["delta", "delta"])
    assert late.weights == engine.weights == {"a": 4.0, "b": 4.0}


async def test_a_report_has_the_bytes_of_the_engine_that_got_most() -> None:
    forgetful, engine = Engine(), Engine()
    fleet = make_fleet(Directory(a=forgetful, b=engine), sync=WeightSyncConfig(way=("delta", "waves")))
    await fleet.publish(V0, sparse(1))
    # It still says that it serves 0.0, and gets everything, before the other gets deltas.
    forgetful.forget()
    await forgetful.init_transfer(InitInfo(backend="ipc"))
    assert (await fleet.publish(V1, sparse(2))).nbytes == 800
    assert (forgetful.kinds[-1], engine.kinds[-1]) == ("full", "delta")
    assert (await fleet.publish(Version(0, 2), sparse(3))).nbytes == 2 * (4 + 2 + 4)


async def test_an_engine_that_lost_its_copy_or_was_restarted_gets_everything() -> None:
    forgetful, restarted = Engine(), Engine()
    directory = Directory(a=forgetful, b=restarted)
    fleet = make_fleet(directory, sync=DELTA)
    await fleet.publish(V0, sparse(1))
    forgetful.forget()  # it still says that it serves 0.0
    await forgetful.init_transfer(InitInfo(backend="ipc"))
    restarted.serves = None
    report = await fleet.publish(V1, sparse(2))
    assert (sorted(report.engines), report.failures) == (["a", "b"], [])
    assert forgetful.kinds[-2:] == restarted.kinds[-2:] == ["full", "full"]
    assert forgetful.weights == restarted.weights == {"a": 2.0, "b": 2.0}


async def test_an_engine_whose_delta_fails_gets_everything_before_it_is_blamed() -> None:
    engine = Engine({"update 4": EngineError("checksum")})
    fleet = make_fleet(Directory(a=engine), sync=DELTA)
    await fleet.publish(V0, sparse(1))
    report = await fleet.publish(V1, sparse(2))
    assert (report.engines, report.failures) == (["a"], [])
    assert engine.weights == {"a": 2.0, "b": 2.0}


def adapted(value: float) -> list[Bucket]:
    """A base [4, 4] of ones in two buckets, to each element of which 2 * value is added."""
    pair = [("a.lora_A.weight", torch.ones(1, 4)), ("a.lora_B.weight", torch.full((4, 1), float(value)))]
    return [*make_buckets([("a.weight", torch.ones(4, 4))], 32), *as_adapters(make_buckets(pair, 400), 2.0)]


async def test_an_engine_that_holds_the_base_gets_adapters_alone_and_others_everything() -> None:
    engine, forgetful, late = Engine(), Engine(), Engine()
    directory = Directory(a=engine, b=forgetful)
    fleet = make_fleet(directory)
    assert (await fleet.publish(V0, adapted(1))).nbytes == 64 + 32
    assert engine.kinds == ["full", "full", "adapter"]
    assert engine.weights == forgetful.weights == {"a.weight": 16 * 3.0}
    forgetful.forget()  # it still says that it serves 0.0
    await forgetful.init_transfer(InitInfo(backend="ipc"))
    directory.add("late", late)
    report = await fleet.publish(V1, adapted(2))
    assert (sorted(report.engines), report.failures) == (["a", "b", "late"], [])
    assert late.kinds == forgetful.kinds[-3:] == ["full", "full", "adapter"]
    assert engine.weights == forgetful.weights == late.weights == {"a.weight": 16 * 5.0}
    report = await fleet.publish(Version(0, 2), adapted(3))
    assert (report.nbytes, engine.kinds[-1], late.kinds[3:]) == (32, "adapter", ["adapter"])
    assert engine.weights == late.weights == {"a.weight": 16 * 7.0}


def learned(value: float, base: str) -> list[Bucket]:
    """The adapters of ``adapted``, for engines that loaded the base by themselves."""
    return as_adapters([b for b in adapted(value) if b.info.kind == "adapter"], 2.0, base)


async def test_engines_with_a_base_of_their_own_get_nothing_but_adapters_also_late_ones() -> None:
    engine, restarted, late = Engine(base="files-1"), Engine(base="files-1"), Engine(base="files-1", workers=2)
    directory = Directory(a=engine, b=restarted)
    fleet = make_fleet(directory)
    assert (await fleet.publish(V0, learned(1, "files-1"))).nbytes == 32
    restarted.forget()
    restarted.serves = None
    directory.add("late", late)
    report = await fleet.publish(V1, learned(2, "files-1"))
    assert (sorted(report.engines), report.failures, report.nbytes) == (["a", "b", "late"], [], 2 * 32)
    assert engine.kinds == restarted.kinds == ["adapter", "adapter"] and late.kinds == ["adapter"]
    assert engine.weights == restarted.weights == {"a": 16 * 4.0}
    assert late.of_workers == [{"a": 16 * 4.0}] * 2


@pytest.mark.parametrize("wrong", ["another base", "whole weights"])
async def test_an_engine_with_a_base_of_its_own_refuses_other_weights(wrong: str) -> None:
    good, other = Engine(base="files-1"), Engine(base="files-2")
    directory = Directory(a=good, b=other)
    if wrong == "another base":
        report = await make_fleet(directory).publish(V0, learned(1, "files-1"))
        assert report.engines == ["a"]
        assert (
            "files-1" in report.failures[0] and "files-2" in report.failures[0] and "model.path" in report.failures[0]
        )
    else:
        with pytest.raises(WeightSyncError, match="takes no other weights"):
            await make_fleet(directory).publish(V0, buckets())
    assert other.serves is None and other.weights == {}


async def test_the_same_version_again_begins_with_its_base() -> None:
    engine = Engine()
    fleet = make_fleet(Directory(a=engine))
    for _ in range(2):
        await fleet.publish(V0, adapted(1))
    assert engine.kinds == ["full", "full", "adapter"] * 2


async def test_an_engine_that_slept_adds_adapters_to_the_base_that_it_kept() -> None:
    engine = Engine()
    fleet = make_fleet(Directory(a=engine))
    await fleet.publish(V0, adapted(1))
    await fleet.suspend()
    engine.weights.clear()
    await fleet.publish(V1, adapted(2))
    assert engine.kinds[3:] == ["adapter"]
    assert engine.weights == {"a.weight": 16 * 5.0}


@pytest.mark.parametrize("delta", [False, True])
async def test_staged_engines_are_paused_only_to_load(delta: bool) -> None:
    engine = Engine()
    fleet = make_fleet(Directory(a=engine), sync=WeightSyncConfig(way=("staged", "delta") if delta else "staged"))
    for step in (1, 2):
        engine.calls.clear()
        await fleet.publish(Version(0, step), sparse(step))
        updates = [f"update {2 * step - 1}", f"update {2 * step}"]
        assert engine.calls[-7:] == ["start", *updates, "pause keep", "finish", "version", "resume"]
        assert engine.weights == {"a": step, "b": step}


async def test_nothing_is_loaded_of_a_staged_update_that_fails() -> None:
    engine, damaged = Engine(), sparse(2)
    fleet = make_fleet(Directory(a=engine), sync=WeightSyncConfig(way="staged"))
    await fleet.publish(V0, sparse(1))
    damaged[1].data[0] ^= 1
    with pytest.raises(WeightSyncError, match="bucket 2/2"):
        await fleet.publish(V1, damaged)
    assert engine.weights == {"a": 1.0, "b": 1.0}
    assert engine.calls.count("pause keep") == 1


async def test_waves_leave_some_engines_decoding_and_publish_at_the_end() -> None:
    log: list[str] = []

    class Logged(Engine):
        def _called(self, name: str) -> None:
            log.append(name)
            super()._called(name)

    engines = {name: Logged() for name in "abc"}
    directory = Directory(**engines)
    fleet = make_fleet(directory, sync=WeightSyncConfig(way="waves"))
    for version in (V0, V1):
        log.clear()
        assert sorted((await fleet.publish(version, buckets())).engines) == ["a", "b", "c"]
        paused = [sum(1 if n == "pause keep" else -1 if n == "resume" else 0 for n in log[:i]) for i in range(len(log))]
        assert max(paused) == 2
        assert directory.published == (version, ["a", "c", "b"])
    assert [engine.calls.count("init") for engine in engines.values()] == [1, 1, 1], "groups are kept"


@pytest.mark.usefixtures("simulated_time")
async def test_the_deadline_of_the_whole_update_names_engine_phase_and_bucket() -> None:
    class Slow(Engine):
        async def update(self, info: UpdateInfo) -> None:
            if self.updates == 1:
                await asyncio.Event().wait()
            await super().update(info)

    directory = Directory(a=Engine(), b=Slow())
    sync = WeightSyncConfig(way="waves", sync_timeout_s=1.0)
    report = await make_fleet(directory, sync=sync).publish(V0, buckets())
    assert report.engines == ["a"]
    (why,) = report.failures
    assert why.startswith("b ") and "bucket 2/2" in why and "weight_sync.sync_timeout_s=1 s" in why
    assert directory.removed == {"b": why}


SYNC = WeightSyncConfig(way="ipc", timeout_s=1.0)


class IdleDirectory:
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
    directory = IdleDirectory()
    with WeightCoordinator(directory.open, lambda _: None, SYNC, engine_wait_s=0.05) as coordinator:
        assert directory.opened_in == "weight-coordinator"
        with pytest.raises(WeightSyncError, match=r"0\.0 .*0\.05 s"):
            coordinator.publish(Version(), [])
        coordinator.suspend()
    assert directory.closed
    assert coordinator_threads() == []


def test_a_directory_that_cannot_be_opened_is_reported_at_once() -> None:
    with pytest.raises(QueueLost, match="no queue"):
        WeightCoordinator(IdleDirectory(broken=True).open, lambda _: None, SYNC)
    assert coordinator_threads() == []


@pytest.mark.parametrize(
    ("error", "kind"), [(ZeroDivisionError(), WeightSyncError), (TrainerReplaced("by lineage 1"), TrainerReplaced)]
)
def test_a_catch_up_that_ended_is_not_hidden(error: Exception, kind: type[Exception]) -> None:
    class Buggy(IdleDirectory):
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
    sync = WeightSyncConfig(way="ipc", timeout_s=60)
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


def test_an_engine_that_is_slow_to_let_go_leaves_no_pending_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_module, "CLOSE_S", 0.1)
    begun, let_go = threading.Event(), threading.Event()

    class Slow(Engine):
        async def version(self) -> Version | None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
                let_go.set()
            return None

    class WithLateOne(Registry):
        async def publish(self, version: Version, engines: list[str]) -> None:
            await super().publish(version, engines)
            self.add("late", Slow())

    directory = WithLateOne(first=Engine())
    with WeightCoordinator(directory.open, directory.connect, SYNC) as weights:
        weights.publish(Version(0, 1), buckets())
        assert begun.wait(30)
        thread = weights._thread
    thread.join(30)
    assert let_go.is_set()
    del weights
    gc.collect()
    assert "destroyed" not in caplog.text


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
        empty = SyncReport(
            version=V1, seconds=0.0, waiting_seconds=0.0, pause_seconds=0.0, nbytes=0, engines=[], failures=[]
        )
        assert other.publish(V1, []) == empty
        assert directory.published == (Version(0, 1), ["slow"]) and met.empty()
        publishing.join(30)


class Recorder:
    """Writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def publish(self, version: Version, buckets: Sequence[Bucket], *, wake: bool = True) -> SyncReport:
        self.calls.append(f"publish {version}" if wake else f"publish {version} beside")
        return SyncReport(
            version=version, seconds=1.0, waiting_seconds=0.0, pause_seconds=0.5, nbytes=3, engines=["a"], failures=[]
        )

    def suspend(self) -> None:
        self.calls.append("suspend")

    def offload(self, engines_sleep: bool) -> None:
        self.calls.append(f"offload, engines {'asleep' if engines_sleep else 'awake'}")

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


def phase_of(
    mode: Mode, updater: EngineUpdater, record: Recorder, agree: Callable[[bool], bool] = bool, *, lends: bool = False
) -> Phase:
    moves = {"barrier": record.barrier, "onload": record.onload, "offload": record.offload}
    return build_phase(mode, updater, lends=lends, agree=agree, **moves)


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        ("disaggregated", [], ["publish 0.1"]),
        ("colocated", ["suspend", "onload"], ["offload, engines asleep", "barrier", "publish 0.1"]),
    ],
)
def test_order(mode: Mode, before: list[str], after: list[str]) -> None:
    record = Recorder()
    phase = phase_of(mode, record, record)
    phase.before_train()
    assert record.calls == before
    assert phase.after_train(Version(0, 1), []).engines == ["a"]
    assert record.calls == before + after


def test_other_ranks_move_their_optimizer_but_speak_to_no_engine() -> None:
    record, still_at_it = Recorder(), iter([True, True, False, False])

    def meet(mine: bool) -> bool:
        record.calls.append("meet")
        return next(still_at_it)

    phase = phase_of("colocated", IdleCoordinator(meet), record)
    phase.before_train()
    assert phase.after_train(Version(0, 1), []).engines == []
    assert record.calls == [*["meet"] * 3, "onload", "offload, engines asleep", "barrier", "meet"]


def test_at_the_start_and_if_the_weights_are_published_again_engines_are_awake() -> None:
    record = Recorder()
    phase = phase_of("colocated", record, record)
    phase.after_train(Version(0, 0), [])
    phase.before_train()
    phase.after_train(Version(0, 1), [])
    phase.after_train(Version(0, 1), [])
    asleep = [call.split()[-1] for call in record.calls if call.startswith("offload")]
    assert asleep == ["awake", "asleep", "awake"]


def lend(engines: str) -> list[str]:
    return ["agree", "defer_late", f"offload, engines {engines}", "barrier", "publish 0.1"]


TAKE_BACK = ["suspend", "onload"]


class Clock:
    """A clock that stands still unless it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_devices_are_lent_while_the_trainer_idles_for_longer_than_the_switch_takes() -> None:
    record, clock, switch_s = Recorder(), Clock(), 2.0

    def onload() -> None:
        record.calls.append("onload")
        clock.now += switch_s

    def agree(worth_it: bool) -> bool:
        record.calls.append("agree")
        return worth_it

    turns = TakeTurns(record, record.barrier, onload, record.offload)
    phase = Lending(record, turns, agree, clock)

    def step(idle_s: float) -> list[str]:
        record.calls.clear()
        clock.now += idle_s
        phase.before_train()
        phase.after_train(Version(0, 1), [])
        return list(record.calls)

    phase.after_train(Version(0, 1), [])
    assert record.calls == lend("awake"), "the first batch is always waited for"
    assert step(idle_s=5.0) == TAKE_BACK + lend("asleep")
    assert step(idle_s=3.0) == [*TAKE_BACK, "agree", "publish 0.1 beside"], "2 s there and 2 s back"
    assert step(idle_s=3.5) == ["agree", "publish 0.1 beside"]
    assert step(idle_s=4.0) == lend("asleep")
    assert step(idle_s=9.0) == TAKE_BACK + lend("asleep")


def test_all_ranks_lend_as_rank_0_does() -> None:
    record = Recorder()
    phase = phase_of("disaggregated", record, record, agree=lambda mine: False, lends=True)
    phase.after_train(Version(0, 1), [])
    assert record.calls == ["publish 0.1 beside"]
    record.calls.clear()
    phase.before_train()
    assert record.calls == []
    other = phase_of("disaggregated", IdleCoordinator(lambda mine: False), record, lends=True)
    assert other.after_train(Version(0, 1), []).engines == []
    assert record.calls == ["offload, engines awake", "barrier"]


def test_which_engines_are_on_the_trainers_devices() -> None:
    own, lent = (EngineRecord(engine_id=name, url="", kind="") for name in ("engine-0", "lent-0.1"))
    assert [shares_devices("disaggregated")(record) for record in (own, lent)] == [False, True]
    assert shares_devices("colocated")(own)


# The next bucket is staged, and its size told, while engines still have one in hand.


WAVE_V1 = Version(0, 1)
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


class WaveEngine:
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


def member(engine: WaveEngine) -> FleetMember:
    return FleetMember(EngineRecord(engine_id="e", url="e", kind="test"), engine)


async def test_a_bucket_is_staged_while_the_one_before_is_in_hand_and_no_more_than_that() -> None:
    sender = Sender()
    engine = WaveEngine(sender, {0: 2, 1: 3, 2: 4})
    outcome = await transfer([member(engine)], BucketShipment(sender, BUCKETS), WAVE_V1, DEADLINE_S)
    assert outcome.clean and engine.serves == WAVE_V1
    assert sender.sent == BUCKETS and engine.staged_at_pause == 1
    assert (sender.stages, sender.unstages, sender.most) == (4, 4, 2)
    assert [info.next_bytes for info in engine.infos] == [*SIZES[1:], 0] == [20, 24, 28, 0]


async def test_nothing_follows_a_bucket_that_failed() -> None:
    sender = Sender()
    engine = WaveEngine(sender, {1: 3}, fails=1)
    outcome = await transfer([member(engine)], BucketShipment(sender, BUCKETS), WAVE_V1, DEADLINE_S)
    (failure,) = outcome.failures
    assert failure.engine_id == "e" and "bucket 2/4: EngineError: the checksum differs" in str(failure)
    assert (len(engine.infos), sender.stages, engine.serves) == (2, 3, None)


@pytest.mark.parametrize("refuses", [0, 2])
async def test_a_bucket_that_cannot_be_staged_is_a_fault_of_this_process(refuses: int) -> None:
    sender = Sender(refuses)
    engine = WaveEngine(sender, {})
    with pytest.raises(WeightSyncError, match="no space left"):
        await transfer([member(engine)], BucketShipment(sender, BUCKETS), WAVE_V1, DEADLINE_S)
    assert (len(engine.infos), engine.serves) == (refuses, None)
    assert engine.staged_at_pause == (None if refuses == 0 else 1), "no engine stops for weights that cannot come"


async def test_where_an_engine_failed_as_well_the_engine_is_named() -> None:
    sender = Sender(refuses=2)
    outcome = await transfer(
        [member(WaveEngine(sender, {}, fails=1))], BucketShipment(sender, BUCKETS), WAVE_V1, DEADLINE_S
    )
    assert [failure.engine_id for failure in outcome.failures] == ["e"]


def updated(engine: FleetMember, *seconds: float) -> None:
    engine.times.begin()
    for each in seconds:
        engine.times.took(each, answered=True)


@pytest.mark.parametrize("at", [0, 3, 7])
def test_an_engine_is_slow_whichever_request_of_an_update_it_keeps_waiting(at: int) -> None:
    """As one that stands still nine tenths of the time does, which answers the other requests in between."""
    quick, halting = member(WaveEngine(Sender(), {})), member(WaveEngine(Sender(), {}))
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
    joining = member(WaveEngine(sender, {}))
    outcome = await connect([joining], sender, DEADLINE_S)
    assert outcome.clean and joining.times.requests == 0
