"""Publication, isolation of failures, catch-up and suspension, with engines that live in this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec
import pytest
import torch

from rl_async.errors import EngineError, EngineLost, QueueLost, WeightSyncError
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.weight_sync import fleet as fleet_module
from rl_async.weight_sync.assembly import Assembler
from rl_async.weight_sync.buckets import Bucket, make_buckets
from rl_async.weight_sync.fleet import Fleet
from rl_async.weight_sync.options import PLAIN, SyncOptions
from rl_async.weight_sync.protocol import Backend, InitInfo, UpdateInfo
from rl_async.weight_sync.receiver import WeightReceiver

V0, V1 = Version(0, 0), Version(0, 1)


class Engine:
    """An engine over the real receiver.

    ``faults`` maps a call, ``update 2`` say, to the error it raises, once; EngineLost kills the engine.
    """

    def __init__(self, faults: Mapping[str, Exception] | None = None) -> None:
        self.faults = dict(faults or {})
        self.weights: dict[str, float] = {}
        self.receiver = WeightReceiver(Assembler(self._load))
        self.serves: Version | None = None
        self.calls: list[str] = []
        self.updates = 0
        self.kinds: list[str] = []  # of the buckets that came
        self.closed = False
        self.asleep: set[str] = set()
        self.dead: EngineLost | None = None

    def _load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.weights.update((name, tensor.sum().item()) for name, tensor in named)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        error = self.faults.pop(name, None) or self.dead
        if isinstance(error, EngineLost):
            self.dead = error
        if error is not None:
            raise error

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        self._called(f"pause {mode}")

    async def resume(self) -> None:
        self._called("resume")

    async def init_transfer(self, init: InitInfo) -> None:
        self._called("init")
        await asyncio.to_thread(self.receiver.init, init)

    async def start_update(self, staged: bool = False) -> None:
        self._called("start")
        self.receiver.start()
        if "weights" in self.asleep:
            raise EngineError("the weights are asleep")

    async def update(self, info: UpdateInfo) -> None:
        self.updates += 1
        self._called(f"update {self.updates}")
        self.kinds.append(info.kind)
        try:
            await asyncio.to_thread(self.receiver.update, info)
        except WeightSyncError as error:
            raise EngineError(str(error)) from error

    async def finish_update(self, version: Version) -> None:
        self._called("finish")
        await asyncio.to_thread(self.receiver.finish)
        self.serves = version

    async def version(self) -> Version | None:
        self._called("version")
        return self.serves

    async def sleep(self, level: int) -> None:
        self._called(f"sleep {level}")
        self.asleep |= {"weights", "kv_cache"}

    async def wake(self, tags: Sequence[str]) -> None:
        self._called(f"wake {','.join(tags)}")
        self.asleep -= set(tags)

    async def is_sleeping(self) -> bool:
        self._called("is_sleeping")
        return bool(self.asleep)

    async def close(self) -> None:
        self.closed = True


class Directory:
    """A registry whose engines are in this process."""

    def __init__(self, **engines: Engine) -> None:
        self.engines_by_url = dict(engines)
        self.records = {name: EngineRecord(engine_id=name, url=name, kind="test") for name in engines}
        self.revision = 0
        self.changed = asyncio.Event()
        self.removed: dict[str, str] = {}
        self.confirmed: list[tuple[str, Version]] = []
        self.published: tuple[Version, list[str]] | None = None
        self.lost = 0  # so many calls to come fail

    def add(self, name: str, engine: Engine) -> None:
        self.engines_by_url[name] = engine
        self.records[name] = EngineRecord(engine_id=name, url=name, kind="test")
        self._bump()

    def connect(self, record: EngineRecord) -> Engine:
        return self.engines_by_url[record.url]

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        if self.lost:
            self.lost -= 1
            raise QueueLost("the queue is away")
        if self.revision <= after:
            self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), wait_s)
        return EngineList(revision=self.revision, engines=list(self.records.values()), published=V0)

    async def publish(self, version: Version, engines: list[str]) -> None:
        self.published = (version, engines)
        for name in engines:
            self._confirm(name, version)

    async def confirm(self, engine_id: str, version: Version) -> None:
        self.confirmed.append((engine_id, version))
        self._confirm(engine_id, version)

    async def remove_engine(self, engine_id: str, reason: str) -> None:
        del self.records[engine_id]
        self.removed[engine_id] = reason
        self._bump()

    def _bump(self) -> None:
        self.revision += 1
        self.changed.set()

    def _confirm(self, name: str, version: Version) -> None:
        self.records[name] = msgspec.structs.replace(self.records[name], version=version)
        self._bump()


def buckets(value: float = 1.0) -> list[Bucket]:
    return list(make_buckets([("a", torch.full((4,), value)), ("b", torch.full((4,), value))], 16))


def make_fleet(
    directory: Directory,
    transport: Backend = "ipc",
    timeout_s: float = 5.0,
    engine_wait_s: float = 0.3,
    options: SyncOptions = PLAIN,
) -> Fleet:
    return Fleet(directory, directory.connect, transport, timeout_s, engine_wait_s, options)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("transport", ["ipc", "gloo"])
async def test_an_engine_goes_through_all_phases_and_the_group_is_made_once(transport: Backend) -> None:
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
    assert report.failures == [f"bad failed in {phase}: EngineLost: gone"]
    assert directory.removed == {"bad": report.failures[0]}
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
    assert report.failures == ["b failed in update, bucket 1/2: EngineError: out of memory"]


async def test_damaged_bytes_are_never_served() -> None:
    engine, damaged = Engine(), buckets()
    damaged[1].data[0] ^= 1
    directory = Directory(a=engine)
    with pytest.raises(WeightSyncError, match=r"bucket 2/2: EngineError: checksum of the bucket from 'b' on"):
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
    assert report.failures == ["b failed in verify: it serves 0.7, not 0.0"]


async def test_an_engine_without_an_answer_is_cut_off_at_the_deadline() -> None:
    class Silent(Engine):
        async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
            await asyncio.Event().wait()

    directory = Directory(a=Engine(), b=Silent())
    report = await make_fleet(directory, timeout_s=0.1).publish(V0, buckets())
    assert report.failures == ["b failed in pause: no answer within 0.1 s"]


async def test_publication_waits_for_a_first_engine() -> None:
    directory, engine = Directory(a=Engine({"version": EngineLost("gone")})), Engine()
    publication = asyncio.create_task(make_fleet(directory, engine_wait_s=5).publish(V0, buckets()))
    await eventually(lambda: directory.removed)
    await asyncio.sleep(0.05)
    directory.add("b", engine)
    report = await publication
    assert report.engines == ["b"]
    assert 0.05 <= report.waiting_seconds <= report.seconds


async def test_without_any_engine_the_publication_fails_at_the_deadline() -> None:
    with pytest.raises(WeightSyncError, match=r"no engine took version 0\.0 in 0\.1 s: none was registered"):
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
    await asyncio.sleep(0.05)
    assert late.calls == []  # the devices belong to the trainer

    engine.calls.clear()
    assert (await fleet.publish(V1, buckets())).engines == ["a", "late"]
    wake, ready = engine.calls.index("wake weights"), engine.calls.index("wake kv_cache")
    assert wake < engine.calls.index("start") < engine.calls.index("finish") < ready < engine.calls.index("resume")
    assert "pause keep" not in engine.calls
    assert not any(call.startswith("wake") for call in late.calls)
    loop.cancel()


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


def sparse(step: int) -> list[Bucket]:
    """Two buckets of 400 bytes, of which a few change with each step."""
    named = [(name, torch.zeros(100)) for name in ("a", "b")]
    for _, tensor in named:
        tensor[:step] = 1.0
    return list(make_buckets(named, 400))


DELTA = SyncOptions(delta=True)


async def test_an_engine_that_holds_the_last_version_gets_deltas_and_a_late_one_everything() -> None:
    engine, late = Engine(), Engine()
    directory = Directory(a=engine)
    fleet = make_fleet(directory, options=DELTA)
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
    fleet = make_fleet(directory, options=DELTA)
    await fleet.publish(V0, sparse(1))
    forgetful.receiver = WeightReceiver(Assembler(forgetful._load))  # it still says that it serves 0.0
    await asyncio.to_thread(forgetful.receiver.init, InitInfo(backend="ipc"))
    restarted.serves = None
    report = await fleet.publish(V1, sparse(2))
    assert (sorted(report.engines), report.failures) == (["a", "b"], [])
    assert forgetful.kinds[-2:] == restarted.kinds[-2:] == ["full", "full"]
    assert forgetful.weights == restarted.weights == {"a": 2.0, "b": 2.0}


async def test_an_engine_whose_delta_fails_gets_everything_before_it_is_blamed() -> None:
    engine = Engine({"update 4": EngineError("checksum")})
    fleet = make_fleet(Directory(a=engine), options=DELTA)
    await fleet.publish(V0, sparse(1))
    report = await fleet.publish(V1, sparse(2))
    assert (report.engines, report.failures) == (["a"], [])
    assert engine.weights == {"a": 2.0, "b": 2.0}


@pytest.mark.parametrize("delta", [False, True])
async def test_staged_engines_are_paused_only_to_load(delta: bool) -> None:
    engine = Engine()
    fleet = make_fleet(Directory(a=engine), options=SyncOptions(staged=True, delta=delta))
    for step in (1, 2):
        engine.calls.clear()
        await fleet.publish(Version(0, step), sparse(step))
        updates = [f"update {2 * step - 1}", f"update {2 * step}"]
        assert engine.calls[-7:] == ["start", *updates, "pause keep", "finish", "version", "resume"]
        assert engine.weights == {"a": step, "b": step}


async def test_nothing_is_loaded_of_a_staged_update_that_fails() -> None:
    engine, damaged = Engine(), sparse(2)
    fleet = make_fleet(Directory(a=engine), options=SyncOptions(staged=True))
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
    fleet = make_fleet(directory, options=SyncOptions(waves=2))
    for version in (V0, V1):
        log.clear()
        assert sorted((await fleet.publish(version, buckets())).engines) == ["a", "b", "c"]
        paused = [sum(1 if n == "pause keep" else -1 if n == "resume" else 0 for n in log[:i]) for i in range(len(log))]
        assert max(paused) == 2
        assert directory.published == (version, ["a", "c", "b"])
    assert [engine.calls.count("init") for engine in engines.values()] == [1, 1, 1], "groups are kept"


async def test_the_deadline_of_the_whole_update_names_engine_phase_and_bucket() -> None:
    class Slow(Engine):
        async def update(self, info: UpdateInfo) -> None:
            if self.updates == 1:
                await asyncio.Event().wait()
            await super().update(info)

    directory = Directory(a=Engine(), b=Slow())
    options = SyncOptions(waves=2, sync_timeout_s=1.0)
    report = await make_fleet(directory, options=options).publish(V0, buckets())
    assert report.engines == ["a"]
    why = "b failed in update, bucket 2/2: not done within weight_sync.sync_timeout_s=1 s"
    assert report.failures == [why]
    assert directory.removed == {"b": why}
