"""What our plugin makes of the queues from which vLLM reads the answers of an engine's workers."""

from typing import Any

import pytest

from rl_async.rollout_server.vllm.plugin import QueuesReadToTheEnd


class Queue:
    """Answers that have come; ``waits`` are the times for which somebody has waited for one that does not come."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.waits = list(answers), list[float | None]()

    def dequeue(self, timeout: float | None = None) -> str:
        if self.answers:
            return self.answers.pop(0)
        self.waits.append(timeout)
        raise TimeoutError


class Executor:
    """As much of vLLM's executor as the plugin touches."""

    def __init__(self, *queues: Queue) -> None:
        self.is_failed = False
        self.response_mqs: Any = queues
        self.response_mqs = QueuesReadToTheEnd(self)

    def call(self, timeout: float | None) -> list[str]:
        """As `MultiprocExecutor.collective_rpc` reads answers."""
        answers = []
        for queue in self.response_mqs:
            answer = queue.dequeue(timeout=timeout)
            if answer == "failed":
                raise RuntimeError(answer)
            answers.append(answer)
        return answers


def test_after_a_failure_the_answers_of_the_other_workers_are_read() -> None:
    executor = Executor(Queue("failed", "again"), Queue("loaded", "again"))
    with pytest.raises(RuntimeError):
        executor.call(None)
    assert not executor.is_failed
    assert executor.call(None) == ["again", "again"]


def test_a_worker_that_hangs_after_another_failed_fails_the_engine_after_a_while() -> None:
    executor = Executor(Queue("failed"), hung := Queue(), rest := Queue())
    with pytest.raises(RuntimeError):
        executor.call(None)
    assert executor.is_failed
    assert len(hung.waits) == 1 and hung.waits[0] is not None
    assert not rest.waits


def test_if_all_workers_hang_the_call_times_out_and_waits_for_no_other() -> None:
    executor = Executor(first := Queue(), second := Queue())
    with pytest.raises(TimeoutError):
        executor.call(3.0)
    assert executor.is_failed
    assert (first.waits, second.waits) == ([3.0], [])
