"""Rows without padding."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_async.trainer.algorithms.rows import PART, Rows, by_rows, on_tokens, row_sums

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_rows_are_found_padded_and_packed_again(lengths: list[int], draw) -> None:
    rows, values = Rows(torch.tensor(lengths)), torch.arange(1, sum(lengths) + 1)
    pieces = values.split(lengths)
    chosen = draw.sample(range(len(lengths)), draw.randint(1, len(lengths)))
    assert rows.positions(chosen).tolist() == [n - 1 for i in chosen for n in pieces[i].tolist()]
    width = max(max(lengths), 1)
    assert rows.pad(values, chosen, width + 2, fill=-1).tolist() == [
        pieces[i].tolist() + [-1] * (width + 2 - lengths[i]) for i in chosen
    ]
    assert rows.pad_all(values).shape == (len(lengths), width)
    assert torch.equal(rows.pack(rows.pad_all(values)), values)
    sums = row_sums(rows.pad_all(values), None)
    assert torch.equal(row_sums(values, rows), sums)
    assert torch.equal(on_tokens(sums, rows), rows.pack(on_tokens(sums, None).expand(-1, width)))


@given(LENGTHS)
def test_a_function_of_each_row_gives_the_same_in_parts(lengths: list[int]) -> None:
    rows, values = Rows(torch.tensor(lengths)), torch.arange(sum(lengths))

    def function(padded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return padded.cumsum(1), padded.sum(1, keepdim=True) > 5

    whole = [rows.pack(result.expand(len(lengths), max(max(lengths), 1))) for result in function(rows.pad_all(values))]
    for got, expected in zip(by_rows(function, rows, values), whole, strict=True):
        assert torch.equal(got, expected)


@given(st.lists(st.sampled_from([0, 1, 5, 1000, PART // 3, PART, 2 * PART]), min_size=1, max_size=30))
def test_a_part_is_small_and_hardly_padded(lengths: list[int]) -> None:
    parts = [part.tolist() for part in Rows(torch.tensor(lengths)).similar()]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        sizes = [lengths[i] for i in part]
        assert len(part) == 1 or len(part) * max(sizes) <= PART
        assert 2 * min(sizes) >= max(sizes) or max(sizes) == 1
