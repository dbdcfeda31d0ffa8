"""Rows of a micro-batch as tensors."""

import numpy as np
import torch

from rl_async.trainer.batches.tensors import collate
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
