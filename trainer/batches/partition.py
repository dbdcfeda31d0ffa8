"""Partition items into parts of nearly equal sums: the largest differencing method."""

import heapq
from collections.abc import Sequence

Part = tuple[int, list[int]]  # its sum, and its items


def karmarkar_karp(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Deal the indexes of ``sizes`` out to ``parts`` lists with nearly equal sums, each with its largest item first.

    Every item begins as a division of its own; the two divisions that are most uneven are merged, the heaviest part of
    one with the lightest of the other, until one is left (Karmarkar and Karp, The Differencing Method of Set
    Partitioning, UCB/CSD 82/113, 1982). O(n log n) merges of O(parts log parts). The same sizes give the same parts.
    """
    if not sizes:
        return [[] for _ in range(parts)]
    heap: list[tuple[int, int, list[Part]]] = [
        (-size, index, [(size, [index])] + [(0, []) for _ in range(parts - 1)]) for index, size in enumerate(sizes)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, heavy = heapq.heappop(heap)
        _, second, light = heapq.heappop(heap)
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(heavy, reversed(light), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    return [sorted(items, key=lambda index: (-sizes[index], index)) for _, items in heap[0][2]]


def imbalance(sums: Sequence[int]) -> float:
    """How far the largest of these sums is above their mean: 0 is perfect balance."""
    return max(sums) * len(sums) / sum(sums) - 1.0 if any(sums) else 0.0
