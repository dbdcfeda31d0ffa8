"""Attention through a window in blocks is attention with a mask over the whole row."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_async.torch_shared import BLOCK, windowed


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=sees)


def seen(queries: int, tokens: int, window: int | None) -> Tensor:
    """Bool [queries, tokens]."""
    distance = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@pytest.mark.parametrize(
    ("queries", "tokens", "window"),
    [
        (2 * BLOCK + 3, 2 * BLOCK + 3, 5),  # a whole row in three blocks
        (BLOCK + 1, BLOCK + 90, 64),  # the end of one: its first window reaches before it
        (700, 1500, BLOCK + 1),  # windows longer than BLOCK, and a block with keys of all before it
        (40, 50, 64),
        (40, 50, None),
    ],
)
def test_blocks_give_what_the_whole_mask_gives(queries: int, tokens: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(queries)
    shapes = [(1, 2, count, 4) for count in (queries, tokens, tokens, queries)]
    q, k, v, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    inputs = [part.requires_grad_() for part in (q, k, v)]
    whole = attend(q, k, v, seen(queries, tokens, window))
    blocks = windowed(q, k, v, window, attend)
    torch.testing.assert_close(blocks, whole)
    for found, right in zip(
        torch.autograd.grad(blocks, inputs, slope), torch.autograd.grad(whole, inputs, slope), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_no_block_is_given_more_keys_than_its_windows_reach() -> None:
    sizes: list[tuple[int, int]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        sizes.append((q.shape[2], k.shape[2]))
        return attend(q, k, v, sees)

    row = torch.zeros(1, 1, 10 * BLOCK, 2)
    windowed(row, row, row, 32, noted)
    assert max(sizes) == (BLOCK, BLOCK + 31) and len(sizes) == 10
