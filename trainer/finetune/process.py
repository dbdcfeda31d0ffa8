"""Builds the parts of a fine-tuning rank from the run's config and hands them to the loop."""

import logging
import os
import sys
from pathlib import Path

import msgspec
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from rl_async.configs.load.loader import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.process.run_files import beat
from rl_async.trainer.checkpoints.export import export
from rl_async.trainer.checkpoints.folder import folder_of, load_checkpoint
from rl_async.trainer.checkpoints.saver import Saver
from rl_async.trainer.finetune.loop import Finetuning, finetune
from rl_async.trainer.finetune.resume import resume_point
from rl_async.trainer.finetune.rows import HELD_OUT, ROWS, ChatRows, total_steps
from rl_async.trainer.monitoring.ranks import ranks_joined
from rl_async.trainer.monitoring.records import require_newest
from rl_async.trainer.monitoring.stopping import StopRequest
from rl_async.trainer.monitoring.trackers import Tracking
from rl_async.trainer.step.models import build_models

log = logging.getLogger("rl_async.trainer")


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
    if ended and writes and not out.exists():  # after the process group, in which the other ranks would wait too long
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
