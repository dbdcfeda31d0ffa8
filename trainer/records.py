"""Records what was trained, refused and evaluated in the run folder, and keeps the lineage of the run's trainers.

``trained.jsonl`` is on disk before the queue is told; trajectories follow on a thread of their own, with an explanation
for each token: why it trained, or did not. ``Evaluator`` evaluates on held-out tasks while training goes on: requested
after a step, collected when complete.
"""

import errno
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from rl_async import tracing
from rl_async.configs.schema.algorithm import RULES
from rl_async.errors import RlAsyncError, RowsLost, TrainerReplaced, UserError
from rl_async.evaluation import Summary, answers_of, failed_rows, summarize_with_total
from rl_async.files import UNDECODABLE, append_durably, append_lines, last_line, replace_file, undamaged
from rl_async.messages import Explanation, NotReady, RowKey, RuleRun, Trajectory, episode_rewards, mean_role_rewards
from rl_async.recording import (
    TrainedRow,
    evaluation_file,
    forget_file,
    forget_trained,
    trained_file,
    write_trajectories,
)
from rl_async.tracing import EPISODE
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.batches import Batch
from rl_async.trainer.packing import Rows
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.ledger import newest_lineage

log = logging.getLogger("rl_async.trainer")
evaluation_log = logging.getLogger("rl_async.evaluation")


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
                    evaluation_log.warning(
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
            evaluation_log.warning("evaluation of version %d: %s", self._running, error)
            return None
        step, self._running = self._running, None
        failed = failed_rows(reply, rows)
        rows = [*rows, *failed]
        if not rows:
            evaluation_log.warning(
                "the evaluation of version %d produced no trajectory; see the ledger for its errors", step
            )
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
        evaluation_log.info(
            "evaluation of version %d: reward %.3f over %d trajectories", step, result.reward, len(episodes)
        )
        if result.failed:
            evaluation_log.warning("evaluation of version %d: %d episodes failed, and count as 0", step, result.failed)
        return result


LINEAGE = "lineage"


class RefusedRow(msgspec.Struct, frozen=True):
    """A row whose tokens, by ``tokens_hash``, were not those announced; one line of ``refused.jsonl``."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int
    tokens_hash: str
    rank: int


def append_trained(path: Path, lineage: int, step: int, rows: Iterable[Trajectory]) -> None:
    """Append one line per row and force them to disk, before the queue is told that the batch was trained."""
    _append(path, lineage, [TrainedRow(lineage, step, *row.key, row.tokens_hash()) for row in rows])


def _append(path: Path, lineage: int, rows: Iterable[msgspec.Struct]) -> None:
    append_durably(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows), lineage)


def append_evaluation(path: Path, lineage: int, metrics: Mapping[str, float]) -> None:
    """Append the result of one evaluation to ``path``, one JSON object with its lineage and time."""
    with append_lines(path) as file:
        file.write(msgspec.json.encode({"lineage": lineage, "time": time.time(), **metrics}) + b"\n")


class _Evaluated(msgspec.Struct):
    """Reads which version a line of ``evaluations.jsonl`` is about."""

    step: float = msgspec.field(name="eval/step", default=-1.0)


def is_evaluated(run: Path, step: int) -> bool:
    """Whether the result of the evaluation of a version is recorded."""
    path = run / "evaluations.jsonl"
    # A line without an end was torn.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    with undamaged(path):
        return any(msgspec.json.decode(line, type=_Evaluated).step == step for line in lines)


def next_lineage(run: Path, resuming: bool) -> int:
    """Return the lineage of this trainer process: 0 for a new run, one more than the last after each resume.

    It is kept in the file ``lineage`` of the run folder, not in the checkpoint: two crashes after one checkpoint make
    two lineages. Where that file is lost or damaged, the run's records tell the last one. Raises UserError if they are
    lost, too.
    """
    lineage = _last_lineage(run) + 1 if resuming else 0
    replace_file(run / LINEAGE, f"{lineage}\n".encode(), durable=True)
    return lineage


def _last_lineage(run: Path) -> int:
    """Return the newest lineage that trained the run; -1 if none did."""
    told = _written_lineage(run)
    recorded = max(newest_lineage(run / "ledger.jsonl"), _trained_lineage(run / "trained.jsonl"))
    if told is None and recorded < 0:
        raise UserError(
            f"{run / LINEAGE} is damaged, and neither ledger.jsonl nor trained.jsonl has the number that it held; "
            "write a number into it that is higher than the number of times that the run was resumed"
        )
    if told is None or told < recorded:
        log.warning("%s is lost or damaged; the run's records say %d", run / LINEAGE, recorded)
    return max(recorded, -1 if told is None else told)


def _written_lineage(run: Path) -> int | None:
    """Return the number in the file, -1 if it is missing, or None if it holds something else."""
    try:
        text = (run / LINEAGE).read_bytes().strip()
    except FileNotFoundError:
        return -1
    # Python refuses to read numbers of thousands of digits.
    return int(text) if text.isdigit() and len(text) <= 18 else None


class _LineageOfLine(msgspec.Struct):
    """Reads the lineage alone, so that a line of any version of the format will do."""

    lineage: int


def _trained_lineage(path: Path) -> int:
    """Return the lineage of the newest whole line of ``trained.jsonl``, whose lineages never fall, or -1."""
    with suppress(*UNDECODABLE):
        return msgspec.json.decode(last_line(path), type=_LineageOfLine).lineage
    return -1


def require_newest(run: Path, lineage: int) -> None:
    """Raise TrainerReplaced if a trainer of a newer lineage than this one has resumed the run.

    Raises OSError if that cannot be known.
    """
    newest = _written_lineage(run)
    if newest is None or newest < 0:
        raise OSError(errno.EIO, "damaged or lost, so a newer trainer may have resumed the run", str(run / LINEAGE))
    if newest > lineage:
        raise TrainerReplaced(f"{run}: the trainer of lineage {lineage} was replaced by one of lineage {newest}")


# --- The outcome of each token

# Significant digits of a recorded number.
DIGITS = 4


@dataclass(frozen=True)
class TokenOutcomes:
    """The outcome of each token of a batch, [M] on the host; position t of a row stands for its token t + 1.

    ``corrected`` is the correction as ``update.attributed`` completes it. ``logprobs`` is its target: log pi_old, or
    with bypass log pi_theta of the first pass.
    """

    rows: Rows
    corrected: Corrected
    logprobs: Tensor
    advantages: Tensor


def explain(row: Trajectory, index: int, outcomes: TokenOutcomes) -> Explanation:
    """Collect the outcomes of the sampled tokens of row ``index``, in order."""
    # Position t of a row in the tensors stands for token t + 1.
    sampled = int(outcomes.rows.starts[index]) + np.flatnonzero(row.loss_mask[1:])
    weights = outcomes.corrected.weights.numpy()[sampled]
    rule = outcomes.corrected.rule.numpy()[sampled]
    advantages = outcomes.advantages.numpy()[sampled]
    edges = [0, *(np.flatnonzero(np.diff(rule)) + 1).tolist(), len(rule)]
    runs = [RuleRun(RULES[rule[start]], start, end) for start, end in itertools.pairwise(edges) if start < end]
    return Explanation(
        weights=_rounded(weights),
        rules=[run for run in runs if run.rule],
        logprobs=_rounded(outcomes.logprobs.numpy()[sampled]),
        advantages=_rounded(advantages[:1] if (advantages == advantages[:1]).all() else advantages),
    )


def _rounded(weights: np.ndarray) -> list[float]:
    values = weights.astype(np.float64)
    exponents = np.floor(np.log10(np.where(values != 0, np.abs(values), 1.0))).astype(int)
    return [round(value, DIGITS - 1 - exponent) for value, exponent in zip(values.tolist(), exponents.tolist())]


# --- The recorder

# Trajectory files that may wait to be written. A further one waits for the oldest.
IN_FLIGHT = 2


class Recorder:
    """Appends to ``trained.jsonl`` at once, and writes trajectories on a thread of its own.

    ``trained.jsonl`` is on disk when ``trained`` returns, before the queue is told. Trajectory files follow: ``flush``
    before a checkpoint and at the end, so that those of every step up to a checkpoint are there when it is durable.
    A rank that is killed loses at most the newest IN_FLIGHT files, of steps that a resumed run trains and writes again.
    An error of the thread is logged at once, in case the rank ends for another reason, and raised by the next call that
    waits for the file.
    """

    def __init__(self, folder: Path, lineage: int, rank: int, *, is_recorder: bool, keep: int | None = None) -> None:
        """Keep the trajectories of the ``keep`` newest steps, by default of all."""
        # Steps before ``_forgotten`` have no files of this rank.
        self._keep, self._forgotten = keep, 0
        self._folder, self._lineage, self._rank, self._is_recorder = folder, lineage, rank, is_recorder
        # The thread is joined when the process exits.
        self._writer = ThreadPoolExecutor(1, "recorder")
        self._in_flight: deque[Future[None]] = deque()

    def trained(self, batch: Batch, outcomes: TokenOutcomes, began: int = 0) -> None:
        """Record the rows that this rank trained, if it records for its data-parallel rank.

        ``began`` is the time when the update began, for the traces of the episodes.
        """
        if not self._is_recorder:
            return
        keys = sorted(batch.rows)
        rows = [batch.rows[key] for key in keys]
        places = {header.key: index for index, header in enumerate(batch.headers)}
        file = trained_file(self._folder, batch.step, self._lineage, self._rank)

        def write() -> None:
            explanations = [explain(row, places[key], outcomes) for key, row in zip(keys, rows, strict=True)]
            write_trajectories(file, rows, explanations, batch.media)
            self._forget(batch.step)

        self._submit(write)
        append_trained(self._folder / "trained.jsonl", self._lineage, batch.step, rows)
        about = {"rl_async.step": batch.step, "rl_async.rank": self._rank}
        for name in {row.episode_id: None for row in rows if row.traced}:
            tracing.add(name, "train", began, about, parent=EPISODE)

    def _forget(self, step: int) -> None:
        """Delete files that are too old once ``step`` is recorded, those of earlier processes included."""
        until = 0 if self._keep is None else max(0, step + 1 - self._keep)
        if until == self._forgotten + 1:
            for lineage in range(self._lineage + 1):
                forget_file(trained_file(self._folder, self._forgotten, lineage, self._rank))
        elif until > self._forgotten:
            forget_trained(self._folder, until)
        self._forgotten = until

    def refused(self, step: int, tokens_hash: Mapping[RowKey, str]) -> None:
        """Record rows that this rank fetched with other tokens than were announced, for the audit."""
        lines = [RefusedRow(self._lineage, step, *key, digest, self._rank) for key, digest in tokens_hash.items()]
        _append(self._folder / "refused.jsonl", self._lineage, lines)

    def evaluated(self, result: FinishedEvaluation, rows: list[Trajectory], media: Mapping[str, bytes]) -> None:
        """Record the trajectories of an evaluation beside the trained ones, with their images, then its result."""

        def write() -> None:
            write_trajectories(evaluation_file(self._folder, result.step), rows, media=media)
            append_evaluation(self._folder / "evaluations.jsonl", self._lineage, result.metrics())

        self._submit(write)

    def flush(self) -> None:
        """Wait until everything is written. Raises what the thread raised."""
        while self._in_flight:
            self._in_flight.popleft().result()

    def _submit(self, write: Callable[[], None]) -> None:
        while self._in_flight and (len(self._in_flight) >= IN_FLIGHT or self._in_flight[0].done()):
            self._in_flight.popleft().result()

        def logged() -> None:
            try:
                write()
            except Exception as error:
                log.error("recording trajectories: %s: %s", type(error).__name__, error)
                raise

        self._in_flight.append(self._writer.submit(logged))
