"""The state of a rank from step to step, and its work between steps: save, report, watch, leave."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rl_async.configs.derived import compute_type
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import Version
from rl_async.process.run_files import Phase, ProgressWriter, beat
from rl_async.trainer.actor_critic import Models, compute_rates, device_name
from rl_async.trainer.algorithms.algorithm import Algorithm
from rl_async.trainer.algorithms.losses import KlController
from rl_async.trainer.batches import BatchSource
from rl_async.trainer.checkpoints import FORMAT, CheckpointState, Saver
from rl_async.trainer.evaluator import Evaluator
from rl_async.trainer.guard import Guard
from rl_async.trainer.monitoring import EngineLoads, MemoryWatch, QueueDepth, StepProfiler
from rl_async.trainer.publishing import Publisher
from rl_async.trainer.ranks import StopRequest, as_rank_0
from rl_async.trainer.records import Recorder, is_evaluated
from rl_async.trainer.trackers import Tracking

log = logging.getLogger("rl_async.trainer")


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
