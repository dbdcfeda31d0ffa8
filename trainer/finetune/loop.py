"""The loop of supervised fine-tuning. Every rank runs it; rank 0 also logs.

    rows ──> batch ──> ranks, micro-batches ──> Backend.step ──> [held-out loss] ──> [checkpoint] ──> metrics

Consumes encoded conversations from the run folder. Produces weights (in checkpoints), ``metrics.jsonl`` and
``evaluations.jsonl``. Waits only for the other ranks (deadline: trainer.collective_timeout_s). On a request to stop it
ends the step, saves and returns. The rows of a step depend only on the seed and the step's number, so a run that was
killed resumes from its last checkpoint and reaches the same weights as without the interruption.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from rl_async.configs.load import load_resolved
from rl_async.configs.schema.data import FinetuneConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, TrainingDiverged, UserError
from rl_async.files import append_lines, replace_file, undamaged
from rl_async.process.run_files import Phase, beat
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.backend import Backend, Outputs, learning_rate_factor
from rl_async.trainer.batch_layout import layout
from rl_async.trainer.checkpoints import (
    FORMAT,
    CheckpointSchedule,
    CheckpointState,
    Saver,
    drop_unfinished,
    folder_of,
    load_checkpoint,
    newest_whole,
    read_state,
)
from rl_async.trainer.export import export
from rl_async.trainer.finetune.chat_rows import HELD_OUT, ROWS, ChatRows, batch_of, steps_per_epoch, total_steps
from rl_async.trainer.packing import Tensors, empty_tensors
from rl_async.trainer.ranks import StopRequest, ranks_joined
from rl_async.trainer.records import append_evaluation, next_lineage, require_newest
from rl_async.trainer.trackers import Tracking

log = logging.getLogger("rl_async.trainer")


@dataclass
class Finetuning:
    """Everything the loop works with; ``config.trainer`` has the steps and the schedule.

    ``held_out`` may be empty. Only rank 0 has ``tracking``.
    """

    config: RunConfig
    finetune: FinetuneConfig
    folder: Path
    rows: ChatRows
    held_out: ChatRows
    policy: Backend
    saver: Saver
    stop: StopRequest
    start_step: int
    lineage: int
    tracking: Tracking | None

    def at(self, step: int, phase: Phase) -> None:
        """Record this rank's position in its heartbeat, for ``rl-async doctor``."""
        beat(self.folder, dist.get_rank(), step, phase)


def finetune(run: Finetuning) -> bool:
    """Train from ``run.start_step`` to the last step; return False if it was asked to stop and saved early."""
    config, steps = run.config, run.config.trainer.steps
    schedule, factor = CheckpointSchedule(config), learning_rate_factor(config.trainer)
    if run.start_step == 0:
        evaluate(run, 0)
    run.stop.wait_for_step(True)
    for step in range(run.start_step, steps):
        began = time.perf_counter()
        run.at(step, "training")
        rows = rows_of(run, step)
        loss, norm = train_step(run, step, rows)
        trained = time.perf_counter()
        run.at(step, "meeting the ranks")
        stopping = run.stop.agreed()
        completed = step + 1
        rate = run.finetune.learning_rate * factor(step)
        metrics = {"loss/train": loss, "loss/grad_norm": norm, "learning_rate": rate}
        if (not stopping or completed == steps) and is_measured(run.finetune, completed, steps):
            metrics |= evaluate(run, completed)
        measured = time.perf_counter()
        if schedule.is_due(completed, 0) or stopping:
            run.at(step, "checkpointing")
            checkpoint(run, completed)
        tokens = sum(run.rows.size(row).tokens for row in rows)
        metrics |= {
            "epoch": completed / steps_per_epoch(len(run.rows), run.finetune.batch_size),
            "tokens/trained": sum(run.rows.targets(row) for row in rows),
            "tokens/all": tokens,
            "tokens/per_s": tokens / (trained - began),
            "time/train_s": trained - began,
            "time/eval_s": measured - trained,
            "time/step_s": time.perf_counter() - began,
        }
        report(run, step, metrics)
        if stopping:
            log.info("stopping on request: saved %d completed steps", completed)
            break
    run.saver.wait()
    run.stop.wait_for_step(False)
    if run.tracking:
        run.tracking.close()
    dist.barrier()
    return run.saver.newest == steps or run.start_step == steps


def rows_of(run: Finetuning, step: int) -> list[int]:
    """Return the conversations that all ranks together train in ``step``."""
    size, seed = run.finetune.batch_size, run.config.seed
    return batch_of(step, len(run.rows), size, seed=seed, shuffle=run.config.data.shuffle)


def train_step(run: Finetuning, step: int, rows: Sequence[int]) -> tuple[float, float]:
    """Take one optimizer step; return its loss per learned token over all ranks, and the gradient norm.

    Raises TrainingDiverged, before any weight changes.
    """
    targets = max(1, sum(run.rows.targets(row) for row in rows))
    batches = list(micro_batches(run, run.rows, rows))

    def loss_fn(number: int, outputs: Outputs) -> torch.Tensor:
        return negative_log_likelihood(outputs, batches[number]) / targets

    try:
        loss, norm = run.policy.step(batches, loss_fn)
    except TrainingDiverged as error:
        raise TrainingDiverged(f"step {step}, conversations {sorted(rows)[:8]}...: {error}") from error
    total = torch.tensor([loss], dtype=torch.float64)
    run.policy.data_parallel.all_reduce(total)
    return total.item(), norm


def negative_log_likelihood(outputs: Outputs, batch: Tensors) -> torch.Tensor:
    """Return the sum of -log p over the learned tokens of a micro-batch [B, T-1], a scalar."""
    assert outputs.logprobs is not None
    return -torch.where(batch.mask, outputs.logprobs, 0.0).sum()


def evaluate(run: Finetuning, completed: int) -> dict[str, float]:
    """Return the loss per learned token on held-out conversations, logged by rank 0; empty without any."""
    if not len(run.held_out):
        return {}
    sums = torch.zeros(2, dtype=torch.float64)
    everything, size = range(len(run.held_out)), run.finetune.batch_size
    for start in range(0, len(everything), size):
        for batch in micro_batches(run, run.held_out, everything[start : start + size]):
            loss = negative_log_likelihood(run.policy.forward(batch), batch)
            sums += torch.tensor([loss.item(), batch.mask.sum().item()], dtype=torch.float64)
    run.policy.data_parallel.all_reduce(sums)
    metrics = {"eval/loss": sums[0].item() / max(sums[1].item(), 1.0)}
    if dist.get_rank() == 0:
        append_evaluation(run.folder / "evaluations.jsonl", run.lineage, {"eval/step": completed, **metrics})
    return metrics


def is_measured(config: FinetuneConfig, completed: int, steps: int) -> bool:
    """Return whether the held-out loss is due after ``completed`` steps."""
    return completed == steps or (config.eval_every > 0 and completed % config.eval_every == 0)


def micro_batches(run: Finetuning, data: ChatRows, rows: Sequence[int]) -> Iterator[Tensors]:
    """Yield this rank's micro-batches, within the token budget.

    Every rank gets the same number, since each forward pass is a collective.
    """
    data_parallel = run.policy.data_parallel
    (plan,) = layout(
        [data.size(row) for row in rows],
        step=0,
        minibatches=1,
        ranks=data_parallel.size,
        max_tokens=run.config.trainer.max_tokens_per_microbatch,
        seed=run.config.seed,
        cost=run.policy.row_cost,
    )
    for places in plan.ranks[data_parallel.rank]:
        yield collate(data, [rows[place] for place in places], run.policy.device)


def collate(rows: ChatRows, numbers: Sequence[int], device: str) -> Tensors:
    """Pad rows to a micro-batch, without a behaviour policy; ``mask`` is true where a token is learned."""
    if not numbers:
        return empty_tensors(device)
    spans = [rows.span(number) for number in numbers]
    lengths = [span.stop - span.start for span in spans]
    shape = len(spans), max(*lengths, 2)
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for i, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        tokens[i, :length], mask[i, :length] = rows.ids[span], rows.learned[span]
    return Tensors(
        tokens=torch.from_numpy(tokens).to(device),
        lengths=torch.tensor(lengths),
        mask=torch.from_numpy(mask[:, 1:]).to(device),
        temperature=torch.ones((shape[0], 1, 1), device=device),
    )


def checkpoint(run: Finetuning, completed: int) -> None:
    """Start writing a checkpoint, without a snapshot of a queue."""
    state = CheckpointState(step=completed, lineage=run.lineage, kl_coef=0.0, format=FORMAT)
    run.saver.save({".": run.policy}, state, b"")
    if not run.config.trainer.checkpoint_async:
        run.saver.wait()


def report(run: Finetuning, step: int, metrics: dict[str, float]) -> None:
    """Send the metrics of one step to the trackers, on rank 0."""
    run.at(step, "reporting")
    if run.tracking:
        head = {"step": step, "lineage": run.lineage, "time": time.time()}
        run.tracking.log(step, head | metrics)


def run_rank(folder: Path) -> None:
    """Train as one rank and write the model at the end. Raises UserError, RanksLost and other RlAsyncErrors.

    Raises SystemExit if it was asked to stop and steps are left.
    """
    stop = StopRequest()
    stop.listen()
    disable_progress_bar()
    rows, held_out = ChatRows.map(folder / ROWS), ChatRows.map(folder / HELD_OUT)
    config = training_config(load_resolved(folder / "config.yaml"), len(rows))
    assert config.finetune is not None
    beat(folder, int(os.environ.get("RANK", "0")), 0, "starting")
    with ranks_joined(config, folder) as (device, _):
        trainer = config.trainer
        policy = build_models(config, device).policy
        step, lineage = resume_point(folder)
        saver = Saver(
            folder / "checkpoints",
            trainer.keep_checkpoints,
            trainer.collective_timeout_s,
            step,
            lambda: require_newest(folder, lineage),
        )
        if step:
            load_checkpoint(folder_of(folder / "checkpoints", step), {".": policy})
            log.info("resuming at step %d as lineage %d", step, lineage)
        run = Finetuning(
            config=config,
            finetune=config.finetune,
            folder=folder,
            rows=rows,
            held_out=held_out,
            policy=policy,
            saver=saver,
            stop=stop,
            start_step=step,
            lineage=lineage,
            tracking=Tracking(config, folder) if dist.get_rank() == 0 else None,
        )
        ended, writes = finetune(run), dist.get_rank() == 0
    out = Path(config.finetune.out)
    # The model is written after the process group has ended, since the other ranks would wait too long in it.
    if ended and writes and not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        export(folder, out)
    if not ended:
        sys.exit(stop.code)


def training_config(config: RunConfig, rows: int) -> RunConfig:
    """Return ``config`` with section ``trainer`` as section ``finetune`` and ``rows`` conversations imply it.

    Raises ConfigError without a section ``finetune``.
    """
    own = config.finetune
    if own is None:
        raise ConfigError("finetune: this section is missing; start fine-tuning with `rl-async sft`, which writes it")
    steps = total_steps(rows, own)
    trainer = msgspec.structs.replace(
        config.trainer,
        learning_rate=own.learning_rate,
        schedule=own.schedule,
        warmup_steps=round(own.warmup * steps),
        steps=steps,
        epochs=1,
        minibatches=1,
    )
    return msgspec.structs.replace(config, trainer=trainer)


def resume_point(folder: Path) -> tuple[int, int]:
    """Return the step of the newest whole checkpoint, or 0, and a new lineage. A collective.

    Rank 0 deletes the log lines of later steps, which are trained again.
    """
    chosen = torch.zeros(2, dtype=torch.int64)
    if dist.get_rank() == 0:
        root = folder / "checkpoints"
        drop_unfinished(root)
        newest = newest_whole(root)
        step = 0 if newest is None else read_state(newest).step
        keep_lines(folder / "metrics.jsonl", "step", step - 1)
        keep_lines(folder / "evaluations.jsonl", "eval/step", step if step else -1)
        chosen = torch.tensor([step, next_lineage(folder, True)])
    dist.broadcast(chosen, 0)
    step, lineage = chosen.tolist()
    return step, lineage


def keep_lines(path: Path, key: str, highest: int) -> None:
    """Keep only the JSON lines whose ``key`` is at most ``highest``. No process may be writing the file."""
    if not path.exists():
        return
    append_lines(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    with undamaged(path):
        numbers = [msgspec.json.decode(line, type=dict[str, float | None]).get(key) for line in lines]
    if None in numbers:
        raise UserError(f"{path} is damaged: line {numbers.index(None) + 1} has no {key}")
    kept = [line for line, number in zip(lines, numbers, strict=True) if number is not None and number <= highest]
    replace_file(path, b"".join(kept), durable=True)
