"""THE loop. Every rank runs it; rank 0 also commits, publishes and logs.

        reserve ──> fetch ──> [before_train] ──> update ──> trained.jsonl ──> commit
           ^                                                                    │
           │                                                                    v
         queue <── published <── engines <── [after_train: publish the weights] ┘ ──> checkpoint ──> metrics

Consumes batches from a BatchSource. Produces weights (to the engines, through the phase), checkpoints and metrics.
Waits for the batch of the step (deadline: trainer.batch_timeout_s) and for engines to confirm weights (deadline:
weight_sync.timeout_s). Unblocked by agent workers finishing groups, and by engines. Asked to stop, it ends the step
without publishing it, saves and returns: nothing is lost, and it waits for no other process meanwhile.
"""

import time

from rl_async import tracing
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import Version
from rl_async.trainer.batches.batch import take_batch
from rl_async.trainer.batches.layout import mask_bound
from rl_async.trainer.checkpoints.folder import CheckpointSchedule
from rl_async.trainer.step.metrics import batch_metrics, conversations
from rl_async.trainer.step.run import Run
from rl_async.trainer.step.update import update


def train(run: Run) -> bool:
    """Train from ``run.start_step`` to ``trainer.steps``. False if it was asked to stop, saved and left early."""
    config, models = run.config, run.models
    schedule = CheckpointSchedule(config)
    published = begin(run)
    for step in range(run.start_step, config.trainer.steps):
        began = time.perf_counter()
        run.at(step, "waiting for a batch")
        batch = take_batch(step, run.source, run.stop, config, models.data_parallel, models.row_cost)
        if batch is None:
            run.leave(step)
            return False
        have_batch = time.perf_counter()

        run.at(step, "training")
        run.publisher.before_train()
        has_device = time.perf_counter()
        began_update = tracing.now()
        updated = update(models, batch, run.algorithm, config, run.kl.coef)
        updated_at = time.perf_counter()
        metrics = updated.metrics
        metrics |= run.kl.after_step(metrics["loss/kl_reference"], sum(not h.baseline for h in batch.headers))
        time.sleep(max(0.0, have_batch + config.debug.min_train_s - time.perf_counter()))
        run.recorder.trained(batch, updated.tokens, began_update)
        run.at(step, "meeting the ranks")
        stopping = run.stop.agreed()  # a barrier: all ranks have trained and recorded before the queue is told
        if run.rank == 0:
            run.source.commit(step)
        trained = time.perf_counter()

        version = Version(run.lineage, step + 1)
        if not stopping and publishes_after(config, version.step):
            run.at(step, "publishing")
            metrics |= run.publisher.publish(version, models.policy)
            published = version
        synced = time.perf_counter()

        if schedule.is_due(version.step, sum(header.nbytes for header in batch.headers)):
            run.at(step, "checkpointing")
            run.checkpoint(version.step)
        run.retire()
        run.at(step, "reporting")
        metrics |= batch_metrics(batch.headers, step, mask_bound(config)) | conversations(models.data_parallel, batch)
        metrics |= run.memory.metrics()
        metrics |= {
            "time/wait_batch_s": have_batch - began,
            "time/train_s": trained - have_batch,
            "time/update_s": updated_at - has_device,
            "time/sync_s": synced - trained,
            "time/checkpoint_s": time.perf_counter() - synced,
            "time/step_s": time.perf_counter() - began,
        }
        run.report(step, published, metrics)
        if stopping:
            run.leave(version.step)
            return False
        run.watch(step, metrics)
    run.finish(published)
    return True


def begin(run: Run) -> Version:
    """Publish the weights that the run starts from; their version."""
    version = Version(run.lineage, run.start_step)
    run.at(run.start_step, "starting")
    run.publisher.publish(version, run.models.policy)
    run.started(version)
    run.stop.wait_for_step(True)
    return version


def publishes_after(config: RunConfig, steps: int) -> bool:
    """Whether a version is published after so many steps.

    In a replay after each: no engine has to load it, and the queue admits the next batch when it hears of it.
    """
    return bool(config.rollout.replay) or steps % config.weight_sync.every == 0 or steps == config.trainer.steps
