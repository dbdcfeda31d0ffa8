"""Packing with shared prefixes: each token of a tree once, and results for it in every row that has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_async.trainer.batches.prefixes import PrefixTree
from rl_async.trainer.batches.tensors import Tensors


@dataclass(frozen=True)
class TreeCalls:
    """How the tokens of a packed tree attend, call by call; indexes are on the device."""

    longest: int  # tokens of a path
    own: tuple[tuple[int, Tensor], ...]  # length, and int64 [S * length]: the tokens of S nodes
    over: tuple[tuple[int, int, int], ...]  # a node's [start, stop), which [stop, end) see
    paths: tuple[tuple[Tensor, Tensor], ...]  # int64 [S, L] tokens of nodes, and [S, K] those that their last ones see


@dataclass(frozen=True)
class PackedTree:
    """The N tokens of a tree in one row, and the M predictions of a next token that rows make with them."""

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    calls: TreeCalls
    predictors: Tensor  # int64 [M], the token whose hidden state predicts
    targets: Tensor  # int64 [M], the token that follows
    temperature: Tensor  # float32 [M]
    predictions: Tensor  # int64 [K], of the M, for every token of a row but its first
    places: Tensor  # int64 [K], where those stand in [B, T-1] when it is flat
    shape: tuple[int, int]  # B, T-1
    experts: Tensor | None = None  # int16 [N, layers, k], those to replay; -1: the router's own

    def backbone_inputs(self) -> dict[str, Any]:
        """Arguments of a decoder of Transformers; our attention reads ``packed_tree``."""
        return {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "use_cache": False,
            "packed_tree": self.calls,
        }

    def predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states [M, H] that predict the targets, of all [N, H]. One may predict several."""
        return hidden.index_select(0, self.predictors)

    def unpack(self, flat: Tensor) -> Tensor:
        """[M, ...] to [B, T-1, ...], 0 where no token is predicted."""
        rows, width = self.shape
        empty = flat.new_zeros(rows * width, *flat.shape[1:])
        return empty.index_copy(0, self.places, flat.index_select(0, self.predictions)).unflatten(0, self.shape)


def pack_tree(batch: Tensors, tree: PrefixTree) -> PackedTree:
    """Put each token of ``tree``, which is that of the rows of ``batch``, into one row."""
    (rows, width), device = batch.tokens.shape, batch.tokens.device
    first = tree.before < 0
    order = np.cumsum(~first) - 1  # the number of the prediction of each token that is no first one
    followers = [path[1:] for path in tree.paths]
    cells = [row * (width - 1) + np.arange(len(path)) for row, path in enumerate(followers)]

    def on_device(numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(device)

    source = on_device(tree.places)
    tokens = batch.tokens.flatten().index_select(0, source)
    predicted = on_device(np.flatnonzero(~first))
    return PackedTree(
        tokens=tokens[None],
        positions=on_device(tree.positions)[None],
        calls=tree_calls(tree, device),
        predictors=on_device(tree.before[~first]),
        targets=tokens.index_select(0, predicted),
        temperature=batch.temperature.flatten().index_select(0, source.index_select(0, predicted) // width),
        predictions=on_device(order[np.concatenate(followers)]),
        places=on_device(np.concatenate(cells)),
        shape=(rows, width - 1),
        experts=None if batch.experts is None else on_device(batch.experts.flatten(0, 1).numpy()[tree.places]),
    )


def tree_calls(tree: PrefixTree, device: torch.device) -> TreeCalls:
    """Group the nodes of a tree by size."""
    starts: dict[int, list[int]] = {}
    for node in tree.nodes:
        starts.setdefault(node.stop - node.start, []).append(node.start)
    paths: dict[tuple[int, int], list[Tensor]] = {}
    for length, path in _paths(tree):
        paths.setdefault((length, len(path)), []).append(path)
    stacked = [(length, torch.stack(same).to(device)) for (length, _), same in sorted(paths.items())]
    return TreeCalls(
        longest=int(tree.positions.max()) + 1,
        own=tuple(
            (length, (torch.tensor(those)[:, None] + torch.arange(length)).flatten().to(device))
            for length, those in sorted(starts.items(), reverse=True)
        ),
        over=tuple((node.start, node.stop, node.end) for node in tree.nodes if node.end > node.stop),
        paths=tuple((same[:, -length:], same) for length, same in stacked),
    )


def _paths(tree: PrefixTree) -> Iterator[tuple[int, Tensor]]:
    """Yield each node's length, and its path: the tokens from the root's first to its own last."""
    above: list[tuple[int, Tensor]] = []  # the nodes around this one: where they end, and their paths
    for start, stop, end in tree.nodes:
        while above and above[-1][0] <= start:
            above.pop()
        path = torch.arange(start, stop)
        path = torch.cat([above[-1][1], path]) if above else path
        yield stop - start, path
        if end > stop:
            above.append((end, path))
