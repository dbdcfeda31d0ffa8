"""Held-out evaluation while training goes on: asked for after a step, collected when it is done."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rl_async.errors import RlAsyncError
from rl_async.messages import NotReady, Reply, Reserved, Trajectory
from rl_async.trainer.batching import RowKey

log = logging.getLogger("rl_async.evaluation")


class EvalVerbs(Protocol):
    """The verbs of the queue's blocking client that evaluation uses."""

    def evaluate(self, eval_id: int) -> Reply: ...
    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady: ...
    def fetch(self, rows: Sequence[RowKey]) -> list[Trajectory]: ...


class Evaluations:
    """Asks the queue to sample the held-out tasks (partition ``eval``) and reports their mean reward.

    One evaluation runs at a time; one that falls due while another runs is skipped, except the last.
    """

    def __init__(self, queue: EvalVerbs, every: int, record: Callable[[int, list[Trajectory]], None]) -> None:
        self._queue, self._every, self._record = queue, every, record
        self._running: int | None = None

    def after_step(self, completed: int) -> dict[str, float]:
        """Call after each step with the number of completed steps. Returns metrics of an evaluation that is done."""
        metrics = self._collect(0.0)
        if self._every and completed % self._every == 0 and self._running is None:
            self._start(completed)
        return metrics

    def finish(self, completed: int, timeout_s: float) -> dict[str, float]:
        """Evaluate the final weights and wait for the result. Raises RlAsyncError after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        if self._running is not None and self._running != completed:
            self._wait(deadline)
        if self._running is None:
            self._start(completed)
        return self._wait(deadline)

    def _start(self, completed: int) -> None:
        self._queue.evaluate(completed)
        self._running = completed

    def _wait(self, deadline: float) -> dict[str, float]:
        while self._running is not None:
            metrics = self._collect(1.0)
            if metrics:
                return metrics
            if time.monotonic() > deadline:
                raise RlAsyncError(f"the evaluation after step {self._running} did not finish in time")
        return {}

    def _collect(self, wait_s: float) -> dict[str, float]:
        if self._running is None:
            return {}
        reply = self._queue.eval_result(self._running, wait_s)
        if isinstance(reply, NotReady):
            return {}
        rows = self._queue.fetch([(h.group_id, h.sample) for h in reply.headers])
        self._record(self._running, rows)
        step, self._running = self._running, None
        if not rows:
            log.warning("the evaluation after step %d produced no trajectory; see the ledger for its errors", step)
            return {}
        mean = sum(row.reward for row in rows) / len(rows)
        log.info("evaluation after step %d: reward %.3f over %d trajectories", step, mean, len(rows))
        return {"eval/reward": mean, "eval/step": float(step), "eval/trajectories": float(len(rows))}
