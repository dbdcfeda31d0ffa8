"""The loop of supervised fine-tuning. Every rank runs it; rank 0 also logs.

    rows ──> batch ──> ranks, micro-batches ──> Backend.step ──> [held-out loss] ──> [checkpoint] ──> metrics

Consumes encoded conversations, or pairs of them, from the run folder. Produces weights (in checkpoints),
``metrics.jsonl`` and ``evaluations.jsonl``. Waits only for the other ranks (deadline: trainer.collective_timeout_s). On
a request to stop it ends the step, saves and returns. The rows of a step depend only on the seed and the step's number,
so a run that was killed resumes from its last checkpoint and reaches the same weights as without the interruption.
"""

import io
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers.utils.logging import disable_progress_bar

from rl_async.configs.load import load_resolved
from rl_async.configs.schema.data import FinetuneConfig, PreferenceConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, TrainingDiverged, UserError
from rl_async.files import append_lines, replace_file, undamaged
from rl_async.pictures import PictureProcessor
from rl_async.process.run_files import Phase, beat
from rl_async.trainer.actor_critic import build_policy
from rl_async.trainer.backend import Backend, Outputs, learning_rate_factor
from rl_async.trainer.batch_layout import layout
from rl_async.trainer.checkpoints import (
    FORMAT,
    WRITE_S,
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
from rl_async.trainer.finetune import HELD_OUT, ROWS, ChatRows, batch_of, steps_per_epoch, total_steps
from rl_async.trainer.packing import ImageRow, Tensors, empty_tensors, lay_images
from rl_async.trainer.ranks import StopRequest, ranks_joined
from rl_async.trainer.records import append_evaluation, next_lineage, require_newest
from rl_async.trainer.trackers import Tracking

log = logging.getLogger("rl_async.trainer")
# Beside the rows, for preferences: log-probabilities by the model that training starts from.
REFERENCE = "reference.npy"


@dataclass
class Finetuning:
    """Everything the loop works with; ``config.trainer`` has the steps and the schedule.

    ``held_out`` may be empty. Only rank 0 has ``tracking``. Log-probabilities of the model that training starts from,
    one per row, are there for preferences.
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
    reference: Tensor | None = None
    held_out_reference: Tensor | None = None

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
        trained_by = train_step(run, step, rows)
        trained = time.perf_counter()
        run.at(step, "meeting the ranks")
        stopping = run.stop.agreed()
        completed = step + 1
        rate = run.finetune.learning_rate * factor(step)
        metrics = {**trained_by, "learning_rate": rate}
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


def train_step(run: Finetuning, step: int, rows: Sequence[int]) -> dict[str, float]:
    """Take one optimizer step; return its metrics over all ranks, with the gradient norm.

    Raises TrainingDiverged, before any weight changes.
    """
    pairs = run.finetune.preferences is not None
    count = len(rows) if pairs else max(1, sum(run.rows.targets(row) for row in rows))
    parts = list(micro_batches(run, run.rows, rows))
    figures = []

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        loss, found = losses(run, parts[number], outputs, run.reference)
        figures.append(found)
        return loss / count

    try:
        _, norm = run.policy.step([part.tensors for part in parts], loss_fn)
    except TrainingDiverged as error:
        raise TrainingDiverged(f"step {step}, conversations {sorted(rows)[:8]}...: {error}") from error
    return averages(run, figures, "loss/train", "preference") | {"loss/grad_norm": norm}


def losses(run: Finetuning, part: "Part", outputs: Outputs, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of a micro-batch's losses, a scalar, and what ``averages`` needs, float64 [4].

    The losses are those of learned tokens, or of pairs: their sum, their number, the pairs in the right order, and the
    sum of the margins.
    """
    assert outputs.logprobs is not None
    mask = part.tensors.mask
    if run.finetune.preferences is None:
        loss = -torch.where(mask, outputs.logprobs, 0.0).sum()
        return loss, _figures(loss, mask.sum())
    if not part.examples:
        nothing = outputs.logprobs.sum() * 0.0
        return nothing, _figures(nothing)
    assert reference is not None
    policy = torch.where(mask, outputs.logprobs, 0.0).sum(-1)
    start = reference[run.rows.rows_of(part.examples)].to(policy)
    pairs = preference_losses(run.finetune.preferences, policy, start, mask.sum(-1))
    loss, margins = pairs.losses.sum(), pairs.margins
    return loss, _figures(loss, torch.ones_like(margins).sum(), (margins > 0).sum(), margins.sum())


def _figures(*values: Tensor) -> Tensor:
    """Put scalars into one tensor, float64 [4], on their device: reading each of them would wait for it."""
    found = torch.stack([value.detach().double() for value in values])
    return torch.nn.functional.pad(found, (0, 4 - len(values)))


class PairLosses(NamedTuple):
    """Loss and margin of each pair, [P]; the margin is beta times the difference of the two rows' log-ratios."""

    losses: Tensor
    margins: Tensor


def preference_losses(config: PreferenceConfig, policy: Tensor, reference: Tensor, tokens: Tensor) -> PairLosses:
    """Compute the loss of each pair from log-probabilities of whole answers, [2 P] each, the better one first.

    With h = beta (log pi/pi_0 of the better answer - log pi/pi_0 of the worse one), the losses are

        sigmoid  (-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e), DPO (arXiv:2305.18290, equation 7), made
                 robust against labels that are wrong with probability e (arXiv:2403.00409, equation 12)
        hinge    max(0, 1 - h), SLiC (arXiv:2305.10425) as normalised in RSO (arXiv:2309.06657)
        ipo      (h / beta - 1 / (2 beta))^2, arXiv:2310.12036, equation 17, with log-probabilities per token, as its
                 authors recommended to TRL

    Args:
        tokens: the number of learned tokens of each row, [2 P].
    """
    ratios = policy - reference
    if config.loss == "ipo":
        ratios = ratios / tokens.clamp(min=1)
    difference = ratios[0::2] - ratios[1::2]
    margins = config.beta * difference
    match config.loss:
        case "sigmoid":
            wrong = config.label_smoothing
            losses = (wrong * logsigmoid(-margins) - (1 - wrong) * logsigmoid(margins)) / (1 - 2 * wrong)
        case "hinge":
            losses = torch.relu(1 - margins)
        case "ipo":
            losses = (difference - 1 / (2 * config.beta)) ** 2
    return PairLosses(losses, margins)


def averages(run: Finetuning, figures: Sequence[Tensor], loss: str, pairs: str) -> dict[str, float]:
    """Return metrics over all ranks from the figures of ``losses``: the mean loss, and of pairs accuracy and margin."""
    sums = torch.stack(list(figures)).sum(0).cpu()
    run.policy.data_parallel.all_reduce(sums)
    total, count, right, margin = sums.tolist()
    metrics = {loss: total / max(count, 1.0)}
    if run.finetune.preferences is None:
        return metrics
    return metrics | {f"{pairs}/accuracy": right / max(count, 1.0), f"{pairs}/margin": margin / max(count, 1.0)}


def evaluate(run: Finetuning, completed: int) -> dict[str, float]:
    """Return the mean loss on held-out examples, logged by rank 0; empty without any."""
    if not len(run.held_out):
        return {}
    figures = [
        losses(run, part, run.policy.forward(part.tensors), run.held_out_reference)[1]
        for part in everything(run, run.held_out)
    ]
    metrics = averages(run, figures, "eval/loss", "eval")
    if dist.get_rank() == 0:
        append_evaluation(run.folder / "evaluations.jsonl", run.lineage, {"eval/step": completed, **metrics})
    return metrics


def is_measured(config: FinetuneConfig, completed: int, steps: int) -> bool:
    """Return whether the held-out loss is due after ``completed`` steps."""
    return completed == steps or (config.eval_every > 0 and completed % config.eval_every == 0)


class Part(NamedTuple):
    """A micro-batch: the examples in it, and their rows."""

    examples: list[int]
    tensors: Tensors


def everything(run: Finetuning, data: ChatRows) -> Iterator[Part]:
    """Yield this rank's micro-batches of all of ``data``."""
    size = run.finetune.batch_size
    for start in range(0, len(data), size):
        yield from micro_batches(run, data, range(start, min(start + size, len(data))))


def micro_batches(run: Finetuning, data: ChatRows, rows: Sequence[int]) -> Iterator[Part]:
    """Yield this rank's micro-batches of the examples ``rows``, within the token budget.

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
        examples = [rows[place] for place in places]
        yield Part(examples, collate(data, data.rows_of(examples), run.policy.device, run.policy.pictures))


def reference_of(run: Finetuning, data: ChatRows, file: Path) -> Tensor:
    """Return the log-probability of each row's learned tokens by the policy as it is now, float64 [R]. A collective.

    Rank 0 keeps them in ``file``, from which a run that goes on from a checkpoint reads them.
    """
    if run.start_step and file.is_file():
        return torch.from_numpy(np.load(file, allow_pickle=False))
    found = torch.zeros(len(data.ends), dtype=torch.float64)
    for part in everything(run, data):
        logprobs = run.policy.forward(part.tensors).logprobs
        assert logprobs is not None
        if part.examples:
            sums = torch.where(part.tensors.mask, logprobs, 0.0).sum(-1)
            found[data.rows_of(part.examples)] = sums.double().cpu()
    run.policy.data_parallel.all_reduce(found)
    if dist.get_rank() == 0:
        stream = io.BytesIO()
        np.save(stream, found.numpy(), allow_pickle=False)
        replace_file(file, stream.getvalue())
    dist.barrier()
    return found


def collate(rows: ChatRows, numbers: Sequence[int], device: str, pictures: PictureProcessor | None = None) -> Tensors:
    """Pad rows to a micro-batch, without a behaviour policy; ``mask`` is true where a token is learned."""
    if not numbers:
        return empty_tensors(device)
    chats = [
        ImageRow(number, rows.ids[span], rows.learned[span], rows.media.get(number, []))
        for number in numbers
        for span in [rows.span(number)]
    ]
    lengths = [len(chat.token_ids) for chat in chats]
    shape = len(chats), max(*lengths, 2)
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for i, (chat, length) in enumerate(zip(chats, lengths, strict=True)):
        tokens[i, :length], mask[i, :length] = chat.token_ids, chat.loss_mask
    media = {sha256: rows.image(sha256) for sha256 in {medium.sha256 for chat in chats for medium in chat.media}}
    return Tensors(
        tokens=torch.from_numpy(tokens).to(device),
        lengths=torch.tensor(lengths),
        mask=torch.from_numpy(mask[:, 1:]).to(device),
        temperature=torch.ones((shape[0], 1, 1), device=device),
        images=lay_images(chats, media, pictures, device),
    )


def checkpoint(run: Finetuning, completed: int) -> None:
    """Start writing a checkpoint, without a snapshot of a queue."""
    state = CheckpointState(step=completed, lineage=run.lineage, kl_coef=0.0, format=FORMAT)
    run.saver.save({".": run.policy}, state, b"")


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
    config = load_resolved(folder / "config.yaml")
    own = config.finetune
    if own is None:
        raise ConfigError("finetune: this section is missing; start fine-tuning with `rl-async sft`, which writes it")
    rows, held_out = (ChatRows.map(folder / name, own.each) for name in (ROWS, HELD_OUT))
    config = training_config(config, own, len(rows))
    beat(folder, int(os.environ.get("RANK", "0")), 0, "starting")
    with ranks_joined(config, folder) as (device, _):
        trainer = config.trainer
        policy = build_policy(config, device)
        step, lineage = resume_point(folder)
        saver = Saver(
            folder / "checkpoints",
            trainer.keep_checkpoints,
            max(WRITE_S, trainer.collective_timeout_s),
            step,
            lambda: require_newest(folder, lineage),
        )
        run = Finetuning(
            config=config,
            finetune=own,
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
        if own.preferences is not None:
            run.reference = reference_of(run, rows, folder / ROWS / REFERENCE)
            run.held_out_reference = reference_of(run, held_out, folder / HELD_OUT / REFERENCE)
        if step:
            load_checkpoint(folder_of(folder / "checkpoints", step), {".": policy})
            log.info("resuming at step %d as lineage %d", step, lineage)
        ended, writes = finetune(run), dist.get_rank() == 0
    out = Path(own.out)
    # The model is written after the process group has ended, since the other ranks would wait too long in it.
    if ended and writes and not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        export(folder, out)
    if not ended:
        sys.exit(stop.code)


def training_config(config: RunConfig, own: FinetuneConfig, rows: int) -> RunConfig:
    """Return ``config`` with section ``trainer`` as its section ``finetune`` and the number of examples imply it."""
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
