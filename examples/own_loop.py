"""A training loop of your own, in place of the one in `trainer/train.py`: take a batch, update the model, publish.

    rl-async launch --mode disaggregated --config calculator trainer.loop=examples/own_loop.py:train

Every rank of the trainer runs it. The launcher has started the queue, the engines and the agent workers, and the
trainer has joined its ranks, built or loaded the models and opened the queue; ``run`` holds all of that. Everything
between the calls is yours: another schedule of updates, a model beside the policy, metrics of your own. In a notebook,
``rl_async.launch("calculator", {"trainer.loop": train})`` takes such a function as it stands.
"""

import time

from rl_async import Version
from rl_async.trainer.batches import take_batch
from rl_async.trainer.checkpoints import CheckpointSchedule
from rl_async.trainer.train import Run, batch_metrics, begin
from rl_async.trainer.update import update


def train(run: Run) -> bool:
    """Train until ``trainer.steps``; return False if the run was asked to stop before, and is saved."""
    config, models, schedule = run.config, run.models, CheckpointSchedule(run.config)
    # Engines sample nothing before they have the weights that the run starts from.
    published = begin(run)
    for step in range(run.start_step, config.trainer.steps):
        run.at(step, "waiting for a batch")
        began = time.perf_counter()
        batch = take_batch(step, run.source, run.stop, config, models.policy.data_parallel, models.row_cost)
        if batch is None:
            run.leave(step)
            return False
        run.at(step, "training")
        run.publisher.before_train()
        have_batch = time.perf_counter()
        updated = update(models, batch, run.algorithm, config, run.kl.coef)
        trained = time.perf_counter()
        # The record is on disk before the queue hears that the batch was trained, after which it is never sent again.
        run.recorder.trained(batch, updated.tokens)
        stopping = run.stop.agreed()
        if run.rank == 0:
            run.source.commit(step)
        metrics = updated.metrics | batch_metrics(batch.headers, step, None)
        if not stopping:
            run.at(step, "publishing")
            published = Version(run.lineage, step + 1)
            metrics |= run.publisher.publish(published, models.policy)
        ended = time.perf_counter()
        metrics |= {"time/wait_batch_s": have_batch - began, "time/train_s": trained - have_batch}
        metrics["time/update_s"] = trained - have_batch
        metrics |= {"time/sync_s": ended - trained, "time/step_s": ended - began}
        if schedule.is_due(step + 1, sum(header.nbytes for header in batch.headers)):
            run.checkpoint(step + 1)
        run.retire()
        run.report(step, published, metrics)
        if stopping:
            run.leave(step + 1)
            return False
    run.finish(published)
    return True
