"""Causal attention over packed rows, in the form of a core attention of Megatron-Core's layers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(torch.nn.Module):
    """Block-diagonal causal attention: a token attends to itself and to earlier tokens of its own row.

    Megatron-Core's local attention refuses packed rows, and Transformer Engine's needs a GPU.
    """

    def __init__(self, *, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        """Take the arguments with which Megatron-Core builds it; most are not needed here."""
        super().__init__()
        assert config.context_parallel_size == 1, "rows are whole on every rank"
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        attn_mask_type: Any,
        attention_bias: None,
        packed_seq_params: Any,
    ) -> Tensor:
        """Map queries [N, heads, d], keys and values [N, groups, d] of N packed tokens to [N, heads * d].

        Rows are unpacked into a batch padded on the right, where causal attention never looks.
        """
        bounds = packed_seq_params.cu_seqlens_q.long()
        rows, places = row_places(bounds)
        longest = int(packed_seq_params.max_seqlen_q)
        q, k, v = (_lay_out(part, rows, places, len(bounds) - 1, longest) for part in (query, key, value))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return attended.transpose(1, 2)[rows, places].flatten(1)


def row_places(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and position within it of N packed tokens, int64 [N], from the bounds of B rows, int64 [B + 1]."""
    lengths = bounds.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths)
    return rows, torch.arange(len(rows), device=bounds.device) - bounds[rows]


def _lay_out(packed: Tensor, rows: Tensor, places: Tensor, count: int, longest: int) -> Tensor:
    """Unpack [N, heads, d] into [B, heads, T, d], padded with zeros."""
    padded = packed.new_zeros(count, longest, *packed.shape[1:])
    return padded.index_put((rows, places), packed).transpose(1, 2)
