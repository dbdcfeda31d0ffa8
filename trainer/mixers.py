"""Layers that carry a state from token to token (Mamba 2, gated delta nets, short convolutions), among packed rows.

Such a layer reads a row of tokens from its start, so a packed row of several sequences would let each begin with the
state of the one before. Equally long sequences stand side by side (``packing.Packed``) and are a view [sequences,
length] of the row: one call of the layer serves each such group, as one of attention does, and every sequence begins
with an empty state. That is so on every device; kernels that know borders need packages that Transformers finds itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_async.model_files import mixers_of
from rl_async.trainer.attention import Groups


def keep_rows_apart(lm: Any) -> None:
    """Let the modules that ``MIXERS`` names read the sequences of a packed row, a group of equal length at a time."""
    for mixer in mixers_of(lm):
        mixer.forward = partial(_by_groups, mixer.forward)


def _by_groups(
    forward: Callable[..., Tensor],
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    packed_groups: Groups | None = None,
    **_: Any,
) -> Tensor:
    """Call a layer for each group of a packed row [1, N, H]. Its result does not depend on other options.

    Raises ValueError for what is not a packed row, rather than compute it wrongly.
    """
    if packed_groups is None or attention_mask is not None or cache is not None:
        raise ValueError("a layer with a state needs packed rows, without a mask and a cache")
    sizes = [length * sequences for length, sequences in packed_groups]
    parts = (
        forward(part.unflatten(0, (sequences, length))).flatten(0, 1)
        for (length, sequences), part in zip(packed_groups, hidden_states[0].split(sizes), strict=True)
    )
    return torch.cat(list(parts))[None]
