"""One rank that finishes a run, whose final evaluation takes longer than the deadline of a collective: ``FOLDER``."""

import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Version
from rl_async.trainer.monitoring.ranks import ranks_joined
from rl_async.trainer.step.run import Run

COLLECTIVE_S = 10.0  # also to meet the other rank, on a busy machine


class Idle:
    """A part of the run that has nothing to do."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class LongEvaluation:
    def finish(self, published: int, timeout_s: float, waiting: Callable[[], object]) -> list[Any]:
        for _ in range(6):
            waiting()
            time.sleep(COLLECTIVE_S / 4)
        return []


def main(folder: Path) -> None:
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(collective_timeout_s=COLLECTIVE_S),
    )
    with ranks_joined(config, folder):
        evaluations: Any = LongEvaluation() if dist.get_rank() == 0 else None
        tracking: Any = Idle() if dist.get_rank() == 0 else None
        names = [field.name for field in fields(Run) if field.default is MISSING]
        parts: dict[str, Any] = {name: Idle() for name in names} | {"config": config, "folder": folder}
        Run(**parts, evaluations=evaluations, tracking=tracking).finish(Version(0, 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
