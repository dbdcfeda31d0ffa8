"""Assembles parameters from their pieces, for loaders that only take whole tensors."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Piece


class Assembler:
    """Hands whole tensors to ``load`` and holds at most one incomplete parameter.

    A tensor of which only boxes travel is NaN elsewhere (0 if it is not of floating point): a loader that used more of
    it than its engine had asked for would be noticed at once.

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
            tensor = piece.data.view(piece.shape) if piece.whole else self._add(piece)
            if tensor is not None:
                done.append((piece.name, tensor))
        if done:
            self._load(done)

    def _add(self, piece: Piece) -> Tensor | None:
        """Put a piece in its place; return the tensor once it has all its pieces."""
        if piece.start == 0:
            self._name, self._filled = piece.name, 0
            self._partial = _empty(piece)
        if self._partial is None or (piece.name, piece.start) != (self._name, self._filled):
            raise WeightSyncError(
                f"piece of {piece.name!r} from element {piece.start} on is out of order: it follows "
                f"{self._filled} elements of {self._name!r}"
            )
        end = piece.start + piece.data.numel()
        if end > piece.total or (self._partial.shape, self._partial.dtype) != (piece.shape, piece.data.dtype):
            raise WeightSyncError(f"the pieces of {piece.name!r} disagree about its shape or type")
        piece.copy_into(self._partial)
        self._filled = end
        if end < piece.total:
            return None
        whole, self._partial, self._name, self._filled = self._partial, None, "", 0
        return whole


def _empty(piece: Piece) -> Tensor:
    """Return a tensor of the whole parameter's shape, to be filled."""
    if piece.total == math.prod(piece.shape):
        return piece.data.new_empty(piece.shape)
    return piece.data.new_full(piece.shape, math.nan if piece.data.is_floating_point() else 0)
