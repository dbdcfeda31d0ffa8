"""Evaluates on held-out tasks while training goes on: requested after a step, collected when complete."""

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from rl_async.errors import RlAsyncError, RowsLost
from rl_async.evaluation import Summary, answers_of, failed_rows, summarize_with_total
from rl_async.messages import NotReady, Trajectory, episode_rewards, mean_role_rewards
from rl_async.transfer_queue.client import SyncQueueClient

log = logging.getLogger("rl_async.evaluation")


class FinishedEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an evaluation, one line of ``evaluations.jsonl``.

    Attributes:
        step: of the version published when it was requested; no token is older.
        newest_step: of the newest version that sampled a token, above ``step`` if training went on meanwhile.
        reward: mean over episodes.
        trajectories: number of episodes, each of one or several rows.
        failed: episodes that failed in every attempt, which count as 0.
        roles: mean reward of each role, for episodes with several.
        sources: avg@k and pass@k by data source and role, and over all sources if there are several.
    """

    step: int
    newest_step: int
    reward: float
    trajectories: int
    failed: int = 0
    roles: dict[str, float] = {}
    sources: list[Summary] = []

    def metrics(self) -> dict[str, float]:
        """Return the result as metrics ``eval/...``; those of a source are named as ``Summary.metrics`` has them."""
        found = {name: value for source in self.sources for name, value in source.metrics().items()}
        found |= {f"reward/{role}": reward for role, reward in self.roles.items()}
        found |= {name: getattr(self, name) for name in ("step", "newest_step", "reward", "trajectories", "failed")}
        return {f"eval/{name}": float(value) for name, value in found.items()}


class Evaluator:
    """Has the queue sample the held-out tasks (partition ``eval``) and reports their rewards.

    An evaluation is identified by the step of the published version. One runs at a time. An evaluation that is due
    while another runs, or whose version was evaluated before, is skipped, except the last. ``record`` stores each
    result, with its rows and the images that they show. An episode passes with a reward of ``solved`` or more.
    """

    def __init__(
        self,
        queue: SyncQueueClient,
        every: int,
        record: Callable[[FinishedEvaluation, list[Trajectory], Mapping[str, bytes]], None],
        clock: Callable[[], float] = time.monotonic,
        solved: float = 1.0,
    ) -> None:
        self._queue, self._every, self._record, self._clock, self._solved = queue, every, record, clock, solved
        self._running: int | None = None
        self._requested = -1
        # From the queue's latest reply: how long no agent program has asked, and the finished groups.
        self._unattended_s = 0.0
        self._finished = 0

    def begin(self, published: int) -> None:
        """Start an evaluation of the published weights; ``after_step`` or ``finish`` returns its result."""
        self._queue.evaluate(published)
        self._running = self._requested = published
        self._finished = 0

    def after_step(self, completed: int, published: int) -> FinishedEvaluation | None:
        """Start an evaluation if one is due; call it after each step.

        ``completed`` counts steps, ``published`` is the step of the version that engines serve. Returns the result of
        an evaluation that is complete.
        """
        result = self._collect(0.0)
        if self._every and completed % self._every == 0 and self._running is None and self._requested != published:
            self.begin(published)
        return result

    def finish(
        self, published: int, timeout_s: float, waiting: Callable[[], object] = lambda: None
    ) -> list[FinishedEvaluation]:
        """Wait for a running evaluation, then evaluate the final weights.

        Raises RlAsyncError once no further group was finished for ``timeout_s``. ``waiting`` is called all the while.
        Returns the results that ``after_step`` has not returned, oldest first. An evaluation that no agent program
        plays is skipped with a warning, since the run is trained all the same.
        """
        pending, final = self._wait(timeout_s, waiting), None
        # An evaluation that still runs was skipped, and another one would find no player either.
        if self._running is None:
            if self._requested != published:
                self.begin(published)
            final = self._wait(timeout_s, waiting)
        return [result for result in (pending, final) if result is not None]

    def _wait(self, timeout_s: float, waiting: Callable[[], object]) -> FinishedEvaluation | None:
        """Wait for the running evaluation. A further group may take ``timeout_s``, counted separately with and without
        a player.

        A program that comes back late still has time, and one that comes and goes does not keep the run waiting.
        """
        result, before = None, self._clock()
        waited, finished = {"played": 0.0, "unattended": 0.0}, self._finished
        while self._running is not None:
            waiting()
            result = self._collect(1.0)
            state, now = "unattended" if self._unattended_s else "played", self._clock()
            # The number falls if rows were lost, whose episodes are played again.
            if self._finished != finished:
                waited, finished, before = dict.fromkeys(waited, 0.0), self._finished, now
            waited[state], before = waited[state] + now - before, now
            if self._running is not None and waited[state] > timeout_s:
                if state == "unattended":
                    log.warning(
                        "the evaluation of version %d is skipped: no agent program has asked a gateway for an "
                        "episode for %.0f s, so nobody plays the held-out tasks",
                        self._running,
                        self._unattended_s,
                    )
                    return None
                raise RlAsyncError(
                    f"evaluation of version {self._running}: no further task was finished within "
                    f"trainer.batch_timeout_s={timeout_s:g}"
                )
        return result

    def _collect(self, wait_s: float) -> FinishedEvaluation | None:
        if self._running is None:
            return None
        reply = self._queue.eval_result(self._running, wait_s)
        if isinstance(reply, NotReady):
            self._unattended_s, self._finished = reply.unattended_s, reply.finished
            return None
        try:
            rows = self._queue.fetch([header.key for header in reply.headers])
            media = self._queue.fetch_media(rows)
        except RowsLost as error:
            log.warning("evaluation of version %d: %s", self._running, error)
            return None
        step, self._running = self._running, None
        failed = failed_rows(reply, rows)
        rows = [*rows, *failed]
        if not rows:
            log.warning("the evaluation of version %d produced no trajectory; see the ledger for its errors", step)
            return None
        headers = [*reply.headers, *(row.header() for row in failed)]
        episodes = [row for row in rows if row.segment == 0]
        answers = answers_of(headers, {row.group_id: (row.data_source, row.task_id) for row in rows})
        result = FinishedEvaluation(
            step=step,
            newest_step=max((run.version.step for row in rows for run in row.versions), default=step),
            reward=sum(episode_rewards(headers).values()) / len(episodes),
            trajectories=len(episodes),
            failed=len(reply.failed),
            roles=mean_role_rewards(headers),
            sources=summarize_with_total(answers, self._solved),
        )
        self._record(result, rows, media)
        log.info("evaluation of version %d: reward %.3f over %d trajectories", step, result.reward, len(episodes))
        if result.failed:
            log.warning("evaluation of version %d: %d episodes failed, and count as 0", step, result.failed)
        return result
