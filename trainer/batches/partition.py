"""Partition items into parts of nearly equal sums: the largest differencing method."""

import heapq
from bisect import insort
from collections.abc import Sequence

Part = tuple[int, list[int]]  # its sum, and its items


def karmarkar_karp(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Deal the indexes of ``sizes`` out to ``parts`` lists with nearly equal sums, each with its largest item first.

    Every item begins as a division of its own; the two divisions that are most uneven are merged, the heaviest part of
    one with the lightest of the other, until one is left (Karmarkar and Karp, The Differencing Method of Set
    Partitioning, UCB/CSD 82/113, 1982). Empty parts of a division are not listed, so that time and memory are
    O(n log n + parts). The same sizes give the same parts.
    """
    heap: list[tuple[int, int, list[Part]]] = [(-size, index, [(size, [index])]) for index, size in enumerate(sizes)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        merged = _merged(one, other, parts)
        spread = merged[-1][0] - (merged[0][0] if len(merged) == parts else 0)
        heapq.heappush(heap, (-spread, min(first, second), merged))
    found = [items for _, _, division in heap for _, items in division]
    found.extend([] for _ in range(parts - len(found)))
    return [sorted(items, key=lambda index: (-sizes[index], index)) for items in found]


def _merged(one: list[Part], other: list[Part], parts: int) -> list[Part]:
    """Merge two divisions, each with its lightest part first. Those of one that find no empty part in the other are its
    lightest, which go to the lightest of the other, crosswise."""
    few, many = sorted((one, other), key=len)
    met = max(0, len(few) + len(many) - parts)
    added = [_joined(*pair) for pair in zip(few[:met], reversed(many[:met]), strict=True)] + few[met:]
    del many[:met]
    for part in added:
        insort(many, part)
    return many


def _joined(one: Part, other: Part) -> Part:
    few, many = sorted((one[1], other[1]), key=len)
    many.extend(few)
    return one[0] + other[0], many


def imbalance(sums: Sequence[int]) -> float:
    """How far the largest of these sums is above their mean: 0 is perfect balance."""
    return max(sums) * len(sums) / sum(sums) - 1.0 if any(sums) else 0.0
