"""From losses per token to one number: the definitions, and that no split changes it."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import Aggregation
from rl_async.trainer.algorithms.losses import AGGREGATIONS, Counts, count


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    values, mask = torch.randn(7, 5).double(), torch.rand(7, 5) > 0.4
    mask[2] = False  # a row that the correction rejected
    return values, mask, torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0]).double()


def reference(mode: str, width: int) -> float:
    values, mask, weights = batch()
    rows = [[v for v, m in zip(*row, strict=True) if m] for row in zip(values.tolist(), mask.tolist(), strict=True)]
    tokens = [v for row in rows for v in row]
    sequences = sum(weights.tolist())
    sums = sum(w * sum(row) for w, row in zip(weights.tolist(), rows, strict=True))
    means = sum(w * sum(row) / len(row) for w, row in zip(weights.tolist(), rows, strict=True) if row)
    return {
        "token-mean": sum(tokens) / len(tokens),
        "token-sum": sum(tokens),
        "seq-mean-token-sum": sums / sequences,
        "seq-mean-token-sum-norm": sums / sequences / width,
        "seq-mean-token-mean": means / sequences,
    }[mode]


def test_config_and_registry_agree() -> None:
    assert set(get_args(Aggregation)) == AGGREGATIONS.keys()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_definitions(mode: str) -> None:
    values, mask, weights = batch()
    assert AGGREGATIONS[mode](values, mask, weights, count(mask, weights, 9)).item() == pytest.approx(
        reference(mode, 9), rel=1e-12
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_split_changes_value_or_gradient_and_masked_garbage_does_not_enter(mode: str) -> None:
    values, mask, weights = batch()
    counts = count(mask, weights, 9)
    whole = values.clone().requires_grad_()
    AGGREGATIONS[mode](whole, mask, weights, counts).backward()
    spoiled = torch.where(mask, values, 1e30)
    for parts in (1, 2, 4, 7):
        split = spoiled.clone().requires_grad_()
        chunks = zip(split.chunk(parts), mask.chunk(parts), weights.chunk(parts), strict=True)
        total = sum(AGGREGATIONS[mode](v, m, w, counts) for v, m, w in chunks)
        assert isinstance(total, Tensor)
        total.backward()
        assert total.item() == pytest.approx(reference(mode, 9), rel=1e-12)
        assert whole.grad is not None and split.grad is not None
        torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=1e-12)


def test_a_row_of_one_token_counts_with_its_whole_loss() -> None:
    values, mask = torch.tensor([[3.0, 9.0], [1.0, 2.0]]), torch.tensor([[True, False], [True, True]])
    weights = torch.ones(2)
    mean = AGGREGATIONS["seq-mean-token-mean"](values, mask, weights, count(mask, weights, 2))
    assert mean.item() == pytest.approx((3.0 + 1.5) / 2)


def test_a_row_in_which_nothing_trains_counts_in_a_mean_over_rows_and_not_over_tokens() -> None:
    _, mask, weights = batch()
    assert count(mask, weights, 9) == Counts(tokens=int(mask.sum()), sequences=6.0, width=9)
    assert count(torch.zeros_like(mask), weights, 9) == Counts(tokens=1, sequences=6.0, width=9)


def test_counts_of_a_mini_batch_without_episodes_that_train_divide_by_one() -> None:
    _, mask, weights = batch()
    assert count(torch.zeros_like(mask), torch.zeros_like(weights), 9) == Counts(tokens=1, sequences=1.0, width=9)
