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

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rl_async import tracing
from rl_async.configs.derived import compute_type
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import (
    CALL_PROBLEMS,
    TIMEOUT,
    Trajectory,
    TrajectoryHeader,
    Version,
    episode_rewards,
    has_signal,
    mean_role_rewards,
)
from rl_async.process.run_files import Phase, ProgressWriter, beat
from rl_async.trainer.actor_critic import Models, compute_rates, device_name
from rl_async.trainer.algorithms.algorithm import Algorithm
from rl_async.trainer.algorithms.losses import KlController
from rl_async.trainer.batch_layout import fresh_runs, mask_bound
from rl_async.trainer.batches import Batch, BatchSource, take_batch
from rl_async.trainer.checkpoints import FORMAT, CheckpointSchedule, CheckpointState, Saver
from rl_async.trainer.monitoring import EngineLoads, Guard, MemoryWatch, QueueDepth, StepProfiler
from rl_async.trainer.publishing import Publisher
from rl_async.trainer.ranks import DataParallel, StopRequest, as_rank_0
from rl_async.trainer.records import Evaluator, Recorder, is_evaluated
from rl_async.trainer.trackers import Tracking
from rl_async.trainer.update import update

log = logging.getLogger("rl_async.trainer")


def train(run: "Run") -> bool:
    """Train from ``run.start_step`` to ``trainer.steps``. False if it was asked to stop, saved and left early."""
    config, models, ranks = run.config, run.models, run.models.policy.data_parallel
    schedule = CheckpointSchedule(config)
    published, progress = begin(run), run.progress()
    for step in range(run.start_step, config.trainer.steps):
        began = time.perf_counter()
        run.at(step, "waiting for a batch")
        batch = take_batch(step, run.source, run.stop, config, ranks, models.row_cost)
        if batch is None:
            run.leave(step)
            return False
        have_batch = time.perf_counter()

        run.at(step, "training")
        run.publisher.before_train()
        has_device = time.perf_counter()
        began_update = tracing.now()
        updated = update(models, batch, run.algorithm, config, run.kl.coef, progress)
        updated_at = time.perf_counter()
        metrics = updated.metrics
        metrics |= run.kl.after_step(metrics["loss/kl_reference"], sum(not h.baseline for h in batch.headers))
        if config.debug:
            time.sleep(max(0.0, have_batch + config.debug.min_train_s - time.perf_counter()))
        run.recorder.trained(batch, updated.tokens, began_update)
        run.at(step, "meeting the ranks")
        # This is a barrier as well: all ranks have trained and recorded before the queue is told.
        stopping = run.stop.agreed()
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
        metrics |= batch_metrics(batch.headers, step, mask_bound(config)) | conversations(ranks, batch)
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


def begin(run: "Run") -> Version:
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


def batch_metrics(headers: Sequence[TrajectoryHeader], step: int, max_staleness: int | None) -> dict[str, float]:
    """Rewards, response lengths, and the staleness of the trained tokens.

    Rewards, those of turns included, are over scored episodes, at least one;
    ``reward/unscored_fraction`` says how many were not (a scorer failed, for one role at least). ``staleness/mean`` and
    ``staleness/max`` are over trained tokens: the step minus the step of the version that sampled each.
    ``max_staleness`` is the bound beyond which tokens were masked, or None. Greedy episodes of
    algorithm.advantage=remax count in ``reward/greedy_mean`` alone, which is over scored ones. With several roles in an
    episode its reward is the mean of theirs, and ``reward/mean/ROLE`` is each one's.
    """
    baselines = list(episode_rewards(h for h in headers if h.baseline).values())
    # Both count greedy episodes too: they were fetched from the queue, and the others are compared with them.
    nbytes = float(sum(h.nbytes for h in headers))
    without_signal = _flat_groups(headers)
    headers = [h for h in headers if not h.baseline]
    episodes = [h for h in headers if h.segment == 0]
    rewards = np.array(list(episode_rewards(headers).values()))
    runs = [(step - r.version.step, r.end - r.start) for h in headers for r in fresh_runs(h, step, max_staleness)]
    tokens = sum(count for _, count in runs)
    late = len({h.episode_id for h in headers if h.finish_reason == TIMEOUT})
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/unscored_fraction": 1.0 - len(rewards) / len(episodes),
        "reward/groups_without_signal": without_signal,
        "rollout/response_tokens_mean": sum(h.sampled for h in headers) / len(episodes),
        "rollout/tokens": float(sum(h.tokens for h in headers)),
        "staleness/mean": sum(age * count for age, count in runs) / max(tokens, 1),
        "staleness/max": float(max((age for age, _ in runs), default=0)),
        "batch/trajectories": float(len(headers)),
        "batch/episodes": float(len(episodes)),
        "batch/bytes": nbytes,
        **({"rollout/timeout_fraction": late / len(episodes)} if late else {}),
        **({"reward/greedy_mean": float(np.mean(baselines))} if baselines else {}),
        **{f"reward/mean/{role}": reward for role, reward in mean_role_rewards(headers).items()},
    }


def _flat_groups(headers: Sequence[TrajectoryHeader]) -> float:
    """Share of groups whose scored rewards are all equal, so that they have no signal."""
    groups: dict[int, list[TrajectoryHeader]] = {}
    for header in headers:
        groups.setdefault(header.group_id, []).append(header)
    return sum(not has_signal(group) for group in groups.values()) / max(len(groups), 1)


def conversations(ranks: DataParallel, batch: Batch) -> dict[str, float]:
    """Average turns and tool calls per episode over all ranks. A collective."""
    sums = torch.tensor(conversation_sums(batch.headers, list(batch.rows.values())), dtype=torch.float64)
    ranks.all_reduce(sums)
    return conversation_metrics(sums.tolist())


def conversation_sums(headers: Sequence[TrajectoryHeader], rows: Sequence[Trajectory]) -> list[float]:
    """[assistant turns, tool calls, failed tool calls, cut results, malformed calls of each kind, then for each
    episode its rows with an error] of a rank's sampled rows, to be added up over ranks; ``headers`` are those of all
    ranks' rows. A turn counts in the row that sampled it."""
    rows = [row for row in rows if not row.baseline]
    errors = {header.episode_id: 0.0 for header in headers if not header.baseline}
    for row in rows:
        errors[row.episode_id] += bool(row.error)
    turns = [turn for row in rows for turn in row.turns if row.loss_mask[turn.start : turn.end].any()]
    calls = [call for turn in turns for call in turn.tool_calls]
    return [
        float(len(turns)),
        float(len(calls)),
        float(sum(bool(call.error) for call in calls)),
        float(sum(bool(call.cut) for call in calls)),
        *(float(sum(call.problem == problem for call in calls)) for problem in CALL_PROBLEMS),
        *errors.values(),
    ]


def conversation_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Per-episode means from the summed ``conversation_sums`` of all ranks."""
    turns, calls, failed, cut, *counts = sums
    malformed, errors = counts[: len(CALL_PROBLEMS)], counts[len(CALL_PROBLEMS) :]
    episodes = len(errors)
    kinds = {f"rollout/malformed_calls/{problem}": count for problem, count in zip(CALL_PROBLEMS, malformed) if count}
    return kinds | {
        "rollout/turns_mean": turns / max(episodes, 1),
        "rollout/tool_calls_mean": calls / max(episodes, 1),
        "rollout/tool_errors_mean": failed / max(episodes, 1),
        "rollout/cut_results_mean": cut / max(episodes, 1),
        "rollout/error_fraction": sum(rows > 0 for rows in errors) / max(episodes, 1),
    }


@dataclass
class Run:
    """Everything the loop works with. Evaluations, depth, engines and tracking exist on rank 0 only."""

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
    recorder: Recorder
    profiler: StepProfiler
    memory: MemoryWatch
    evaluations: Evaluator | None = None
    depth: QueueDepth | None = None
    engines: EngineLoads | None = None
    tracking: Tracking | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def at(self, step: int, phase: Phase) -> None:
        """Record where this rank is, for ``rl-async doctor`` and in a profile."""
        beat(self.folder, self.rank, step, phase)
        self.profiler.at(step, phase)
        self.memory.at(phase)

    def progress(self) -> Callable[[str, int, int], None]:
        """Return a function that records how many of a pass's micro-batches are done, for the live view."""
        write = ProgressWriter(self.folder, f"trainer-{self.rank}")
        return lambda work, done, total: write(work, done, total, "micro-batches")

    def checkpoint(self, completed: int) -> None:
        """Begin to save. The source keeps earlier batches until ``retire`` finds the checkpoint durable."""
        self.recorder.flush()
        snapshot = self.source.snapshot() if self.rank == 0 else b""
        state = CheckpointState(step=completed, lineage=self.lineage, kl_coef=self.kl.coef, format=FORMAT)
        self.saver.save(self.models.trained(), state, snapshot)

    def retire(self) -> None:
        """Let the source drop the batches before a checkpoint that has become durable."""
        durable = self.saver.durable()
        if durable is not None and self.rank == 0:
            self.source.checkpointed(durable)

    def started(self, published: Version) -> None:
        """Begin to evaluate the initial weights if configured, or those of the checkpoint if that result was lost.

        The queue closes an evaluation that was running when the trainer ended.
        """
        if self.evaluations is None:
            return
        settings, begun = self.config.eval, self.start_step
        wanted = begun % settings.every == 0 if begun and settings.every else settings.before and not begun
        if wanted and not is_evaluated(self.folder, published.step):
            self.evaluations.begin(published.step)

    def report(self, step: int, published: Version, metrics: dict[str, float]) -> None:
        """Log one step, with the result of an evaluation that ended during it."""
        if self.tracking is None:
            return
        metrics["tokens/per_s"] = metrics["rollout/tokens"] / max(metrics["time/step_s"], 1e-9)
        device, dtype = device_name(self.models.policy.device), compute_type(self.config.model)
        metrics |= compute_rates(metrics, dist.get_world_size(), device, dtype)
        metrics |= self.depth.depth() if self.depth else {}
        metrics |= self.engines.metrics() if self.engines else {}
        evaluated = self.evaluations.after_step(step + 1, published.step) if self.evaluations else None
        metrics |= evaluated.metrics() if evaluated else {}
        head = {"step": step, "version": step + 1, "lineage": self.lineage, "time": time.time()}
        self.tracking.log(step, head | metrics)

    def watch(self, step: int, metrics: dict[str, float]) -> None:
        """Show the guard a step that has been logged. Raises PolicyDrifted on all ranks if it ends the run."""
        verdict = self.guard.observe(step, metrics)
        if self.rank != 0:
            return
        if verdict.warning:
            log.warning(verdict.warning)
        if verdict.max_staleness is not None:
            log.info("guard: groups are admitted for a staleness of at most %d", verdict.max_staleness)
            self.source.tighten(verdict.max_staleness)

    def leave(self, completed: int) -> None:
        """Save ``completed`` steps and end early, as asked. The next trainer goes on from here."""
        log.info("asked to stop: saving %d completed steps", completed)
        if completed not in (self.start_step, self.saver.newest):
            self.checkpoint(completed)
        self.saver.wait()
        self.retire()
        self._close()

    def finish(self, published: Version) -> None:
        """Wait for the last checkpoint, evaluate the final weights, and close what is open."""
        self.saver.wait()
        self.retire()
        self.stop.wait_for_step(False)
        if self.evaluations and self.tracking:
            self.at(published.step - 1, "evaluating the final weights")
            timeout_s = self.config.trainer.batch_timeout_s
            for result in self.evaluations.finish(published.step, timeout_s, lambda: as_rank_0(True)):
                # Trackers want steps that never decrease, and one value of a metric per step.
                self.tracking.log_evaluation(max(result.step, published.step - 1), result.metrics())
        # As long as rank 0 evaluates, the others meet it again and again: it may take longer than a collective.
        while as_rank_0(False):
            pass
        self._close()

    def _close(self) -> None:
        self.recorder.flush()
        self.profiler.close()
        if self.tracking:
            self.tracking.close()
        dist.barrier()
