"""Builds the parts of a fine-tuning rank from the run's config and hands them to the loop."""

import logging
import os
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from rl_async.configs.load.loader import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.process.heartbeat import beat
from rl_async.trainer.checkpoints.export import export
from rl_async.trainer.checkpoints.folder import drop_unfinished, folder_of, load_checkpoint, newest_whole, read_state
from rl_async.trainer.checkpoints.saver import Saver
from rl_async.trainer.finetune.loop import Finetuning, finetune
from rl_async.trainer.finetune.rows import HELD_OUT, ROWS, ChatRows, keep_lines, total_steps
from rl_async.trainer.monitoring.ranks import ranks_joined
from rl_async.trainer.monitoring.records import next_lineage
from rl_async.trainer.monitoring.stopping import StopRequest
from rl_async.trainer.monitoring.trackers import Tracking
from rl_async.trainer.step.models import build_models

log = logging.getLogger("rl_async.trainer")


def run_rank(folder: Path) -> None:
    """Train as one rank and write the model at the end. Raises UserError, RanksLost and other RlAsyncErrors."""
    stop = StopRequest()
    stop.listen()
    disable_progress_bar()
    rows, held_out = ChatRows.map(folder / ROWS), ChatRows.map(folder / HELD_OUT)
    config = training(load_resolved(folder / "config.yaml"), len(rows))
    assert config.finetune is not None
    beat(folder, int(os.environ.get("RANK", "0")), 0, "starting")
    with ranks_joined(config, folder) as (device, _):
        trainer = config.trainer
        policy = build_models(config, device).policy
        saver = Saver(folder / "checkpoints", trainer.keep_checkpoints, trainer.collective_timeout_s)
        step, lineage = _chosen(folder)
        if step:
            load_checkpoint(folder_of(folder / "checkpoints", step), {".": policy})
            log.info("going on after step %d as lineage %d", step, lineage)
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
    if ended and writes and not out.exists():  # without the others, whose patience has an end
        out.parent.mkdir(parents=True, exist_ok=True)
        export(folder, out)


def training(config: RunConfig, rows: int) -> RunConfig:
    """The config with what the optimizer and the checkpoints follow, for ``rows`` conversations."""
    own = config.finetune
    if own is None:
        raise ConfigError("finetune: the config has no such section; `rl-async sft` writes one that has")
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


def _chosen(folder: Path) -> tuple[int, int]:
    """The step of the newest whole checkpoint, 0 if there is none, and a new lineage, on all ranks.

    What was written down of later steps goes: they are trained again. A collective.
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
