"""Publication, isolation of failures, catch-up and suspension, with engines that live in this process."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineError, EngineLost, TrainerReplaced, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync import coordinator as fleet_module
from rl_async.weight_sync import wave
from rl_async.weight_sync.coordinator import Fleet
from rl_async.weight_sync.protocol import InitInfo, TransportName, UpdateInfo
from rl_async.weight_sync.transports.ipc import SharedMemorySender
from rl_async.weight_sync.wave import CUT_OFF, BucketShipment, FleetMember, WaveOutcome, drain, suspend, transfer
from tests.unit.weight_sync.fleet_engines import V0, V1, Directory, Engine, buckets, eventually, make_fleet, sparse


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
    sync = WeightSyncConfig(delta=delta, sync_timeout_s=2.0)
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

    slow.wait_s = 0.1
    for step in range(2, 4):
        await seconds(fleet, Version(0, step))
        await eventually(lambda step=step: directory.records["engine-5"].version == Version(0, step))
    assert directory.published == (Version(0, 3), list(engines)), "it is as fast as the others again"
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
    # The first knows nothing, and those of which the latest is more than 8 s after it are without the slow engine.
    assert served[:3] == [["a", "slow"], ["a"], ["a"]]
    assert 1 <= served[3:].count(["a", "slow"]) < 5 and not directory.removed


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


async def test_an_engine_that_a_failed_wave_left_half_awake_gives_all_its_memory_back() -> None:
    engine = Engine({"start": EngineError("not yet")})
    member = FleetMember(EngineRecord(engine_id="a", url="a", kind="test"), engine)
    await suspend(member, 5.0)
    outcome = await transfer([member], BucketShipment(SharedMemorySender(), buckets()), V0, 5.0)
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

    assert (await fleet.publish_beside(V1, buckets(2.0))).engines == ["own"]
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
