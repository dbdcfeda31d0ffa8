"""Records what was trained and evaluated in the run folder, without holding up the loop."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rl_async import tracing
from rl_async.messages import RowKey, Trajectory
from rl_async.recording import evaluation_file, forget_trained, trained_file, write_trajectories
from rl_async.tracing import EPISODE
from rl_async.trainer.batches.batch import Batch
from rl_async.trainer.monitoring.evaluation import FinishedEvaluation
from rl_async.trainer.monitoring.records import append_evaluation, append_refused, append_trained
from rl_async.trainer.step.explanation import TokenOutcomes, explain

log = logging.getLogger("rl_async.trainer")

IN_FLIGHT = 2  # trajectory files that may wait to be written; a further one waits for the oldest


class Recorder:
    """Appends to ``trained.jsonl`` at once, and writes trajectories on a thread of its own.

    ``trained.jsonl`` is on disk when ``trained`` returns, before the queue is told. Trajectory files follow: ``flush``
    before a checkpoint and at the end, so that those of every step up to a checkpoint are there when it is durable.
    A rank that is killed loses at most the newest IN_FLIGHT files, of steps that a resumed run trains and writes again.
    An error of the thread is logged at once, in case the rank ends for another reason, and raised by the next call that
    waits for the file.
    """

    def __init__(self, folder: Path, lineage: int, rank: int, *, is_recorder: bool, keep: int | None = None) -> None:
        """``keep``: newest steps whose trajectories stay; None: all."""
        self._keep, self._forgotten = keep, 0  # steps before this one have no files of this rank
        self._folder, self._lineage, self._rank, self._is_recorder = folder, lineage, rank, is_recorder
        self._writer = ThreadPoolExecutor(1, "recorder")  # its thread is joined when the process exits
        self._in_flight: deque[Future[None]] = deque()

    def trained(self, batch: Batch, outcomes: TokenOutcomes, began: int = 0) -> None:
        """Record the rows that this rank trained, if it is the one of its data-parallel rank that records.

        ``began``: when the update did, for the traces of the episodes.
        """
        if not self._is_recorder:
            return
        keys = sorted(batch.rows)
        rows = [batch.rows[key] for key in keys]
        places = {header.key: index for index, header in enumerate(batch.headers)}
        file = trained_file(self._folder, batch.step, self._lineage, self._rank)

        def write() -> None:
            explanations = [explain(row, places[key], outcomes) for key, row in zip(keys, rows, strict=True)]
            write_trajectories(file, rows, explanations)
            self._forget(batch.step)

        self._submit(write)
        append_trained(self._folder / "trained.jsonl", self._lineage, batch.step, rows)
        about = {"rl_async.step": batch.step, "rl_async.rank": self._rank}
        for name in {row.episode_id: None for row in rows if row.traced}:
            tracing.add(name, "train", began, about, parent=EPISODE)

    def _forget(self, step: int) -> None:
        """Delete what is too old when ``step`` is recorded: of an earlier process all, else this rank's next file."""
        until = 0 if self._keep is None else max(0, step + 1 - self._keep)
        if until == self._forgotten + 1:
            for lineage in range(self._lineage + 1):
                trained_file(self._folder, self._forgotten, lineage, self._rank).unlink(missing_ok=True)
        elif until > self._forgotten:
            forget_trained(self._folder, until)
        self._forgotten = until

    def refused(self, step: int, tokens_hash: Mapping[RowKey, str]) -> None:
        """Record rows that came to this rank with other tokens than were announced, for the audit."""
        append_refused(self._folder / "refused.jsonl", self._lineage, step, self._rank, tokens_hash)

    def evaluated(self, result: FinishedEvaluation, rows: list[Trajectory]) -> None:
        """Record the trajectories of an evaluation beside those that were trained, then its result as one line."""

        def write() -> None:
            write_trajectories(evaluation_file(self._folder, result.step), rows)
            append_evaluation(self._folder / "evaluations.jsonl", self._lineage, result.metrics())

        self._submit(write)

    def flush(self) -> None:
        """Wait until everything is written. Raises what the thread raised."""
        while self._in_flight:
            self._in_flight.popleft().result()

    def _submit(self, write: Callable[[], None]) -> None:
        while self._in_flight and (len(self._in_flight) >= IN_FLIGHT or self._in_flight[0].done()):
            self._in_flight.popleft().result()
        self._in_flight.append(self._writer.submit(_logging_errors, write))


def _logging_errors(write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:
        log.error("recording trajectories: %s: %s", type(error).__name__, error)
        raise
