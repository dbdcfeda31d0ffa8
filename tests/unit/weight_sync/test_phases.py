"""The order in which engines and trainer use shared devices."""

from collections.abc import Callable, Sequence
from typing import Literal

import pytest

from rl_async.messages import Version
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.phases import IdleCoordinator, build_phase
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

    def suspend(self) -> None:
        self.calls.append("suspend")

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        ("disaggregated", [], ["publish 0.1"]),
        ("colocated", ["suspend", "barrier", "onload"], ["offload", "barrier", "publish 0.1"]),
    ],
)
def test_order(mode: Literal["colocated", "disaggregated"], before: list[str], after: list[str]) -> None:
    record = Recorder()
    phase = build_phase(mode, record, barrier=record.barrier, onload=record.onload, offload=record.offload)
    phase.before_train()
    assert record.calls == before
    assert phase.after_train(Version(0, 1), []).engines == ["a"]
    assert record.calls == before + after


def test_other_ranks_move_their_optimizer_but_speak_to_no_engine() -> None:
    record = Recorder()
    phase = build_phase(
        "colocated", IdleCoordinator(), barrier=record.barrier, onload=record.onload, offload=record.offload
    )
    phase.before_train()
    assert phase.after_train(Version(0, 1), []).engines == []
    assert record.calls == ["barrier", "onload", "offload", "barrier"]
