"""Rows that begin alike as a tree, in which the tokens that they share stand once.

The rows of a group share their prompt, those of one episode a longer history, and all rows perhaps the opening of the
chat format. A causal model computes the same for a token whatever follows it, so one computation serves every row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

LEAST = 8  # tokens: a shorter run is not worth a node of its own, which costs every layer calls


class Node(NamedTuple):
    """A run of tokens without a branch, [start, stop) of the tree's. Those of its descendants are [stop, end)."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True)
class PrefixTree:
    """B rows as N tokens, in an order in which a node's descendants follow it.

    Rows of different temperatures share nothing, so that a token is predicted by one distribution.
    """

    nodes: tuple[Node, ...]  # by start
    places: np.ndarray  # int64 [N], where each token stands in [B, T] when that is flat
    positions: np.ndarray  # int64 [N], in the row
    before: np.ndarray  # int64 [N], the token before it in the row; -1 for a first one
    paths: tuple[np.ndarray, ...]  # per row int64 [T_b], its tokens


def prefix_tree(
    tokens: np.ndarray,
    lengths: Sequence[int],
    temperatures: Sequence[float],
    least: int = LEAST,
    experts: np.ndarray | None = None,
) -> PrefixTree | None:
    """Find what the rows [B, T] share; None if that is nothing. Runs shorter than ``least`` are not shared.

    Tokens that went through other ``experts`` [B, T, layers, k] are not the same.
    """
    building = _Building(least)
    paths: dict[int, np.ndarray] = {}
    places, befores = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    rows = [tokens[row, :length] for row, length in enumerate(lengths)]
    order = sorted(range(len(rows)), key=lambda row: (temperatures[row], rows[row].astype(">u4").tobytes()))
    path = np.empty(0, np.int64)
    for last, row in pairwise([None, *order]):
        assert row is not None
        alike = last is not None and temperatures[last] == temperatures[row]
        common = _common(rows[last], rows[row]) if alike and last is not None else 0
        if common and experts is not None:
            differ = (experts[last, :common] != experts[row, :common]).any((1, 2))
            common = int(differ.argmax()) if differ.any() else common
        shared = building.add(len(rows[row]), common)
        new = np.arange(building.tokens - (len(rows[row]) - shared), building.tokens)
        path = paths[row] = np.concatenate([path[:shared], new])
        places.append(row * tokens.shape[1] + np.arange(shared, len(path)))
        befores.append(np.concatenate([[-1], path])[shared : len(path)])
    if building.tokens == sum(lengths):
        return None
    before = np.concatenate(befores)
    where = np.concatenate(places)
    return PrefixTree(
        nodes=building.finished(),
        places=where,
        positions=where % tokens.shape[1],
        before=before,
        paths=tuple(paths[row] for row in range(len(rows))),
    )


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens both begin with."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


class _Building:
    """The nodes of a tree whose rows are added in lexicographic order; the open ones lead to the latest row's end."""

    def __init__(self, least: int) -> None:
        self.tokens = 0
        self._least = least
        self._open: list[tuple[int, int, int]] = []  # start and stop, and how many tokens come before it in a row
        self._closed: list[Node] = []

    def add(self, length: int, common: int) -> int:
        """Add a row that shares ``common`` tokens with the one before. Returns how many of them it does share."""
        while self._open and self._open[-1][2] >= common:
            self._close()
        shared = common
        if self._open:
            start, stop, above = self._open[-1]
            if common - above < self._least:
                self._close()
                shared = above
            elif stop - start > common - above:
                self._split(common - above)
        else:
            shared = 0
        if length > shared:
            self._open.append((self.tokens, self.tokens + length - shared, shared))
            self.tokens += length - shared
        return shared

    def _close(self) -> None:
        start, stop, _ = self._open.pop()
        self._closed.append(Node(start, stop, self.tokens))

    def _split(self, keep: int) -> None:
        """Cut the lowest open node after so many tokens; what follows is a closed child."""
        start, stop, above = self._open.pop()
        self._closed.append(Node(start + keep, stop, self.tokens))
        self._open.append((start, start + keep, above))

    def finished(self) -> tuple[Node, ...]:
        while self._open:
            self._close()
        return tuple(sorted(self._closed))
