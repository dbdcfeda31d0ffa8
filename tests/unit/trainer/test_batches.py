"""Batches: their sources, the rows that a rank takes, and the whole batch that all ranks hold."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async import codec
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RlAsyncError, RowsChanged, RowsLost
from rl_async.messages import Done, NotReady, Reserved, Trajectory, TrajectoryHeader, Turn, Version, VersionRun
from rl_async.trainer import batches
from rl_async.trainer.algorithms.rows import on_tokens
from rl_async.trainer.batch_layout import MiniBatch, RowCost
from rl_async.trainer.batches import Batch, QueueSource, agreed, assemble, take_batch
from rl_async.trainer.ranks import DataParallel, StopRequest, pure_data_parallel
from rl_async.trainer.records import Recorder
from rl_async.transfer_queue.client import announced_rows, parcel
from tests.conftest import make_rows
from tests.support.batches import whole_batch


class SourceQueue:
    """Answers what it is given, one after another."""

    def __init__(self, *answers: Reserved | NotReady) -> None:
        self.answers = list(answers)

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady:
        return self.answers.pop(0)

    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        return []

    def commit(self, step: int) -> Done:
        return Done()

    def retire(self, step: int) -> Done:
        return Done()

    def snapshot(self) -> bytes:
        return b""

    def tighten(self, max_staleness: int) -> Done:
        return Done()


AWAY = NotReady(why="none", unattended_s=280.0)
MISSING = NotReady(why="one is missing")
BATCH = Reserved(step=3, headers=[])


def source(
    *answers: Reserved | NotReady, timeout_s: float = 1e-9, clock: Callable[[], float] = time.monotonic
) -> QueueSource:
    return QueueSource(SourceQueue(*answers), timeout_s, lambda step, rows: None, clock)


def test_no_deadline_passes_while_no_program_plays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rl_async.trainer"):
        assert source(*[AWAY] * 5, BATCH, timeout_s=3600.0).reserve(3, lambda: False) is BATCH
    (line,) = [record.getMessage() for record in caplog.records]
    assert "280 s" in line and "step 3" in line


def test_the_deadline_counts_from_when_a_program_was_there_last() -> None:
    clock = map(float, range(0, 10000, 100)).__next__
    assert source(*[AWAY] * 20, BATCH, timeout_s=300.0, clock=clock).reserve(3, lambda: False) is BATCH
    with pytest.raises(RlAsyncError, match=r"trainer\.batch_timeout_s"):
        source(*[AWAY] * 3, *[MISSING] * 9, timeout_s=300.0, clock=clock).reserve(3, lambda: False)


def test_a_request_to_stop_ends_the_wait() -> None:
    assert source(AWAY, AWAY).reserve(3, lambda: True) is None


CONFIG = RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="none"))


class ChangedRowsQueue:
    """Reserves one batch, and gives the rows of each answer in turn; the last again and again."""

    def __init__(self, *answers: list[Trajectory] | RowsLost) -> None:
        self._answers = list(answers)

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady:
        return Reserved(
            step=step, headers=[parcel([row], None).headers[0] for row in make_rows(step, groups=1, samples=2)]
        )

    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, RowsLost):
            raise answer
        announced_rows(headers, list(map(codec.encode, answer)))
        return answer

    def commit(self, step: int) -> Done:
        return Done()

    def retire(self, step: int) -> Done:
        return Done()

    def snapshot(self) -> bytes:
        return b""

    def tighten(self, max_staleness: int) -> Done:
        return Done()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def take(queue: ChangedRowsQueue, folder: Path) -> list[Trajectory]:
    source = QueueSource(queue, 1.0, Recorder(folder, 2, 0, is_recorder=False).refused)
    batch = take_batch(5, source, StopRequest(), CONFIG, pure_data_parallel(), RowCost(0, 0))
    assert batch is not None
    return list(batch.rows.values())


def test_rows_that_were_lost_are_asked_for_again(alone: None, tmp_path: Path) -> None:
    rows = make_rows(5, groups=1, samples=2)
    assert take(ChangedRowsQueue(RowsLost("gone"), rows), tmp_path) == rows


def test_changed_rows_are_recorded_by_any_rank_and_never_trained(alone: None, tmp_path: Path) -> None:
    rows = make_rows(5, groups=1, samples=2)
    changed = msgspec.structs.replace(rows[1], token_ids=rows[1].token_ids + 1)
    with pytest.raises(RowsChanged):
        take(ChangedRowsQueue([rows[0], changed]), tmp_path)
    (line,) = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
    key = dict(zip(("group", "sample", "segment"), rows[1].key, strict=True))
    assert line == {"lineage": 2, "step": 5, "rank": 0, "tokens_hash": changed.tokens_hash()} | key


def test_a_rank_with_intact_rows_ends_with_the_one_whose_rows_changed(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "agreed", lambda *_, **__: (False, False))
    with pytest.raises(RowsChanged) as caught:
        take(ChangedRowsQueue(make_rows(5, groups=1, samples=2)), tmp_path)
    assert caught.value.tokens_hash == {}, "another rank's log names them"


def test_ranks_go_on_only_if_no_row_of_any_changed(alone: None) -> None:
    headers = [row.header() for row in make_rows(0)]
    assert agreed(headers, intact=True, fetched=True) == (True, True)
    assert agreed(headers, intact=True, fetched=False) == (True, False)
    assert agreed(headers, intact=False, fetched=False)[0] is False


class Ranks(DataParallel):
    """One of two ranks, which adds what the other has sent before."""

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        super().__init__(rank, 2, is_recorder=True)
        self.__dict__["sent"] = sent

    def all_reduce(self, tensor: Tensor) -> None:
        own = tensor.clone()
        for other in self.__dict__["sent"]:
            tensor += other
        self.__dict__["sent"].append(own)


def test_tokens_shift_by_one_and_stale_ones_are_masked() -> None:
    row = make_rows(0)[0]
    sampled = int(row.loss_mask.sum())
    row.versions = [VersionRun(Version(0, 1), 0, 3), VersionRun(Version(0, 5), 3, sampled)]
    free, bound = whole_batch([row], step=5), whole_batch([row], step=5, max_staleness=2)
    assert np.array_equal(free.mask.numpy(), row.loss_mask[1:])
    assert np.array_equal(free.behaviour.numpy(), row.logprobs[1:])
    assert free.age[free.mask].tolist() == [4] * 3 + [0] * (sampled - 3) and free.age.dtype == torch.int64
    assert int(free.mask.sum()) - int(bound.mask.sum()) == 3
    assert not bound.mask[3:6].any()


def test_a_first_token_that_was_sampled_counts_in_its_version() -> None:
    row = make_rows(0)[0]
    row.loss_mask = np.ones(len(row.token_ids), dtype=bool)
    row.versions = [VersionRun(Version(0, 1), 0, 2), VersionRun(Version(0, 5), 2, len(row.token_ids))]
    assert whole_batch([row], step=5).age.tolist() == [4] + [0] * (len(row.token_ids) - 2)


def test_turns_and_their_rewards_stand_on_sampled_tokens() -> None:
    row = make_rows(0)[0]
    n = len(row.token_ids)
    row.loss_mask[:] = [False] * 2 + [True] * 2 + [False] + [True] * (n - 5)
    row.versions = [VersionRun(Version(0, 0), 0, n - 3)]
    row.turns = [
        Turn(role="assistant", text="", start=2, end=5, reward=0.5),
        Turn(role="tool", text="", start=5, end=5),
        Turn(role="assistant", text="", start=5, end=7, reward=0.25),
    ]
    got = whole_batch([row])
    assert got.turns.tolist() == [-1, 0, 0, -1, 1, 1] + [-1] * (n - 7) and got.turns.dtype == torch.int64
    assert got.turn_rewards.tolist() == [0, 0, 0.5, 0, 0, 0.25] + [0] * (n - 7)


@pytest.mark.parametrize("share", [[0, 2], []])
def test_ranks_that_hold_different_rows_get_the_same_batch(share: list[int]) -> None:
    rows = make_rows(3, groups=2)
    rows[4].loss_mask[:] = False
    rows[4].versions = []
    rows[1].logprobs[5:] = -0.0  # every bit survives
    rows[0].constrained, rows[3].constrained = [(1, 3), (4, 5)], [(0, int(rows[3].loss_mask.sum()))]
    rest = [i for i in range(len(rows)) if i not in share]
    plan = [MiniBatch(ranks=[[share], [rest]], rows=list(range(len(rows))))]
    trains = torch.arange(len(rows)) != 6
    headers, sent = [row.header() for row in rows], list[Tensor]()
    for rank, own in ((0, share), (1, rest)):
        batch = Batch(3, headers, plan, {rows[i].key: rows[i] for i in own})
        got = assemble(Ranks(rank, sent), batch, None, trains)
    expected = whole_batch(rows, step=3)
    for name in ("behaviour", "age", "turns", "turn_rewards", "constrained"):
        assert torch.equal(getattr(got, name), getattr(expected, name))
    constrained, mask = got.rows.pad_all(got.constrained), expected.rows.pad_all(expected.mask)
    assert constrained[0].nonzero().flatten().tolist() == [4, 5, 7]  # token 4, the first sampled, is predicted at 3
    assert torch.equal(constrained[3], mask[3]) and not constrained[[1, 2, 4]].any()
    rows[0].constrained = rows[3].constrained = []
    assert torch.equal(got.turns, whole_batch(rows, step=3).turns), "a mark is no part of the turn's number"
    assert torch.equal(got.behaviour.view(torch.int32), expected.behaviour.view(torch.int32))
    assert torch.equal(got.mask, expected.mask & on_tokens(trains, got.rows))
