"""Causal attention over packed rows, in the form of a core attention of Megatron-Core's layers.

Ranks may share each row. Megatron-Core then cuts it into twice as many equal parts as there are ranks, and gives rank
r the r-th part from the front and the r-th from the back; it turns queries and keys by these positions too. Its own
attention over such rows needs Transformer Engine; this one exchanges tokens for heads (``trainer/attention.py``).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_async.trainer.attention import to_heads, to_sequence


class PackedAttention(torch.nn.Module):
    """Block-diagonal causal attention: a token attends to itself and to earlier tokens of its own row.

    Megatron-Core's local attention refuses packed rows, and Transformer Engine's needs a GPU.
    """

    def __init__(self, *, config: Any, pg_collection: Any, softmax_scale: float | None = None, **_: Any) -> None:
        """Take the arguments that Megatron-Core builds it with; most are not needed here."""
        super().__init__()
        self._sharing = config.context_parallel_size
        self._group = pg_collection.cp
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
        """Map queries [N, heads, d], keys and values [N, groups, d] of this rank's packed tokens to [N, heads * d].

        Rows are unpacked into a batch padded on the right, where causal attention never looks.
        """
        bounds = packed_seq_params.cu_seqlens_q.long()
        rows, places = (part.flatten() for part in shared_places(bounds, self._sharing))
        longest = int(packed_seq_params.max_seqlen_q)
        if self._sharing > 1:
            # Exchange this rank's tokens of all heads, [N, heads, d], for a part of the heads of all ranks' tokens.
            query, key, value = (
                to_heads(part.transpose(0, 1)[None], self._group)[0].transpose(0, 1) for part in (query, key, value)
            )
        q, k, v = (_lay_out(part, rows, places, len(bounds) - 1, longest) for part in (query, key, value))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        attended = attended.transpose(1, 2)[rows, places]
        if self._sharing > 1:
            attended = to_sequence(attended[None], self._group)[0]
        return attended.flatten(1)


def shared_places(bounds: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Return row and position within it of the tokens of each of ``ranks`` that share N packed ones, int64 [ranks, N /
    ranks], from the bounds of B rows, int64 [B + 1], whose lengths are multiples of twice the ranks if they share."""
    if ranks == 1:
        rows, places = row_places(bounds)
        return rows[None], places[None]
    # Rows and positions as if the rank's tokens were all there are.
    rows, own = row_places(bounds // ranks)
    lengths = bounds.diff()[rows]
    part, rank = lengths // (2 * ranks), torch.arange(ranks, device=bounds.device)[:, None]
    # How much further back in the row a rank's second part lies.
    back = lengths - (rank + 2) * part
    return rows.expand(ranks, -1), own + torch.where(own < part, rank * part, back)


def row_places(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and position within it of N packed tokens, int64 [N], from the bounds of B rows, int64 [B + 1]."""
    lengths = bounds.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths)
    return rows, torch.arange(len(rows), device=bounds.device) - bounds[rows]


def _lay_out(packed: Tensor, rows: Tensor, places: Tensor, count: int, longest: int) -> Tensor:
    """Unpack [N, heads, d] into [B, heads, T, d], padded with zeros."""
    padded = packed.new_zeros(count, longest, *packed.shape[1:])
    return padded.index_put((rows, places), packed).transpose(1, 2)
