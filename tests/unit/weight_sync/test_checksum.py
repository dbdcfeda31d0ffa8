"""Checksums: what the sums are, that every change of one word is found, and that both kinds work anywhere."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_async.weight_sync.buckets import SUM_BLOCK, SUMS, _hex, checksum, checksum_like, sums
from tests.support.effort import examples

WORD = (1 << 64) - 1


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def factor(number: int) -> int:
    """SplitMix64's output with this number, as published, made odd."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return (z ^ z >> 31) | 1


def expected(data: bytes) -> str:
    """Both sums with Python's own integers."""
    first = second = len(data)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    for at, word in enumerate(words):
        weight = factor(at % SUM_BLOCK) * factor(SUM_BLOCK + at // SUM_BLOCK)
        upper = (word >> 32) - (1 << 32 if word >> 63 else 0)  # words have a sign
        first, second = first + weight * word & WORD, second + weight * upper & WORD
    return f"{SUMS}{first:016x}{second:016x}"


@pytest.mark.parametrize(
    "count", [0, 1, 7, 8, 9, 8 * SUM_BLOCK - 1, 8 * SUM_BLOCK, 8 * SUM_BLOCK + 1, 16 * SUM_BLOCK + 803]
)
def test_the_sums_are_what_is_documented(count: int) -> None:
    data = random_bytes(count)
    assert checksum_like(SUMS, data) == expected(data.numpy().tobytes())


def test_the_host_uses_plain_xxh3_128() -> None:
    assert checksum(torch.tensor([], dtype=torch.uint8)) == "99aa06d3014798d86001c324468d497f"  # published test vector


@settings(max_examples=examples(200))
@given(st.integers(1, 100), st.data())
def test_any_flipped_bit_is_found(count: int, draw: st.DataObject) -> None:
    data = random_bytes(count)
    before = sums(data)
    data[draw.draw(st.integers(0, count - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert not torch.equal(sums(data), before)


@settings(max_examples=examples(200))
@given(st.integers(0, 63), st.integers(1, 6), st.integers(0, 1000))
@example(63, 2, 0)
def test_the_same_bit_flipped_in_several_words_is_found(bit: int, words: int, seed: int) -> None:
    """The upper bits of products are lost modulo 2^64: without the second sum, two of them would cancel out."""
    data = random_bytes(64, seed)
    before = sums(data)
    data.view(torch.int64)[:words] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert not torch.equal(sums(data), before)


@pytest.mark.parametrize(
    ("one", "other"),
    [((0, 8), (8, 16)), ((0, 4), (4, 8)), ((0, 8), (8 * SUM_BLOCK, 8 * SUM_BLOCK + 8)), ((0, 1), (2, 3))],
)
def test_parts_that_changed_places_are_found(one: tuple[int, int], other: tuple[int, int]) -> None:
    data = random_bytes(16 * SUM_BLOCK)
    swapped = data.clone()
    swapped[slice(*one)], swapped[slice(*other)] = data[slice(*other)], data[slice(*one)]
    assert not torch.equal(sums(swapped), sums(data))


def test_zeros_are_not_any_number_of_zeros() -> None:
    found = {checksum_like(SUMS, torch.zeros(count, dtype=torch.uint8)) for count in (1, 2, 8, 16, 8 * SUM_BLOCK)}
    assert len(found) == 5


def test_a_view_has_the_checksum_of_its_own_bytes() -> None:
    data = random_bytes(1000)
    for start in (0, 3, 8):
        assert torch.equal(sums(data[start:]), sums(data[start:].clone()))
        assert checksum(data[start:]) == checksum(data[start:].clone())


def test_the_kind_that_is_expected_is_computed() -> None:
    data = random_bytes(100)
    assert checksum_like(checksum(data), data) == checksum(data)
    assert checksum_like(_hex(sums(data)), data) == _hex(sums(data)) != checksum(data)
