"""Packing: the rows of a micro-batch as one row without padding, and results for it back in their places."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_async.trainer.batches.tensors import Tensors


@dataclass(frozen=True)
class Packed:
    """The N real tokens of a micro-batch in one row, longest sequence first; position n stands for the token after it.

    ``groups`` are (length, sequences) of equally long sequences that stand side by side.
    """

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N], from 0 in every sequence
    groups: tuple[tuple[int, int], ...]
    targets: Tensor  # int64 [N], the token that follows; 0 where a sequence ends
    temperature: Tensor  # float32 [N]
    predicts: Tensor  # int64 [M], positions that a token follows
    places: Tensor  # int64 [M], where those stand in [B, T-1] when it is flat
    shape: tuple[int, int]  # B, T-1
    experts: Tensor | None = None  # int16 [N, layers, k], those to replay; -1: the router's own

    def backbone_inputs(self) -> dict[str, Any]:
        """Arguments of a decoder of Transformers; ``packed_borders``, int32, are those of the row's sequences."""
        lengths = [length for length, sequences in self.groups for _ in range(sequences)]
        borders = torch.tensor([0, *lengths], device=self.tokens.device).cumsum(0, dtype=torch.int32)
        return {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "use_cache": False,
            "packed_groups": self.groups,
            "packed_borders": borders,
        }

    def share(self, rank: int, ranks: int) -> "Packed":
        """Take one rank's N / ranks tokens of the row, which is filled up to a multiple by a sequence whose outputs are
        dropped. ``groups``, and where tokens belong, stay those of the whole row: attention is over all of it."""
        missing = -self.tokens.shape[1] % ranks
        size = (self.tokens.shape[1] + missing) // ranks
        mine = slice(rank * size, (rank + 1) * size)
        return replace(
            self,
            tokens=pad(self.tokens, (0, missing))[:, mine],
            positions=pad(self.positions, (0, missing))[:, mine],
            groups=(*self.groups, (missing, 1)) if missing else self.groups,
            targets=pad(self.targets, (0, missing))[mine],
            temperature=pad(self.temperature, (0, missing), value=1.0)[mine],
            experts=None if self.experts is None else pad(self.experts, (0, 0, 0, 0, 0, missing), value=-1)[mine],
        )

    def predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states [N, H] that predict the targets: all; those at a sequence's end count for nothing."""
        return hidden

    def unpack(self, flat: Tensor) -> Tensor:
        """[N, ...] to [B, T-1, ...], 0 where no token is predicted."""
        rows, width = self.shape
        empty = flat.new_zeros(rows * width, *flat.shape[1:])
        return empty.index_copy(0, self.places, flat.index_select(0, self.predicts)).unflatten(0, self.shape)


def pack(batch: Tensors) -> Packed:
    """Drop the padding. The order of rows only affects how many are attended to in one call."""
    rows, width = batch.tokens.shape
    lengths, order = batch.lengths.sort(descending=True, stable=True)
    total = int(lengths.sum())
    row = order.repeat_interleave(lengths)
    position = torch.arange(total) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    predicts = (position + 1 < lengths.repeat_interleave(lengths)).nonzero()[:, 0]
    places = (row * (width - 1) + position)[predicts]
    sizes, counts = lengths.unique_consecutive(return_counts=True)

    device = batch.tokens.device
    source = row * width + position
    experts = None if batch.experts is None else batch.experts.flatten(0, 1).index_select(0, source).to(device)
    source, predicts, row = source.to(device), predicts.to(device), row.to(device)
    tokens = batch.tokens.flatten().index_select(0, source)
    return Packed(
        tokens=tokens[None],
        positions=position.to(device)[None],
        groups=tuple(zip(sizes.tolist(), counts.tolist(), strict=True)),
        targets=torch.zeros_like(tokens).index_copy(0, predicts, tokens.index_select(0, predicts + 1)),
        temperature=batch.temperature.flatten().index_select(0, row),
        predicts=predicts,
        places=places.to(device),
        shape=(rows, width - 1),
        experts=experts,
    )
