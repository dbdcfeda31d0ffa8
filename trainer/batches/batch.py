"""The batch of a step as one rank holds it, and how the rank gets it."""

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RowsChanged, RowsLost
from rl_async.messages import RowKey, Trajectory, TrajectoryHeader
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.batches.layout import MiniBatch, layout
from rl_async.trainer.batches.sources import BatchSource
from rl_async.trainer.monitoring.stopping import StopRequest

log = logging.getLogger("rl_async.trainer")


@dataclass(frozen=True)
class Batch:
    """A reserved batch: every header, and the payloads of the rows that this data-parallel rank trains."""

    step: int
    headers: Sequence[TrajectoryHeader]
    plan: list[MiniBatch]
    rows: dict[RowKey, Trajectory]


def plan_batch(
    headers: Sequence[TrajectoryHeader], step: int, config: RunConfig, ranks: int, cost: RowCost
) -> list[MiniBatch]:
    """Lay a batch out over this many data-parallel ranks; the same on every rank."""
    return layout(
        headers,
        step=step,
        minibatches=config.trainer.minibatches,
        ranks=ranks,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        seed=config.seed,
        cost=cost,
    )


def take_batch(
    step: int, source: BatchSource, stop: StopRequest, config: RunConfig, ranks: DataParallel, cost: RowCost
) -> Batch | None:
    """Wait for the batch of ``step`` and fetch the rows of it that this rank trains. A collective.

    Reserves again if a payload shard was lost and rows with it. None if any rank was asked to stop. Raises RowsChanged,
    on all ranks alike, if a row of any rank came with other tokens than were announced.
    """
    while True:
        reserved = source.reserve(step, lambda: stop.requested)
        if stop.agreed() or reserved is None:
            return None
        headers = reserved.headers
        plan = plan_batch(headers, step, config, ranks.size, cost)
        mine = [headers[i] for mini in plan for micro in mini.ranks[ranks.rank] for i in micro]
        mine.sort(key=lambda header: header.key)
        changed: RowsChanged | None = None
        rows: list[Trajectory] | None = None
        try:
            rows = source.fetch(mine)
        except RowsLost as error:
            log.warning("step %d: %s", step, error)
        except RowsChanged as error:
            changed = error
        intact, same = agreed(headers, intact=changed is None, fetched=rows is not None)
        if not intact:
            raise changed or RowsChanged(f"step {step}: rows of another rank changed; its log names them", {})
        if same and rows is not None:
            return Batch(step, headers, plan, {row.key: row for row in rows})


def agreed(headers: Sequence[TrajectoryHeader], *, intact: bool, fetched: bool) -> tuple[bool, bool]:
    """Whether no rank's rows had changed; and whether all fetched theirs, of the same attempts. A collective."""
    attempts = zlib.crc32(repr([(*header.key, header.attempt) for header in headers]).encode())
    seen = torch.tensor([intact, fetched, attempts, -attempts], dtype=torch.int64)
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen[0]), bool(seen[1]) and seen[2].item() == -seen[3].item()
