"""The queue's status as metrics."""

import logging

import pytest

from rl_async.messages import StatusReport, Version
from rl_async.trainer.monitoring import QueueDepth


class Queue:
    def __init__(self) -> None:
        self.counters: dict[str, int] = {}

    def status(self) -> StatusReport:
        return StatusReport(
            published=Version(),
            waiting=0,
            leased=1,
            ready=2,
            reserved=0,
            committed=0,
            slots_used=3,
            slots=4,
            max_staleness=1,
            admitted=5,
            payload_bytes=600,
            counters=dict(self.counters),
            oldest_lease_s=0.0,
            workers=1,
            finished=False,
        )


def test_a_queue_short_of_bytes_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue()
    depth = QueueDepth(queue)
    with caplog.at_level(logging.WARNING):
        assert depth.depth()["queue/payload_bytes"] == 600.0
        assert not caplog.messages
        for count in (1, 2):
            queue.counters["short_of_bytes"] = count
            assert depth.depth()["queue/short_of_bytes"] == count
    (message,) = caplog.messages
    assert "600 payload bytes" in message and "queue.max_bytes" in message


def test_failed_attempts_are_those_since_the_step_before() -> None:
    queue = Queue()
    queue.counters = {"failed/EpisodeTimeout": 3, "dead_letters": 1}
    depth = QueueDepth(queue)
    assert depth.depth()["rollout/failed_attempts"] == 0.0
    queue.counters = {"failed/EpisodeTimeout": 5, "failed/lost_worker": 1}
    found = {name: value for name, value in depth.depth().items() if "failed" in name}
    assert found == {
        "rollout/failed_attempts": 3.0,
        "rollout/failed_attempts/EpisodeTimeout": 2.0,
        "rollout/failed_attempts/lost_worker": 1.0,
    }
