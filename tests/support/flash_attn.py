"""What FlashAttention's packages document of their function for rows of several sequences, in plain operations.

The signatures are those of flash-attn 2.8.3.post2 and of FlashAttention 3 in its folder hopper; the arguments that the
trainer does not give are not computed. It shows that the trainer calls them right, and nothing of their kernels.
"""

import torch
from torch import Tensor

Window = tuple[int, int]


def varlen_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert not dropout_p and alibi_slopes is None and not return_attn_probs and block_table is None
    borders = (cu_seqlens_q, cu_seqlens_k)
    return _attend(q, k, v, borders, (max_seqlen_q, max_seqlen_k), softmax_scale, causal, window_size, softcap)


def varlen_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    assert seqused_q is seqused_k is qv is q_descale is k_descale is v_descale is None and not attention_chunk
    borders = (cu_seqlens_q, cu_seqlens_k)
    return _attend(q, k, v, borders, (max_seqlen_q, max_seqlen_k), softmax_scale, causal, window_size, softcap)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    causal: bool,
    window: Window,
    softcap: float,
) -> Tensor:
    """[total, heads, D] and as many or fewer heads of keys and values; int32 borders [sequences + 1]. A window is of so
    many keys before and behind a query, -1 for all, and 0 is no cap."""
    for border, most in zip(borders, longest, strict=True):
        assert border.dtype == torch.int32 and border.diff().max() <= most
    assert borders[0].equal(borders[1])
    place = torch.arange(len(q))
    sequence = torch.bucketize(place, borders[0], right=True)
    distance = place[:, None] - place
    before, behind = window
    sees = sequence[:, None] == sequence
    sees &= (distance <= before) | (before < 0)
    sees &= (distance >= -behind) | (behind < 0)
    if causal:
        sees &= distance >= 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)
