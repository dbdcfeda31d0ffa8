"""Batches: where they come from, how a rank gets its part, and the tensors that every rank holds whole.

A ``BatchSource`` gives headers and payloads, from the transfer queue or from the recorded trajectories of an earlier
run. ``take_batch`` lays them out over ranks as a ``Batch``, and ``assemble`` exchanges numbers per token as a
``WholeBatch``, so that formulas over the batch need no communication. Only log-probabilities, turns and turn rewards
are exchanged, never the rows, and they are packed: a tensor of 4 bytes takes 4 bytes of host memory for each token of
the batch, however long its longest row is. To add a source, implement ``BatchSource`` and choose it in ``rank.py``.
"""

import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RlAsyncError, RowsChanged, RowsLost, UserError
from rl_async.messages import Reserved, RowKey, Trajectory, TrajectoryHeader, Turn
from rl_async.recording import files_of_step, read_images, read_trajectories
from rl_async.torch_shared import to_device
from rl_async.trainer.algorithms.correction import grammar_weights
from rl_async.trainer.batch_layout import MiniBatch, RowCost, fresh_runs, layout
from rl_async.trainer.packing import Reading, Rows, Tensors, on_tokens
from rl_async.trainer.ranks import DataParallel, StopRequest
from rl_async.transfer_queue.client import SyncQueueClient

POLL_S = 2.0
REMIND_S = 1800.0
log = logging.getLogger("rl_async.trainer")


class BatchSource(Protocol):
    """Gives batches by step.

    ``reserve`` returns the same batch for a step however often it is called, or None once ``stopping()`` is true.
    """

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None: ...
    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]: ...
    def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]: ...
    def commit(self, step: int) -> None: ...
    def checkpointed(self, step: int) -> None: ...
    def snapshot(self) -> bytes: ...
    def tighten(self, max_staleness: int) -> None: ...


class QueueSource:
    """Consumes reserved batches of the transfer queue.

    A batch may take ``timeout_s``, not counting the time when no agent program asks for episodes.
    ``on_mismatch(step, hashes)`` is called when fetched rows do not match their announced token hashes.
    """

    def __init__(
        self,
        queue: SyncQueueClient,
        timeout_s: float,
        on_mismatch: Callable[[int, Mapping[RowKey, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._timeout_s, self._on_mismatch, self._clock = queue, timeout_s, on_mismatch, clock
        self._reserved_step = 0

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None:
        """Wait for the batch of ``step``, polling the queue and ``stopping`` every POLL_S.

        Raises RlAsyncError, naming the missing groups, when the deadline passes.
        """
        left_s, looked_at = self._timeout_s, self._clock()
        # Of a pause of this process, in which it could not hear the queue, this much is counted.
        most_s = max(2 * POLL_S, self._timeout_s / 8)
        remind_at = -math.inf
        while True:
            reply = self._queue.reserve(step, POLL_S)
            if isinstance(reply, Reserved):
                self._reserved_step = step
                return reply
            if stopping():
                return None
            now = self._clock()
            left_s -= min(now - looked_at, most_s)
            looked_at = now
            if reply.unattended_s > 0:
                left_s = self._timeout_s
                if now > remind_at:
                    remind_at = now + REMIND_S
                    log.warning(
                        "step %d waits without a deadline: no agent program has asked a gateway for an episode for "
                        "%.0f s; start one (docs/how-to/gateway.md), `rl-async gateway ls RUN` shows who plays",
                        step,
                        reply.unattended_s,
                    )
            if left_s < 0:
                raise RlAsyncError(
                    f"no batch for step {step} within {self._timeout_s:.0f} s (trainer.batch_timeout_s): {reply.why}"
                )

    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        """Fetch rows. Raises RowsLost, and RowsChanged if they have other tokens than were announced to the queue."""
        try:
            return self._queue.fetch_announced(headers)
        except RowsChanged as error:
            self._on_mismatch(self._reserved_step, error.tokens_hash)
            raise

    def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
        """Fetch the bytes, by SHA-256, of all media that rows show. Raises RowsLost."""
        return self._queue.fetch_media(rows) if any(row.media for row in rows) else {}

    def commit(self, step: int) -> None:
        self._queue.commit(step)

    def checkpointed(self, step: int) -> None:
        """Let the queue drop all that a durable checkpoint after ``step`` completed steps makes unnecessary."""
        self._queue.retire(step)

    def snapshot(self) -> bytes:
        return self._queue.snapshot()

    def tighten(self, max_staleness: int) -> None:
        """Have the queue admit groups only as far as staleness stays within this bound."""
        self._queue.tighten(max_staleness)


class RecordedSource:
    """Replays the batches in a run's ``trajectories/``, from the newest lineage of each step, without a queue."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []
        self._rows: dict[RowKey, Trajectory] = {}

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None:
        """Read the step's files. Raises UserError if the step was not recorded."""
        self._files = paths = files_of_step(self._folder, step)
        if not paths:
            raise UserError(f"{self._folder} has no recorded batch of step {step}")
        rows = [row for path in paths for row in read_trajectories(path)]
        self._rows = {row.key: row for row in rows}
        return Reserved(step=step, headers=[self._rows[key].header() for key in sorted(self._rows)])

    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        return [self._rows[header.key] for header in headers]

    def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
        """Read the bytes, by SHA-256, of all images that rows of the reserved step show.

        Raises UserError if some were not recorded.
        """
        shown = {medium.sha256 for row in rows for medium in row.media}
        media = {sha256: data for file in self._files for sha256, data in read_images(file, shown).items()}
        if missing := shown - media.keys():
            raise UserError(f"{self._folder}: {len(missing)} images of the step's episodes were not recorded")
        return media

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
    """A reserved batch: every header, and the payloads of the rows that this data-parallel rank trains.

    ``media`` are the bytes, by SHA-256, that these rows show.
    """

    step: int
    headers: Sequence[TrajectoryHeader]
    plan: list[MiniBatch]
    rows: dict[RowKey, Trajectory]
    media: Mapping[str, bytes] = field(default_factory=dict)


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
    """Wait for the batch of ``step`` and fetch the rows that this rank trains. A collective.

    Reserves again if rows were lost with a payload shard. Returns None if any rank was asked to stop. Raises
    RowsChanged on all ranks if any rank fetched a row with other tokens than were announced.
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
        media: Mapping[str, bytes] = {}
        try:
            fetched = source.fetch(mine)
            media = source.fetch_media(fetched)
            rows = fetched
        except RowsLost as error:
            log.warning("step %d: %s", step, error)
        except RowsChanged as error:
            changed = error
        intact, same = agreed(headers, intact=changed is None, fetched=rows is not None)
        if not intact:
            raise changed or RowsChanged(f"step {step}: rows of another rank changed; its log names them", {})
        if same and rows is not None:
            return Batch(step, headers, plan, {row.key: row for row in rows}, media)


def agreed(headers: Sequence[TrajectoryHeader], *, intact: bool, fetched: bool) -> tuple[bool, bool]:
    """Return whether every rank's rows are intact, and whether all ranks fetched the same attempts. A collective."""
    attempts = zlib.crc32(repr([(*header.key, header.attempt) for header in headers]).encode())
    seen = torch.tensor([intact, fetched, attempts, -attempts], dtype=torch.int64)
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen[0]), bool(seen[1]) and seen[2].item() == -seen[3].item()


# --- The whole batch, and micro-batches cut out of it


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of this rank: indexes of its rows in the batch, and their tensors on the device.

    ``readings`` are what teachers read of it, by data source.
    """

    rows: list[int]
    tensors: Tensors
    batch: Rows
    readings: Mapping[str, Reading] = field(default_factory=dict)
    # What was cut before, by the identity of the whole tensor, which is kept so that no other gets the same.
    _cut: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """The cells of [B, T-1] that hold tokens, as a mask, and the position of each in [M]."""
        return self.batch.there(self.rows, self.tensors.mask.shape[1]), self.batch.positions(self.rows)

    def cut(self, whole: Tensor) -> Tensor:
        """Copy this micro-batch's part [B, T-1] of a whole-batch tensor [M] to the device, padded with zeros.

        A micro-batch without rows gets zeros [1, 1]. The first call copies, and later ones return the same tensor.
        """
        return self._once(whole, self._padded)

    def cut_rows(self, values: Tensor) -> Tensor:
        """Copy the values of these rows [B] of a tensor of the batch's rows [N] to the device, as ``cut`` does.

        A micro-batch without rows gets a single 1.
        """
        return self._once(values, lambda whole: whole[self.rows] if self.rows else whole.new_ones(1))

    def _once(self, whole: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
        if id(whole) not in self._cut:
            self._cut[id(whole)] = whole, to_device(cut(whole), self.tensors.mask.device)
        return self._cut[id(whole)][1]

    def _padded(self, whole: Tensor) -> Tensor:
        if not self.rows:
            return whole.new_zeros(1, 1)
        there, positions = self._places
        padded = whole.new_zeros(there.shape)
        padded[there] = whole[positions]
        return padded

    def upload(self, wholes: Sequence[Tensor], values: Tensor) -> None:
        """Begin to copy to the device what a loss is going to ``cut``, and of ``values`` [N] its rows.

        A copy within the loss would wait for the forward pass, and leave the device without work for the backward pass.
        """
        self.cut_rows(values)
        for whole in wholes:
            self.cut(whole)
        # The first access uploads it.
        _ = self.recorded

    @cached_property
    def recorded(self) -> Tensor | None:
        """Trained tokens whose experts were recorded, bool [B, T-1] on the device; None without any record."""
        experts, mask = self.tensors.experts, self.tensors.mask
        return None if experts is None else mask & to_device(experts[:, :-1, 0, 0] >= 0, mask.device)


@dataclass(frozen=True)
class WholeBatch:
    """N rows with M predicted tokens in all; on the host, in batch order, the same on every rank.

    Attributes:
        mask: bool [M], tokens that train.
        behaviour: [M], log mu.
        age: int64 [M], staleness in steps.
        turns: int64 [M], assistant turn of each sampled token, -1 elsewhere.
        turn_rewards: [M], on the last token of their turn.
        constrained: bool [M], tokens that were sampled under a grammar's mask.
        states: int64 [M], a checksum of the messages that a sampled token's turn answers; None if it was not asked for.
        observed: bool [M], tokens of messages of others behind the row's first sampled token.
        grammar_weights: [M], set by ``without_masks``.
    """

    headers: Sequence[TrajectoryHeader]
    rows: Rows
    mask: Tensor
    behaviour: Tensor
    age: Tensor
    turns: Tensor
    turn_rewards: Tensor
    constrained: Tensor
    observed: Tensor
    states: Tensor | None = None
    grammar_weights: Tensor | None = None

    def without_masks(self, proximal: Tensor) -> "WholeBatch":
        """Replace log mu of constrained tokens by log pi_old [M], and keep their ratio as ``grammar_weights``.

        A formula per token then treats them as if the policy had sampled them without a mask when the step began.
        Measurements over a row or the batch leave them out (``free``).
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
        """bool [M], tokens that train and were sampled without a grammar's mask.

        Only they measure how far policies have moved apart, so corrections, ratios of rows, selections and metrics of
        drift are over them.
        """
        return self.mask & ~self.constrained

    @cached_property
    def players(self) -> Tensor:
        """int64 [N], the number of each row's player, which is a role of an episode, or an episode without roles.

        The rows of a player share one reward.
        """
        return numbered([(h.episode_id, h.role) for h in self.headers])

    @cached_property
    def groups(self) -> Tensor:
        """int64 [N], the number of each row's baseline group: the rows of its group that have its role."""
        return numbered([(h.group_id, h.role) for h in self.headers])

    @cached_property
    def row_weights(self) -> Tensor:
        """float64 [N], 1 / rows of the row's episode, so that an episode counts once in the loss.

        A greedy episode has weight 0, since it never trains.
        """
        rows = Counter(h.episode_id for h in self.headers)
        weights = [0.0 if h.baseline else 1.0 / rows[h.episode_id] for h in self.headers]
        return torch.tensor(weights, dtype=torch.float64)

    @cached_property
    def player_weights(self) -> Tensor:
        """float64 [N], 1 / rows of the row's player, so that an episode counts once for each role in its group.

        A greedy episode has weight 0, since it never trains.
        """
        rows = Counter((h.episode_id, h.role) for h in self.headers)
        weights = [0.0 if h.baseline else 1.0 / rows[h.episode_id, h.role] for h in self.headers]
        return torch.tensor(weights, dtype=torch.float64)


def numbered(keys: Sequence[Hashable]) -> Tensor:
    """Number keys [N] from 0 in order of their first occurrence, int64 [N]."""
    found: dict[Hashable, int] = {}
    return torch.tensor([found.setdefault(key, len(found)) for key in keys], dtype=torch.int64)


# Codes of a token in ``assemble``: 0 not sampled, 1 sampled outside any turn, 2 in assistant turn 0, 3 in turn 1, and
# so on. CONSTRAINED is added to the code of a token that was sampled under a grammar's mask, and OBSERVED is that of a
# token that was not sampled, but read after the first one that was.
FIRST_TURN = 2
CONSTRAINED = 1 << 30
OBSERVED = 1 << 29


def assemble(
    ranks: DataParallel, batch: Batch, max_staleness: int | None, trains: Tensor, *, with_states: bool = False
) -> WholeBatch:
    """Build the whole batch from each rank's own rows. A collective: one all-reduce of 12 bytes per token, or 16.

    A rank fills in the rows that the plan gives it, and the all-reduce adds those of the others. Floats travel as the
    integers that have their bits, since adding 0 then changes no bit. Staleness and mask follow from the headers, which
    every rank has. Tokens staler than ``max_staleness`` are masked unless it is None, and so are rows where
    ``trains``, bool [N], is false.
    """
    headers = batch.headers
    lengths = torch.tensor([header.tokens for header in headers])
    starts = Rows(lengths).starts.numpy()
    spans = [slice(start, start + header.tokens) for start, header in zip(starts, headers, strict=True)]
    packed = np.zeros((3 + with_states, int(lengths.sum())), np.int32)
    behaviour, turn_rewards, codes = packed[0].view(np.float32), packed[1].view(np.float32), packed[2]
    own = [i for mini in batch.plan for micro in mini.ranks[ranks.rank] for i in micro]
    for i, row in [(i, batch.rows[headers[i].key]) for i in own]:
        span = spans[i]
        behaviour[span], codes[span] = row.logprobs, row.loss_mask
        # The code of an assistant turn stands on its sampled tokens, and its reward on the last of them.
        for number, turn in enumerate(turn for turn in row.turns if turn.role == "assistant"):
            sampled = span.start + turn.start + np.flatnonzero(row.loss_mask[turn.start : turn.end])
            codes[sampled] = FIRST_TURN + number
            if len(sampled) and turn.reward is not None:
                turn_rewards[sampled[-1]] = turn.reward
        if with_states:
            for turn, state in turn_states(row):
                packed[3, span.start + turn.start : span.start + turn.end] = state
        if row.constrained:
            sampled = span.start + np.flatnonzero(row.loss_mask)
            for start, end in row.constrained:
                codes[sampled[start:end]] += CONSTRAINED
        for turn in row.turns:
            if turn.role != "assistant" and turn.start > row.loss_mask.argmax():
                there = codes[span.start + turn.start : span.start + turn.end]
                there[there == 0] = OBSERVED
    ranks.all_reduce(torch.from_numpy(packed))
    observed = codes == OBSERVED
    codes[observed] = 0
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
    trained = on_tokens(trains, rows)

    def of_predicted(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[predicted])

    return WholeBatch(
        headers=headers,
        rows=rows,
        mask=of_predicted(mask) & trained,
        behaviour=of_predicted(behaviour),
        age=of_predicted(age),
        turns=of_predicted(np.maximum(codes - FIRST_TURN, -1)).long(),
        turn_rewards=of_predicted(turn_rewards),
        constrained=of_predicted(constrained),
        observed=of_predicted(observed) & trained,
        states=of_predicted(packed[3]).long() if with_states else None,
    )


def turn_states(row: Trajectory) -> Iterator[tuple[Turn, int]]:
    """Yield the assistant turns of a row, each with a checksum, int32, of the messages since the turn before it."""
    told = list[object]()
    for turn in row.turns:
        if turn.role == "assistant":
            yield turn, zlib.crc32(repr(told).encode()) - (1 << 31)
            told = []
        else:
            shown = [medium.sha256 for medium in row.media if turn.start <= medium.position < turn.end]
            told.append((turn.role, turn.text, shown))


def gather(ranks: DataParallel, micros: Sequence[MicroBatch], parts: Sequence[Tensor], rows: Rows) -> Tensor:
    """Combine one tensor [B, T-1] per micro-batch of every rank into [M], on the host of all ranks. A collective.

    The result is float64 if the parts are, else float32. One data-parallel rank holds each row, so the sum is exact.
    """
    double = any(part.dtype == torch.float64 for part in parts)
    whole = torch.zeros(int(rows.lengths.sum()), dtype=torch.float64 if double else torch.float32)
    for micro, part in zip(micros, parts, strict=True):
        if micro.rows:
            there = rows.there(micro.rows, part.shape[1])
            whole[rows.positions(micro.rows)] = part.detach().to("cpu", whole.dtype)[there]
    ranks.all_reduce(whole)
    return whole
