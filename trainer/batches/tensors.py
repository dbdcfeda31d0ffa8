"""Rows of a micro-batch as the tensors that a model reads."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from rl_async.errors import DataError
from rl_async.messages import Trajectory
from rl_async.trainer.batches.prefixes import PrefixTree, prefix_tree


class Tensors(msgspec.Struct):
    """A micro-batch, padded on the right. B rows, T = longest row; position t stands for token t+1.

    There is no attention mask: padding stands behind every real token, where causal attention never looks.
    """

    tokens: Tensor  # int64 [B, T]
    lengths: Tensor  # int64 [B] on the host, real tokens of each row
    mask: Tensor  # bool [B, T-1], true where token t+1 is trained
    temperature: Tensor  # float32 [B, 1, 1]
    tree: PrefixTree | None = None  # of the rows, for a model that computes once what they share
    experts: Tensor | None = None  # int16 [B, T, layers, k] on the host, those that engines chose; -1: not recorded

    @property
    def computed(self) -> int:
        """Tokens that a pass goes through; padding is not counted."""
        return int(self.lengths.sum()) if self.tree is None else len(self.tree.places)


def collate(
    rows: Sequence[Trajectory],
    *,
    device: str,
    mask: Tensor | None = None,
    share_prefixes: bool = False,
    replay_routers: bool = False,
) -> Tensors:
    """Pad rows to a micro-batch on ``device``. ``mask`` [B, T-1] has the tokens that train; None: all sampled ones.

    Raises DataError if rows whose routers are to be replayed name experts of different models.
    """
    shape = len(rows), max(max(len(row.token_ids) for row in rows), 2)
    tokens, sampled = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row.token_ids)], sampled[i, : len(row.token_ids)] = row.token_ids, row.loss_mask
    experts = _experts(rows, shape[1]) if replay_routers else None
    lengths, temperatures = zip(*((len(row.token_ids), row.sampling.temperature or 1.0) for row in rows), strict=True)
    return Tensors(
        tokens=torch.from_numpy(tokens).to(device),
        lengths=torch.tensor(lengths),
        mask=(torch.from_numpy(sampled[:, 1:]) if mask is None else mask).to(device),
        temperature=torch.tensor(temperatures, device=device)[:, None, None],
        tree=prefix_tree(tokens, lengths, temperatures, experts=experts) if share_prefixes else None,
        experts=None if experts is None else torch.from_numpy(experts),
    )


def _experts(rows: Sequence[Trajectory], width: int) -> np.ndarray | None:
    """Pad the rows' records of experts, int16 [B, width, layers, k], with -1; None if there are none.

    Raises DataError if they are not of one model.
    """
    recorded = [(i, row.routed_experts) for i, row in enumerate(rows) if row.routed_experts is not None]
    if not recorded:
        return None
    shapes = {experts.shape[1:] for _, experts in recorded}
    if len(shapes) > 1:
        raise DataError(f"rows of one batch name experts of models with [layers, experts per token] {sorted(shapes)}")
    experts = np.full((len(rows), width, *shapes.pop()), -1, np.int16)
    for i, record in recorded:
        experts[i, : len(record)] = record
    return experts


def empty_tensors(device: str) -> Tensors:
    """Make a micro-batch that trains nothing, for a rank that has to join a forward pass without rows."""
    return Tensors(
        tokens=torch.zeros((1, 2), dtype=torch.int64, device=device),
        lengths=torch.tensor([2]),
        mask=torch.zeros((1, 1), dtype=torch.bool, device=device),
        temperature=torch.ones((1, 1, 1), device=device),
    )
