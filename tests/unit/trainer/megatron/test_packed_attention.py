"""Which tokens of packed rows each of the ranks that share them holds."""

import importlib.util
import warnings
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.trainer.megatron.packed_attention import shared_places
from rl_async.trainer.packing import Tensors


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_ranks_hold_every_token_once_and_two_parts_of_each_row(ranks: int, parts: list[int]) -> None:
    """A row of 2 S parts: rank r has part r, and part r from the back."""
    lengths = [2 * ranks * size for size in parts]
    rows, places = shared_places(torch.tensor([0, *accumulate(lengths)]), ranks)
    held = {pair for rank in range(ranks) for pair in zip(rows[rank].tolist(), places[rank].tolist(), strict=True)}
    assert held == {(row, place) for row, length in enumerate(lengths) for place in range(length)}
    assert len(held) == rows.numel() == places.numel()
    for rank in range(ranks):
        expected = []
        for row, (size, length) in enumerate(zip(parts, lengths, strict=True)):
            front = range(rank * size, (rank + 1) * size)
            back = range(length - (rank + 1) * size, length - rank * size)
            expected += [(row, place) for place in (*front, *back)]
        assert list(zip(rows[rank].tolist(), places[rank].tolist(), strict=True)) == expected


@given(st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_a_rank_alone_holds_rows_of_any_length_in_order(lengths: list[int]) -> None:
    rows, places = shared_places(torch.tensor([0, *accumulate(lengths)]), 1)
    assert rows.tolist() == [[row for row, length in enumerate(lengths) for _ in range(length)]]
    assert places.tolist() == [[place for length in lengths for place in range(length)]]


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (1, 8), (2, 1), (2, 8), (4, 3)])
def test_padding_counts_as_no_token(ranks: int, multiple: int) -> None:
    """A full row, one that ends early, and one of a single token; padding has a row and a position that exist."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rl_async.trainer.megatron.backend import pack_rows
    lengths = [7, 5, 1]
    batch = Tensors(
        tokens=torch.zeros(3, 7, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        mask=torch.zeros(3, 6, dtype=torch.bool),
        temperature=torch.ones(3, 1, 1),
    )
    packed = pack_rows(batch, ranks, multiple)
    assert packed.rows.shape == packed.places.shape == packed.there.shape == (ranks, packed.rows.shape[1])
    assert packed.rows.shape[1] % multiple == 0
    assert packed.rows.max() < 3 and packed.places.max() < 7
    tokens = zip(packed.rows[packed.there].tolist(), packed.places[packed.there].tolist(), strict=True)
    assert sorted(tokens) == [(row, place) for row, length in enumerate(lengths) for place in range(length)]
