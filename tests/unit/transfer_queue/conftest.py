"""A store with everything it emits."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rl_async.messages import Done, Leased, LeasedGroup, Reserved, Task, TrajectoryHeader, Version, VersionRun
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import Transition


def task(number: int) -> Task:
    return Task(task_id=f"t{number}", data_source="fake", prompt=[{"role": "user", "content": "?"}], ground_truth="1")


@dataclass
class Rig:
    """A store driven by hand at time ``now``."""

    store: Store
    source: Counted
    seen: list[Transition] = field(default_factory=list)
    now: float = 0.0

    def lease(self, worker: str = "w", max_groups: int = 100) -> list[LeasedGroup]:
        self.store.delivery.renew(worker, self.now)
        leased = self.store.delivery.lease(worker, max_groups, self.now)
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
            "tokens_hash": f"{group.group_id}-{sample}-{group.attempt}",
            "nbytes": 10,
        }
        return TrajectoryHeader(**(values | changes))

    def put_all(self, groups: list[LeasedGroup], worker: str = "w") -> None:
        for group in groups:
            for sample in group.samples:
                answer = self.store.delivery.put(worker, [self.header(group, sample)], self.now)
                assert type(answer).__name__ == "Done", answer

    def publish(self, step: int, lineage: int = 0) -> None:
        answer = self.store.publish(Version(lineage, step), [])
        assert type(answer).__name__ == "Done", answer

    def of(self, kind: type[Transition]) -> list[Any]:
        return [transition for transition in self.seen if isinstance(transition, kind)]


@pytest.fixture
def make_rig() -> Any:
    """``make_rig(**settings)`` with two samples a group, two groups a step and two held-out tasks.

    With ``tasks`` the source repeats so many.
    """

    def make(*, tasks: int | None = None, **changes: Any) -> Rig:
        values: dict[str, Any] = {"steps": 10, "batch_groups": 2, "group_size": 2, "max_attempts": 2, "lease_s": 10.0}
        source = Counted(task if tasks is None else lambda number: task(number % tasks))
        seen: list[Transition] = []
        store = Store(QueueSettings(**(values | changes)), source, [task(100), task(101)], seen.append)
        return Rig(store, source, seen)

    return make


def train_step(rig: Rig, step: int, lineage: int = 0) -> Reserved:
    """Generate whatever may be generated, and train and publish one step."""
    rig.put_all(rig.lease())
    batch = rig.store.batches.reserve(step, rig.now)
    assert isinstance(batch, Reserved), batch
    assert rig.store.batches.commit(step) == Done()
    rig.publish(step + 1, lineage)
    return batch


def members(batch: Any) -> list[int]:
    return sorted({header.group_id for header in batch.headers})
