"""Deltas, adapters, staged updates and waves: what each engine gets and when it pauses; engines in this process."""

import asyncio

import pytest
import torch

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineError, WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync.buckets import Bucket, as_adapters
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from tests.support.buckets import make_buckets
from tests.unit.weight_sync.fleet_engines import V0, V1, Directory, Engine, buckets, make_fleet, sparse

DELTA = WeightSyncConfig(delta=True)


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
    fleet = make_fleet(Directory(a=engine), sync=WeightSyncConfig(staged=True, delta=delta))
    for step in (1, 2):
        engine.calls.clear()
        await fleet.publish(Version(0, step), sparse(step))
        updates = [f"update {2 * step - 1}", f"update {2 * step}"]
        assert engine.calls[-7:] == ["start", *updates, "pause keep", "finish", "version", "resume"]
        assert engine.weights == {"a": step, "b": step}


async def test_nothing_is_loaded_of_a_staged_update_that_fails() -> None:
    engine, damaged = Engine(), sparse(2)
    fleet = make_fleet(Directory(a=engine), sync=WeightSyncConfig(staged=True))
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
    fleet = make_fleet(directory, sync=WeightSyncConfig(waves=2))
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
    sync = WeightSyncConfig(waves=2, sync_timeout_s=1.0)
    report = await make_fleet(directory, sync=sync).publish(V0, buckets())
    assert report.engines == ["a"]
    (why,) = report.failures
    assert why.startswith("b ") and "bucket 2/2" in why and "weight_sync.sync_timeout_s=1 s" in why
    assert directory.removed == {"b": why}
