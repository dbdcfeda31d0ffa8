"""Dealing out rows so that ranks have equal work."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_async.trainer.batch_layout import imbalance, karmarkar_karp


def spread(sizes: list[int], parts: list[list[int]]) -> int:
    sums = [sum(sizes[i] for i in part) for part in parts]
    return max(sums) - min(sums)


def longest_first(sizes: list[int], parts: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(shares, key=lambda share: sum(sizes[j] for j in share)).append(i)
    return shares


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 9))
def test_every_row_is_dealt_out_once_and_no_part_is_off_by_more_than_a_row(sizes: list[int], parts: int) -> None:
    shares = karmarkar_karp(sizes, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    assert spread(sizes, shares) <= max(sizes, default=0)
    assert all(sizes[a] >= sizes[b] for share in shares for a, b in itertools.pairwise(share))
    assert shares == karmarkar_karp(list(sizes), parts)


def test_the_example_of_the_literature() -> None:
    sizes = [8, 7, 6, 5, 4]
    assert spread(sizes, karmarkar_karp(sizes, 2)) == 2
    assert spread(sizes, longest_first(sizes, 2)) == 4


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_it_beats_giving_the_longest_row_to_the_lightest_rank(parts: int) -> None:
    random = np.random.default_rng(parts)
    batches = [random.lognormal(6, 1, 64).astype(int).tolist() for _ in range(50)]
    ours = [spread(sizes, karmarkar_karp(sizes, parts)) for sizes in batches]
    greedy = [spread(sizes, longest_first(sizes, parts)) for sizes in batches]
    assert np.median(ours) < 0.7 * np.median(greedy)


def test_imbalance_is_the_excess_of_the_largest_over_the_mean() -> None:
    assert imbalance([3, 1]) == pytest.approx(0.5)
    assert imbalance([2, 2, 2]) == imbalance([0, 0]) == 0.0
