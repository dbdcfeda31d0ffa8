"""Rows of a micro-batch as tensors."""

import msgspec
import numpy as np
import pytest
import torch

from rl_async.errors import DataError
from rl_async.messages import Trajectory
from rl_async.trainer.packing import collate
from tests.conftest import make_rows


def test_collate_pads_rows_and_masks_what_was_not_sampled() -> None:
    rows = make_rows(0)[:3]
    batch = collate(rows, device="cpu")
    assert batch.lengths.tolist() == [len(row.token_ids) for row in rows]
    for i, row in enumerate(rows):
        assert np.array_equal(batch.tokens[i, : len(row.token_ids)].numpy(), row.token_ids)
        assert not batch.tokens[i, len(row.token_ids) :].any()
        assert np.array_equal(batch.mask[i, : len(row.token_ids) - 1].numpy(), row.loss_mask[1:])


def test_a_given_mask_stands() -> None:
    rows = make_rows(0)[:2]
    mask = torch.zeros((2, max(len(row.token_ids) for row in rows) - 1), dtype=torch.bool)
    assert torch.equal(collate(rows, device="cpu", mask=mask).mask, mask)


def with_experts(first: int, count: int, shape: tuple[int, int] = (2, 3)) -> Trajectory:
    row = make_rows(0)[first]
    experts = (np.arange(count * shape[0] * shape[1]) % 251).astype(np.uint8).reshape(count, *shape)
    return msgspec.structs.replace(row, routed_experts=experts)


def test_experts_are_padded_with_what_no_router_chooses() -> None:
    rows = [with_experts(0, 5), make_rows(0)[1], with_experts(2, len(make_rows(0)[2].token_ids) - 1)]
    batch = collate(rows, device="cpu", replay_routers=True)
    assert batch.experts is not None and batch.experts.shape == (*batch.tokens.shape, 2, 3)
    assert np.array_equal(batch.experts[0, :5].numpy(), rows[0].routed_experts)
    assert (batch.experts[0, 5:] == -1).all() and (batch.experts[1] == -1).all()
    assert np.array_equal(batch.experts[2, : batch.lengths[2] - 1].numpy(), rows[2].routed_experts)
    assert collate(rows, device="cpu").experts is None
    assert collate(rows[1:2], device="cpu", replay_routers=True).experts is None
    with pytest.raises(DataError):
        collate([rows[0], with_experts(1, 4, (2, 4))], device="cpu", replay_routers=True)
