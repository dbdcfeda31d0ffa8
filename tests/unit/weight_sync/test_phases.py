"""The order in which engines and trainer use shared devices."""

from collections.abc import Callable, Sequence

import pytest

from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.coordinator import (
    EngineUpdater,
    IdleCoordinator,
    Lending,
    Mode,
    Phase,
    TakeTurns,
    build_phase,
    shares_devices,
)
from rl_async.weight_sync.protocol import SyncReport


class Recorder:
    """Writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def publish(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        self.calls.append(f"publish {version}")
        return SyncReport(
            version=version, seconds=1.0, waiting_seconds=0.0, pause_seconds=0.5, nbytes=3, engines=["a"], failures=[]
        )

    def publish_beside(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        report = self.publish(version, buckets)
        self.calls[-1] += " beside"
        return report

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
