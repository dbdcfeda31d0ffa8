"""The whole batch, put together from what each rank knows."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_async.messages import Turn, Version, VersionRun
from rl_async.trainer.algorithms.rows import on_tokens
from rl_async.trainer.batch_layout import MiniBatch
from rl_async.trainer.batches import Batch, assemble
from rl_async.trainer.ranks import DataParallel
from tests.conftest import make_rows
from tests.support.batches import whole_batch


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
