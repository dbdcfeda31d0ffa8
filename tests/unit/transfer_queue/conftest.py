"""A fake task source, and a store with everything it emits."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rl_async.messages import Leased, LeasedGroup, Task, TrajectoryHeader, Version, VersionRun
from rl_async.transfer_queue.policy import QueueSettings
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import Transition


class CountingSource:
    """Tasks t0, t1, ..."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self, step: int = 0) -> Task:
        self.taken += 1
        return task(self.taken - 1)

    def cursor(self) -> bytes:
        return str(self.taken).encode()

    def seek(self, cursor: bytes) -> None:
        self.taken = int(cursor)


def task(number: int) -> Task:
    return Task(task_id=f"t{number}", data_source="fake", prompt=[{"role": "user", "content": "?"}], ground_truth="1")


@dataclass
class Rig:
    """A store driven by hand at time ``now``."""

    store: Store
    source: CountingSource
    seen: list[Transition] = field(default_factory=list)
    now: float = 0.0

    def lease(self, worker: str = "w", max_groups: int = 100) -> list[LeasedGroup]:
        self.store.renew(worker, self.now)
        leased = self.store.lease(worker, max_groups, self.now)
        assert isinstance(leased, Leased)
        return leased.groups

    def header(self, group: LeasedGroup, sample: int, **changes: Any) -> TrajectoryHeader:
        values: dict[str, Any] = {
            "group_id": group.group_id,
            "sample": sample,
            "attempt": group.attempt,
            "partition": group.partition,
            "episode_id": f"{group.group_id}-{sample}",
            "segment": 0,
            "tokens": 4,
            "sampled": 2,
            "reward": 1.0,
            "finish_reason": "stop",
            "versions": [VersionRun(group.min_version, 0, 2)],
            "tokens_sha256": f"{group.group_id}-{sample}-{group.attempt}",
            "nbytes": 10,
        }
        return TrajectoryHeader(**(values | changes))

    def put_all(self, groups: list[LeasedGroup], worker: str = "w") -> None:
        for group in groups:
            for sample in group.samples:
                answer = self.store.put(worker, [self.header(group, sample)], self.now)
                assert type(answer).__name__ == "Done", answer

    def publish(self, step: int, lineage: int = 0) -> None:
        answer = self.store.publish(Version(lineage, step), [])
        assert type(answer).__name__ == "Done", answer

    def of(self, kind: type[Transition]) -> list[Any]:
        return [transition for transition in self.seen if isinstance(transition, kind)]


@pytest.fixture
def make_rig() -> Any:
    """``make_rig(**settings)`` with two samples a group, two groups a step and two held-out tasks."""

    def make(**changes: Any) -> Rig:
        values: dict[str, Any] = {"steps": 10, "batch_groups": 2, "group_size": 2, "max_attempts": 2, "lease_s": 10.0}
        source = CountingSource()
        seen: list[Transition] = []
        store = Store(QueueSettings(**(values | changes)), source, [task(100), task(101)], seen.append)
        return Rig(store, source, seen)

    return make
