"""Whole batches for tests of what is computed from them."""

from collections.abc import Sequence

import torch

from rl_async.messages import Trajectory
from rl_async.trainer.batch_layout import MiniBatch
from rl_async.trainer.batches import Batch, WholeBatch, assemble
from rl_async.trainer.ranks import DataParallel


def whole_batch(rows: Sequence[Trajectory], step: int = 0, max_staleness: int | None = None) -> WholeBatch:
    """Put rows together as a rank that holds all of them."""
    numbers = list(range(len(rows)))
    plan = [MiniBatch(ranks=[[numbers]], rows=numbers)]
    batch = Batch(step, [row.header() for row in rows], plan, {row.key: row for row in rows})
    return assemble(DataParallel(0, 1, is_recorder=True), batch, max_staleness, torch.ones(len(rows), dtype=torch.bool))
