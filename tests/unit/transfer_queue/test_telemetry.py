"""The queue's spans of an episode: as a whole, and its waits."""

from collections.abc import Mapping

import pytest

from rl_async import tracing
from rl_async.messages import Task, TrajectoryHeader, Version
from rl_async.tracing import Value
from rl_async.transfer_queue.telemetry import QueueTraces, traced_samples
from rl_async.transfer_queue.transitions import (
    Admitted,
    BatchCommitted,
    BatchReserved,
    GroupDropped,
    LeaseGiven,
    LeaseLost,
    SamplesStored,
)

Added = tuple[str, str, str]  # episode, name, error


class FakeSpans:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.added: list[Added] = []
        self.traced: set[str] = set()

    def begins(self, episode: str) -> bool:
        return episode in self.traced

    def add(
        self,
        episode: str,
        name: str,
        key: str,
        parent: str,
        times: tuple[int, int],
        error: str,
        about: Mapping[str, Value],
    ) -> None:
        assert 0 < times[0] <= times[1] and bool(parent) == (name != "episode") == (not key)
        self.added.append((episode, name, error))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> FakeSpans:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    return fake


def admitted(group: int) -> Admitted:
    task = Task(task_id="t", data_source="", prompt=[], ground_truth="")
    return Admitted(group=group, partition="train", samples=1, task=task)


def leased(group: int, attempt: int, *, traced: bool = True) -> LeaseGiven:
    return LeaseGiven(
        group=group, samples=[0], attempt=attempt, worker="w", min_version=Version(), traced=[0] if traced else []
    )


def stored(group: int, attempt: int, *, traced: bool = True) -> SamplesStored:
    header = TrajectoryHeader(
        group_id=group,
        sample=0,
        attempt=attempt,
        partition="train",
        episode_id="",
        segment=0,
        tokens=1,
        sampled=1,
        reward=0.0,
        finish_reason="stop",
        versions=[],
        tokens_hash="",
        traced=traced,
    )
    return SamplesStored(samples=[[header]])


def test_an_episode_that_is_trained(spans: FakeSpans) -> None:
    traces = QueueTraces()
    for transition in (
        admitted(3),
        leased(3, 0),
        stored(3, 0),
        BatchReserved(step=0, groups=[3]),
        BatchCommitted(step=0),
    ):
        traces(transition)
    assert spans.added == [
        ("3.0.0", "wait for worker", ""),
        ("3.0.0", "wait for batch", ""),
        ("3.0.0", "episode", ""),
    ]


def test_an_attempt_whose_worker_was_lost_has_a_trace_that_failed(spans: FakeSpans) -> None:
    traces = QueueTraces()
    lost = LeaseLost(group=3, samples=[0], worker="w", charged=True)
    for transition in (
        admitted(3),
        leased(3, 0),
        lost,
        leased(3, 1),
        stored(3, 1),
        GroupDropped(group=3, reason="late"),
    ):
        traces(transition)
    ended = [(episode, bool(error)) for episode, name, error in spans.added if name == "episode"]
    assert ended == [("3.0.0", True), ("3.0.1", True)]


def test_what_happened_before_a_restart_of_the_queue_is_not_needed(spans: FakeSpans) -> None:
    traces = QueueTraces()
    for transition in (stored(3, 0), BatchReserved(step=0, groups=[3, 4]), BatchCommitted(step=0)):
        traces(transition)
    assert ("3.0.0", "episode", "") in spans.added


def test_an_episode_without_a_trace_has_no_span(spans: FakeSpans) -> None:
    traces = QueueTraces()
    for transition in (
        admitted(3),
        leased(3, 0, traced=False),
        LeaseLost(group=3, samples=[0], worker="w", charged=True),
        leased(3, 1, traced=True),
        stored(3, 1, traced=True),
        admitted(4),
        leased(4, 0, traced=False),
        stored(4, 0, traced=False),
        BatchReserved(step=0, groups=[3, 4]),
        BatchCommitted(step=0),
    ):
        traces(transition)
    assert {episode for episode, _, _ in spans.added} == {"3.0.1"} and len(spans.added) == 3


def test_the_queue_chooses_among_the_samples_that_it_leases(spans: FakeSpans) -> None:
    spans.traced = {"3.1.0", "3.2.1"}
    assert traced_samples(3, [0, 1, 2], 0) == [1] and traced_samples(3, [0, 1, 2], 1) == [2]
