"""A stand-in, in plain torch, for kernels that attend among the sequences of a packed row."""

import torch
from torch import Tensor


def by_borders(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: Tensor,
    same: Tensor,
    longest: int,
    longest_too: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What PyTorch documents of ``varlen_attn``, which has no kernel for CPUs: a token sees so many before and behind
    it in its sequence, -1: all."""
    sequence = torch.bucketize(torch.arange(len(q)), borders, right=True)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    back, ahead = window_size
    sees = (sequence[:, None] == sequence) & (distance >= -ahead) & ((distance <= back) | (back == -1))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)
