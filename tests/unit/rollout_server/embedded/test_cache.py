"""Blocks of prefixes: what is found, and in which order blocks are evicted."""

import random

import torch

from rl_async.rollout_server.embedded.cache import BLOCK, PrefixCache, joined

ROOM = 1000 * BLOCK


def numbered(tokens: list[int], start: int, end: int) -> torch.Tensor:
    """Keys and values that name their tokens, of two layers."""
    return torch.tensor(tokens[start:end], dtype=torch.float32)[:, None].expand(2, 2, 1, end - start, 3)


def keep(cache: PrefixCache, tokens: list[int], room: int = ROOM) -> None:
    cache.keep(tokens, lambda start, end: numbered(tokens, start, end), room)


def found(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """The tokens whose keys and values are known."""
    blocks = cache.find(tokens)
    return joined(blocks)[0, 0, 0, :, 0].int().tolist() if blocks else []


def test_the_longest_known_prefix_leaves_a_token_to_compute() -> None:
    cache, tokens = PrefixCache(), list(range(3 * BLOCK + 5))
    assert found(cache, tokens) == []
    keep(cache, tokens)
    assert found(cache, tokens) == tokens[: 3 * BLOCK]
    assert found(cache, tokens[: 3 * BLOCK]) == tokens[: 2 * BLOCK]
    assert found(cache, tokens[: 3 * BLOCK + 1]) == tokens[: 3 * BLOCK]
    assert found(cache, [*tokens[: BLOCK + 1], 99, *tokens]) == tokens[:BLOCK]
    assert found(cache, tokens[BLOCK:]) == [], "the same tokens behind others"
    cache.clear()
    assert found(cache, tokens) == [] and cache.nbytes == 0


def test_blocks_that_prefixes_share_are_held_once_and_read_once() -> None:
    cache, tokens = PrefixCache(), list(range(4 * BLOCK))
    reads = []

    def read(start: int, end: int) -> torch.Tensor:
        reads.append((start, end))
        return numbered(tokens, start, end)

    cache.keep(tokens[: 2 * BLOCK], read, ROOM)
    before = cache.nbytes
    cache.keep(tokens, read, ROOM)
    cache.keep(tokens, read, ROOM)
    assert reads == [(0, 2 * BLOCK), (2 * BLOCK, 4 * BLOCK)]
    assert cache.nbytes == 2 * before


def test_the_least_recently_used_end_is_evicted_first() -> None:
    cache = PrefixCache()
    one, two = ([base + i for i in range(3 * BLOCK)] for base in (0, 1000))
    keep(cache, one)
    keep(cache, two)
    cache.find([*one, 0])
    cache.shrink(5 * BLOCK)
    assert found(cache, [*two, 0]) == two[: 2 * BLOCK]
    cache.find([*one, 0])
    cache.shrink(3 * BLOCK)
    assert found(cache, [*two, 0]) == []
    assert found(cache, [*one, 0]) == one


def test_no_more_is_held_than_there_is_room_for() -> None:
    draw, cache = random.Random(0), PrefixCache()
    each = 2 * 2 * BLOCK * 3 * 4
    for _ in range(200):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(6 * BLOCK))]
        room = draw.randrange(8 * BLOCK)
        cache.shrink(room)
        keep(cache, tokens, room)
        assert cache.nbytes <= room // BLOCK * each
        known = found(cache, [*tokens, 0])
        assert known == tokens[: len(known)]
