"""Causal attention through a window, in blocks of queries, each with the keys that its windows reach: time and memory
grow with the length times the window, where a mask over the whole row would grow with the square of its length."""

from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # [B, heads, L, D] and what each token sees

BLOCK = 512  # queries of a block at least; narrow windows would otherwise make many small calls


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int | None, attend: Attend) -> Tensor:
    """Attention of the last L of S tokens, q [B, heads, L, D] to k and v [B, key heads, S, D], as [B, heads, L, D].

    A token sees those up to itself, or the last ``window`` of them.
    """
    length, tokens = q.shape[2], k.shape[2]
    block = length if window is None else max(window, BLOCK)
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        begin, end = tokens - length + start, tokens - length + stop
        first = 0 if window is None else max(0, begin - window + 1)
        distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        sees = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        parts.append(attend(q[:, :, start:stop], k[:, :, first:end], v[:, :, first:end], sees))
    return torch.cat(parts, 2)
