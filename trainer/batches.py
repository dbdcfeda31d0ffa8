"""Batches: where they come from, how a rank gets its part, and the tensors that every rank holds whole.

A ``BatchSource`` gives headers and payloads, from the transfer queue or from the recorded trajectories of an earlier
run. ``take_batch`` makes a ``Batch`` of them with its layout over ranks, and ``assemble`` a ``WholeBatch``, so that
formulas over the batch need no communication. Only numbers per token are exchanged (log-probabilities, turns, turn
rewards), never the rows, and they are packed: a tensor of 4 bytes takes 4 bytes of host memory for each token of the
batch, however long its longest row is. To add a source, implement ``BatchSource`` and choose it in ``rank.py``.
"""

import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RlAsyncError, RowsChanged, RowsLost, UserError
from rl_async.messages import NotReady, Reply, Reserved, RowKey, Trajectory, TrajectoryHeader
from rl_async.recording import files_of_step, read_trajectories
from rl_async.trainer.algorithms.correction import grammar_weights
from rl_async.trainer.algorithms.rows import Rows, on_tokens
from rl_async.trainer.batch_layout import MiniBatch, RowCost, fresh_runs, layout
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import DataParallel, StopRequest

POLL_S = 2.0
REMIND_S = 1800.0
log = logging.getLogger("rl_async.trainer")


class BatchSource(Protocol):
    """Batches by step. ``reserve`` answers the same for a step however often it is asked; None if ``stopping``."""

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None: ...
    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]: ...
    def commit(self, step: int) -> None: ...
    def checkpointed(self, step: int) -> None: ...
    def snapshot(self) -> bytes: ...
    def tighten(self, max_staleness: int) -> None: ...


class QueueVerbs(Protocol):
    """The verbs of the queue's blocking client that a batch source uses."""

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady: ...
    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]: ...
    def commit(self, step: int) -> Reply: ...
    def retire(self, step: int) -> Reply: ...
    def snapshot(self) -> bytes: ...
    def tighten(self, max_staleness: int) -> Reply: ...


class Absence:
    """Notices that ``what`` waits for agent programs, of which none plays, and logs it: first at once, then rarely."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._logged = -math.inf

    def lasts(self, reply: NotReady) -> bool:
        """Whether the queue says that no program plays."""
        now = self._clock()
        if reply.unattended_s and now - self._logged > REMIND_S:
            self._logged = now
            log.warning(
                "%s waits without a deadline: no agent program has asked a gateway for an episode for %.0f s; start "
                "one (docs/how-to/gateway.md), `rl-async gateway ls RUN` shows who plays",
                self._what,
                reply.unattended_s,
            )
        return reply.unattended_s > 0


class QueueSource:
    """Consumes reserved batches of the transfer queue; waits at most ``timeout_s`` for one, not counting the time for
    which no agent program plays.

    ``refused`` is called with the step and what came in place of rows whose tokens are not those announced.
    """

    def __init__(
        self,
        queue: QueueVerbs,
        timeout_s: float,
        refused: Callable[[int, Mapping[RowKey, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._timeout_s, self._refused, self._clock = queue, timeout_s, refused, clock
        self._step = 0  # reserved last

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None:
        """Wait for the batch of ``step``, or until ``stopping``, polled every POLL_S.

        Raises RlAsyncError with what is missing when the deadline passes.
        """
        deadline = self._clock() + self._timeout_s
        absence = Absence(f"step {step}", self._clock)
        while True:
            reply = self._queue.reserve(step, POLL_S)
            if isinstance(reply, Reserved):
                self._step = step
                return reply
            if stopping():
                return None
            if absence.lasts(reply):
                deadline = self._clock() + self._timeout_s
            if self._clock() > deadline:
                raise RlAsyncError(
                    f"no batch for step {step} within {self._timeout_s:.0f} s (trainer.batch_timeout_s): {reply.why}"
                )

    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        """Raises RowsLost, and RowsChanged if rows have other tokens than were announced to the queue."""
        try:
            return self._queue.fetch_announced(headers)
        except RowsChanged as error:
            self._refused(self._step, error.tokens_hash)
            raise

    def commit(self, step: int) -> None:
        self._queue.commit(step)

    def checkpointed(self, step: int) -> None:
        """The checkpoint after ``step`` completed steps is durable."""
        self._queue.retire(step)

    def snapshot(self) -> bytes:
        return self._queue.snapshot()

    def tighten(self, max_staleness: int) -> None:
        """Admit no more than keeps staleness within this bound."""
        self._queue.tighten(max_staleness)


class RecordedSource:
    """The batches in a run's ``trajectories/`` again, the newest lineage of each step. Nothing is sent anywhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[RowKey, Trajectory] = {}

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None:
        """Read the step's files. Raises UserError if the step was not recorded."""
        paths = files_of_step(self._folder, step)
        if not paths:
            raise UserError(f"{self._folder} has no recorded batch of step {step}")
        rows = [row for path in paths for row in read_trajectories(path)]
        self._rows = {row.key: row for row in rows}
        return Reserved(step=step, headers=[self._rows[key].header() for key in sorted(self._rows)])

    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        return [self._rows[header.key] for header in headers]

    def commit(self, step: int) -> None:
        """Do nothing: no queue waits for a replayed batch."""

    def checkpointed(self, step: int) -> None:
        """Do nothing: no queue holds a replayed batch."""

    def snapshot(self) -> bytes:
        return b""

    def tighten(self, max_staleness: int) -> None:
        """Do nothing: the staleness of recorded batches is fixed."""


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


# Codes of a token in ``assemble``: 0 not sampled, 1 sampled outside any turn, 2 in assistant turn 0, 3 in turn 1, ...
FIRST_TURN = 2
CONSTRAINED = 1 << 30  # added to the code of a token that was sampled under a grammar's mask


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of this rank: indexes of its rows in the batch, and their tensors on the device."""

    rows: list[int]
    tensors: Tensors
    batch: Rows

    def cut(self, whole: Tensor) -> Tensor:
        """Copy this micro-batch's part [B, T-1] of a whole-batch tensor [M] to the device, padded with zeros.

        For a micro-batch without rows: zeros [1, 1].
        """
        if not self.rows:
            return torch.zeros((1, 1), dtype=whole.dtype, device=self.tensors.mask.device)
        return self.batch.pad(whole, self.rows, self.tensors.mask.shape[1]).to(self.tensors.mask.device)


@dataclass(frozen=True)
class WholeBatch:
    """N rows with M predicted tokens in all; on the host, in batch order, the same on every rank."""

    headers: Sequence[TrajectoryHeader]
    rows: Rows
    mask: Tensor  # bool [M], tokens that train
    behaviour: Tensor  # [M], log mu
    age: Tensor  # int64 [M], staleness in steps
    turns: Tensor  # int64 [M], assistant turn of each sampled token; -1 elsewhere
    turn_rewards: Tensor  # [M], on the last token of their turn
    constrained: Tensor  # bool [M], tokens that were sampled under a grammar's mask
    grammar_weights: Tensor | None = None  # [M], set by ``without_masks``

    def without_masks(self, proximal: Tensor) -> "WholeBatch":
        """Replace log mu of constrained tokens by log pi_old [M], and keep their ratio as ``grammar_weights``.

        To a formula per token they are then as if the policy had sampled them without a mask when the step began. What
        is measured over a row or the batch leaves them out (``free``).
        """
        if not self.constrained.any():
            return self
        return replace(
            self,
            behaviour=torch.where(self.constrained, proximal, self.behaviour),
            grammar_weights=grammar_weights(proximal, self.behaviour, self.constrained),
        )

    @cached_property
    def free(self) -> Tensor:
        """bool [M], tokens that train and were sampled without a mask.

        They alone tell how far policies have moved apart: corrections, ratios of rows, selections and metrics of drift
        are over them.
        """
        return self.mask & ~self.constrained

    @property
    def players(self) -> Tensor:
        """int64 [N], the number of each row's player: its role in its episode, all of an episode that has no roles.

        The rows of a player have one reward.
        """
        return numbered([(h.episode_id, h.role) for h in self.headers])

    @property
    def groups(self) -> Tensor:
        """int64 [N], the number of what each row is compared in: its group, and there its role."""
        return numbered([(h.group_id, h.role) for h in self.headers])

    @property
    def row_weights(self) -> Tensor:
        """float64 [N], 1 / rows of the row's episode: in the loss an episode counts once, however many rows it became.

        0 for a greedy episode, which never trains.
        """
        rows = Counter(h.episode_id for h in self.headers)
        weights = [0.0 if h.baseline else 1.0 / rows[h.episode_id] for h in self.headers]
        return torch.tensor(weights, dtype=torch.float64)

    @property
    def player_weights(self) -> Tensor:
        """float64 [N], 1 / rows of the row's player: in its group an episode counts once for each of its roles.

        0 for a greedy episode, which never trains.
        """
        rows = Counter((h.episode_id, h.role) for h in self.headers)
        weights = [0.0 if h.baseline else 1.0 / rows[h.episode_id, h.role] for h in self.headers]
        return torch.tensor(weights, dtype=torch.float64)


def numbered(keys: Sequence[Hashable]) -> Tensor:
    """Number keys [N] from 0 in the order in which they first occur, int64 [N]."""
    found: dict[Hashable, int] = {}
    return torch.tensor([found.setdefault(key, len(found)) for key in keys], dtype=torch.int64)


def assemble(ranks: DataParallel, batch: Batch, max_staleness: int | None, trains: Tensor) -> WholeBatch:
    """Build the whole batch from each rank's own rows. A collective: one all-reduce of 12 bytes per token.

    A rank fills in the rows that the plan gives it and the all-reduce adds those of the others. Floats travel as the
    integers that have their bits, since adding 0 then changes no bit. Staleness and mask follow from the headers, which
    every rank has. Tokens staler than ``max_staleness`` are masked (None applies no bound), and so are rows where
    ``trains``, bool [N], is false.
    """
    headers = batch.headers
    lengths = torch.tensor([header.tokens for header in headers])
    starts = Rows(lengths).starts.numpy()
    spans = [slice(start, start + header.tokens) for start, header in zip(starts, headers, strict=True)]
    packed = np.zeros((3, int(lengths.sum())), np.int32)
    behaviour, turn_rewards, codes = packed[0].view(np.float32), packed[1].view(np.float32), packed[2]
    for i in (i for mini in batch.plan for micro in mini.ranks[ranks.rank] for i in micro):
        row = batch.rows[headers[i].key]
        behaviour[spans[i]], codes[spans[i]] = row.logprobs, row.loss_mask
        _mark_turns(row, codes[spans[i]], turn_rewards[spans[i]])
        _mark_constrained(row, codes[spans[i]])
    ranks.all_reduce(torch.from_numpy(packed))
    constrained = codes >= CONSTRAINED
    codes -= constrained * np.int32(CONSTRAINED)
    mask, age = np.zeros(codes.shape, bool), np.zeros(codes.shape, np.int64)
    for header, span in zip(headers, spans, strict=True):
        sampled = span.start + np.flatnonzero(codes[span])
        for run in header.versions:
            age[sampled[run.start : run.end]] = batch.step - run.version.step
        for run in fresh_runs(header, batch.step, max_staleness):
            mask[sampled[run.start : run.end]] = True
    # No token predicts the first one of a row.
    predicted, rows = np.ones(codes.shape, bool), Rows(lengths - 1)
    predicted[starts] = False

    def of_predicted(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[predicted])

    return WholeBatch(
        headers=headers,
        rows=rows,
        mask=of_predicted(mask) & on_tokens(trains, rows),
        behaviour=of_predicted(behaviour),
        age=of_predicted(age),
        turns=of_predicted(np.maximum(codes - FIRST_TURN, -1)).long(),
        turn_rewards=of_predicted(turn_rewards),
        constrained=of_predicted(constrained),
    )


def _mark_turns(row: Trajectory, codes: np.ndarray, rewards: np.ndarray) -> None:
    """Write the code of the assistant turn on its sampled tokens [T], and its reward on the last of them."""
    for number, turn in enumerate(turn for turn in row.turns if turn.role == "assistant"):
        sampled = turn.start + np.flatnonzero(row.loss_mask[turn.start : turn.end])
        codes[sampled] = FIRST_TURN + number
        if len(sampled) and turn.reward is not None:
            rewards[sampled[-1]] = turn.reward


def _mark_constrained(row: Trajectory, codes: np.ndarray) -> None:
    """Mark the codes [T] of sampled tokens that a grammar's mask restricted."""
    sampled = np.flatnonzero(row.loss_mask) if row.constrained else ()
    for start, end in row.constrained:
        codes[sampled[start:end]] += CONSTRAINED


def gather(ranks: DataParallel, micros: Sequence[MicroBatch], parts: Sequence[Tensor], rows: Rows) -> Tensor:
    """Bring one tensor [B, T-1] per micro-batch of every rank together, as [M] on the host of all of them.

    A collective. float64 if the parts are, else float32. One data-parallel rank holds each row, so the sum is exact.
    """
    double = any(part.dtype == torch.float64 for part in parts)
    whole = torch.zeros(int(rows.lengths.sum()), dtype=torch.float64 if double else torch.float32)
    for micro, part in zip(micros, parts, strict=True):
        if micro.rows:
            there = rows.there(micro.rows, part.shape[1])
            whole[rows.positions(micro.rows)] = part.detach().to("cpu", whole.dtype)[there]
    ranks.all_reduce(whole)
    return whole
