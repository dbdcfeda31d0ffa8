"""One rank that finishes a run, whose final evaluation takes longer than the deadline of a collective: ``FOLDER``."""

import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Version
from rl_async.trainer.ranks import ranks_joined
from rl_async.trainer.run import Run

JOIN_S = 60.0
COLLECTIVE_S = 3.0


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
        trainer=TrainerConfig(collective_timeout_s=JOIN_S),
    )
    with ranks_joined(config, folder):
        # Only now: a busy machine may need longer to start both ranks.
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_S))
        evaluations: Any = LongEvaluation() if dist.get_rank() == 0 else None
        tracking: Any = Idle() if dist.get_rank() == 0 else None
        names = [field.name for field in fields(Run) if field.default is MISSING]
        parts: dict[str, Any] = {name: Idle() for name in names} | {"config": config, "folder": folder}
        begun = time.monotonic()
        Run(**parts, evaluations=evaluations, tracking=tracking).finish(Version(0, 1))
        print(time.monotonic() - begun)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
