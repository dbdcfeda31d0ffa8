"""THE loop. Every rank runs it; rank 0 also commits, publishes and logs.

        reserve ──> fetch ──> [before_train] ──> update ──> trained.jsonl ──> commit
           ^                                                                    │
           │                                                                    v
         queue <── published <── engines <── [after_train: publish the weights] ┘ ──> checkpoint ──> metrics

Consumes batches from a BatchSource. Produces weights (to the engines, through the phase), checkpoints and metrics.
Waits for the batch of the step (deadline: trainer.batch_timeout_s) and for engines to confirm weights (deadline:
weight_sync.timeout_s). Unblocked by agent workers finishing groups, and by engines. Asked to stop, it ends the step
without publishing it, saves and returns; nothing is lost, and nothing waited for that other processes must do.
"""

import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RowsLost
from rl_async.messages import Trajectory, TrajectoryHeader, Version
from rl_async.process.heartbeat import Phase, beat
from rl_async.trainer.algorithms.algorithm import Algorithm
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.kl import KlController
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.batches.sources import BatchSource
from rl_async.trainer.checkpoints.folder import FORMAT, CheckpointSchedule, CheckpointState
from rl_async.trainer.checkpoints.saver import Saver
from rl_async.trainer.monitoring.evaluation import Evaluator, FinishedEvaluation
from rl_async.trainer.monitoring.guard import Guard
from rl_async.trainer.monitoring.queue_depth import QueueDepth
from rl_async.trainer.monitoring.records import append_evaluation, append_trained, write_trajectories
from rl_async.trainer.monitoring.stopping import StopRequest
from rl_async.trainer.monitoring.trackers import Tracking
from rl_async.trainer.publishing.publisher import Publisher
from rl_async.trainer.step.explanation import explain
from rl_async.trainer.step.metrics import batch_metrics, conversation_metrics, conversation_sums
from rl_async.trainer.step.update import Batch, Models, mask_bound, plan_batch, row_keys, update

log = logging.getLogger("rl_async.trainer")


@dataclass
class Run:
    """Everything the loop works with, built by ``__main__``. Evaluations, depth and tracking exist on rank 0 only."""

    config: RunConfig
    folder: Path
    lineage: int
    start_step: int
    models: Models
    algorithm: Algorithm
    source: BatchSource
    publisher: Publisher
    guard: Guard
    kl: KlController
    saver: Saver
    stop: StopRequest
    evaluations: Evaluator | None = None
    depth: QueueDepth | None = None
    tracking: Tracking | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def at(self, step: int, phase: Phase) -> None:
        """Say where this rank is, for ``rl-async doctor``."""
        beat(self.folder, self.rank, step, phase)


def train(run: Run) -> bool:
    """Train from ``run.start_step`` to ``trainer.steps``. False: asked to stop, it saved and left early."""
    config, steps = run.config, run.config.trainer.steps
    schedule = CheckpointSchedule(config)
    published = Version(run.lineage, run.start_step)
    run.at(run.start_step, "starting")
    run.publisher.publish(published, run.models.policy)
    run.stop.wait_for_step(True)
    for step in range(run.start_step, steps):
        began = time.perf_counter()
        run.at(step, "waiting for a batch")
        batch = take_batch(run, step)
        if batch is None:
            leave(run, step)
            return False
        have_batch = time.perf_counter()

        run.at(step, "training")
        run.publisher.before_train()
        has_device = time.perf_counter()
        updated = update(run.models, batch, run.algorithm, config, run.kl.coef)
        updated_at = time.perf_counter()
        metrics = updated.metrics
        metrics |= run.kl.after_step(metrics["loss/kl_reference"], sum(not h.baseline for h in batch.headers))
        time.sleep(max(0.0, have_batch + config.debug.min_train_s - time.perf_counter()))
        record(run, batch, updated.corrected)
        run.at(step, "meeting the ranks")
        stopping = run.stop.agreed()  # and all ranks have trained and recorded before anyone is told so
        if run.rank == 0:
            run.source.commit(step)
        trained = time.perf_counter()

        version = Version(run.lineage, step + 1)
        if not stopping and (version.step % config.weight_sync.every == 0 or version.step == steps):
            run.at(step, "publishing")
            metrics |= run.publisher.publish(version, run.models.policy)
            published = version
        synced = time.perf_counter()

        if schedule.is_due(version.step, sum(header.nbytes for header in batch.headers)):
            run.at(step, "checkpointing")
            checkpoint(run, version.step)
        forget(run)
        run.at(step, "reporting")
        metrics |= batch_metrics(batch.headers, step, mask_bound(config)) | conversations(
            run.models.data_parallel, batch
        )
        metrics |= {
            "time/wait_batch_s": have_batch - began,
            "time/train_s": trained - have_batch,
            "time/update_s": updated_at - has_device,
            "time/sync_s": synced - trained,
            "time/checkpoint_s": time.perf_counter() - synced,
            "time/step_s": time.perf_counter() - began,
        }
        report(run, step, published, metrics)
        if stopping:
            leave(run, version.step)
            return False
        watch(run, step, metrics)
    finish(run, published)
    return True


def take_batch(run: Run, step: int) -> Batch | None:
    """Wait for the batch of ``step`` and fetch the rows of it that this rank trains; again if rows went with a
    payload shard.

    None if any rank was asked to stop.
    """
    data_parallel = run.models.data_parallel
    while True:
        reserved = run.source.reserve(step, lambda: run.stop.requested)
        if run.stop.agreed() or reserved is None:
            return None
        plan = plan_batch(reserved.headers, step, run.config, data_parallel.size, run.models.row_cost)
        keys = row_keys(reserved.headers)
        mine = sorted(keys[i] for mini in plan for micro in mini.ranks[data_parallel.rank] for i in micro)
        try:
            rows = run.source.fetch(mine)
        except RowsLost as error:
            log.warning("step %d: %s", step, error)
            rows = None
        if agreed(reserved.headers, rows is not None) and rows is not None:
            return Batch(step, reserved.headers, plan, dict(zip(mine, rows, strict=True)))


def agreed(headers: Sequence[TrajectoryHeader], fetched: bool) -> bool:
    """Whether all ranks have their rows, and were told of the same attempts at the same samples. A collective."""
    attempts = zlib.crc32(repr([(*header.key, header.attempt) for header in headers]).encode())
    seen = torch.tensor([fetched, attempts, -attempts], dtype=torch.int64)
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen[0]) and seen[1].item() == -seen[2].item()


def record(run: Run, batch: Batch, corrected: Corrected) -> None:
    """Write what this rank trained: trajectories for people and replays, ``trained.jsonl`` for the audit."""
    if not run.models.data_parallel.is_recorder:
        return
    places = {key: index for index, key in enumerate(row_keys(batch.headers))}
    rows = [batch.rows[key] for key in sorted(batch.rows)]
    explanations = [explain(batch.rows[key], places[key], corrected) for key in sorted(batch.rows)]
    name = f"step-{batch.step:06d}-lineage{run.lineage}-rank{run.rank}.jsonl.gz"
    write_trajectories(run.folder / "trajectories" / name, rows, explanations)
    append_trained(run.folder / "trained.jsonl", run.lineage, batch.step, rows)


def record_evaluation(folder: Path, lineage: int, result: FinishedEvaluation, rows: list[Trajectory]) -> None:
    """Write the trajectories of an evaluation beside those that were trained, and its result as one line."""
    write_trajectories(folder / "trajectories" / f"eval-{result.step:06d}.jsonl.gz", rows)
    append_evaluation(folder / "evaluations.jsonl", lineage, result.metrics())


def conversations(data_parallel: DataParallel, batch: Batch) -> dict[str, float]:
    """Turns and tool calls per trajectory, over all ranks."""
    sums = torch.tensor(conversation_sums(list(batch.rows.values())), dtype=torch.float64)
    data_parallel.all_reduce(sums)
    return conversation_metrics(sums.tolist())


def checkpoint(run: Run, completed: int) -> None:
    """Begin to save. The source keeps what came before until ``forget`` finds the checkpoint durable."""
    snapshot = run.source.snapshot() if run.rank == 0 else b""
    state = CheckpointState(step=completed, lineage=run.lineage, kl_coef=run.kl.coef, format=FORMAT)
    run.saver.save(run.models.trained(), state, snapshot)
    if not run.config.trainer.checkpoint_async:
        run.saver.wait()


def forget(run: Run) -> None:
    """Tell the source that what came before a durable checkpoint will not be asked for again."""
    durable = run.saver.durable()
    if durable is not None and run.rank == 0:
        run.source.checkpointed(durable)


def leave(run: Run, completed: int) -> None:
    """Save ``completed`` steps and end early, as asked. The next trainer goes on from here."""
    log.info("asked to stop: saving %d completed steps", completed)
    if completed not in (run.start_step, run.saver.newest):
        checkpoint(run, completed)
    run.saver.wait()
    forget(run)
    if run.tracking:
        run.tracking.close()
    dist.barrier()


def report(run: Run, step: int, published: Version, metrics: dict[str, float]) -> None:
    """Log one step, with the result of an evaluation that ended during it."""
    if run.tracking is None:
        return
    metrics["tokens/per_s"] = metrics["rollout/tokens"] / max(metrics["time/step_s"], 1e-9)
    metrics |= run.depth.depth() if run.depth else {}
    evaluated = run.evaluations.after_step(step + 1, published.step) if run.evaluations else None
    metrics |= evaluated.metrics() if evaluated else {}
    head = {"step": step, "version": step + 1, "lineage": run.lineage, "time": time.time()}
    run.tracking.log(step, head | metrics)


def watch(run: Run, step: int, metrics: dict[str, float]) -> None:
    """Let the guard look at the step, logged by now. Raises PolicyDrifted, on all ranks alike, if it ends the run."""
    verdict = run.guard.observe(step, metrics)
    if run.rank != 0:
        return
    if verdict.warning:
        log.warning(verdict.warning)
    if verdict.max_staleness is not None:
        log.info("guard: groups are admitted for a staleness of at most %d", verdict.max_staleness)
        run.source.tighten(verdict.max_staleness)


def finish(run: Run, published: Version) -> None:
    """Wait for the last checkpoint, evaluate the final weights, and close what is open."""
    run.saver.wait()
    forget(run)
    run.stop.wait_for_step(False)
    if run.evaluations and run.tracking:
        for result in run.evaluations.finish(published.step, run.config.trainer.batch_timeout_s):
            # Trackers want steps that never decrease, and one value of a metric per step.
            run.tracking.log_evaluation(max(result.step, published.step - 1), result.metrics())
    if run.tracking:
        run.tracking.close()
    dist.barrier()
