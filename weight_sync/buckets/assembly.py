"""Assembles parameters from their pieces, for loaders that only take whole tensors."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Piece


class Assembler:
    """Hands whole tensors to ``load`` and holds at most one incomplete parameter.

    ``load`` gets views that are valid only during the call. The first piece of a parameter discards an incomplete one.
    """

    def __init__(self, load: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        self._load = load
        self._name, self._filled = "", 0
        self._partial: Tensor | None = None

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Load the parameters that these pieces complete. Raises WeightSyncError for a piece out of order."""
        done = []
        for piece in pieces:
            whole = piece.data if piece.whole else self._add(piece)
            if whole is not None:
                done.append((piece.name, whole.view(piece.shape)))
        if done:
            self._load(done)

    def _add(self, piece: Piece) -> Tensor | None:
        if piece.start == 0:
            self._name, self._filled = piece.name, 0
            self._partial = piece.data.new_empty(math.prod(piece.shape))
        if self._partial is None or (piece.name, piece.start) != (self._name, self._filled):
            raise WeightSyncError(
                f"piece of {piece.name!r} from element {piece.start} on is out of order: it follows "
                f"{self._filled} elements of {self._name!r}"
            )
        end = piece.start + piece.data.numel()
        if end > self._partial.numel() or piece.data.dtype != self._partial.dtype:
            raise WeightSyncError(f"the pieces of {piece.name!r} disagree about its shape or type")
        self._partial[piece.start : end] = piece.data
        self._filled = end
        if end < self._partial.numel():
            return None
        whole, self._partial, self._name, self._filled = self._partial, None, "", 0
        return whole
