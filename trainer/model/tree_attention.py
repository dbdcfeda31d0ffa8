"""Causal attention over a tree of prefixes (``batches/prefixes.py``): a token sees those on its path from the root.

``merged`` attends in parts, and never copies what rows share. Each node attends causally to itself, and all descendants
of a node, which follow it, attend to all of it: one call without a mask over views of the packed row. The parts are
put together by the logarithms of their sums of exponentials, as in ring attention (arXiv:2310.01889, section 3.1), and
so is the backward pass: a part's gradient follows from the whole output and the whole sum.

``copied`` gives each node the keys of its path from the root, copied, and a mask. It serves what PyTorch's fused kernel
for CPUs cannot: windows, capped scores, values that are not as wide as keys.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rl_async.torch_shared import Attend, windowed
from rl_async.trainer.batches.packed_tree import TreeCalls

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def copied(q: Tensor, k: Tensor, v: Tensor, calls: TreeCalls, window: int | None, attend: Attend) -> Tensor:
    """Attention of [N, heads, D], and its result [N, heads, D]."""
    out = q.new_empty(*q.shape[:2], v.shape[2])
    tokens, parts = [], []
    for queries, keys in calls.paths:
        here_q, there_k, there_v = (_gathered(x, index) for x, index in ((q, queries), (k, keys), (v, keys)))
        part = windowed(here_q, there_k, there_v, window, attend)
        tokens.append(queries.flatten())
        parts.append(part.transpose(1, 2).flatten(0, 1))
    return out.index_copy(0, torch.cat(tokens), torch.cat(parts))


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """[S, heads, L, D] of [N, heads, D] by an index [S, L]."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def can_merge(q: Tensor, v: Tensor) -> bool:
    """Whether ``merged`` serves these: PyTorch's fused kernel for CPUs does."""
    return q.shape[-1] == v.shape[-1]


def merged(q: Tensor, k: Tensor, v: Tensor, calls: TreeCalls, scaling: float | None) -> Tensor:
    """The same, of queries [N, heads, D] and as many or fewer heads of keys and values."""
    result: Tensor = _Merged.apply(q, k, v, calls, scaling)
    return result


class _Merged(torch.autograd.Function):
    """Queries that share a head of keys stand side by side, [key heads, N * queries per key, D], so that their calls
    over a node are one, and a slice of tokens is a view."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: TreeCalls, scaling: float | None) -> Tensor:
        total = torch.promote_types(q.dtype, torch.float32)
        folded, keys, values = _fold(q, k.shape[1]), k.transpose(0, 1), v.transpose(0, 1)
        repeats = q.shape[1] // k.shape[1]
        out = torch.empty(*q.shape, dtype=total)
        sums = torch.empty(q.shape[:2], dtype=total)
        for length, index in calls.own:
            part, part_sums = _forward(*_own(length, index, q, k, v), is_causal=True, scale=scaling)
            out[index] = part.transpose(1, 2).flatten(0, 1).to(total)
            sums[index] = part_sums.transpose(1, 2).flatten(0, 1).to(total)
        out, sums = _fold(out, k.shape[1]), _fold(sums[..., None], k.shape[1])
        for start, stop, end in calls.over:
            rows = slice(stop * repeats, end * repeats)
            part, part_sums = _forward(
                folded[None, :, rows], keys[None, :, start:stop], values[None, :, start:stop], scale=scaling
            )
            part_sums = part_sums[0, :, :, None]
            whole = torch.logaddexp(sums[:, rows], part_sums)
            out[:, rows] *= (sums[:, rows] - whole).exp_()
            out[:, rows] += part[0] * (part_sums - whole).exp_()
            sums[:, rows] = whole
        out = _unfold(out, repeats).to(q.dtype)
        ctx.calls, ctx.scaling = calls, scaling
        ctx.save_for_backward(q, k, v, out, _unfold(sums, repeats)[..., 0])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        (grad,), calls, scaling = grads, ctx.calls, ctx.scaling
        total, heads, repeats = torch.promote_types(q.dtype, torch.float32), k.shape[1], q.shape[1] // k.shape[1]
        d_q, d_k, d_v = (torch.zeros(x.shape, dtype=total) for x in (q, k, v))
        for length, index in calls.own:
            around = (_rows(x, length, index) for x in (grad, out, sums[..., None]))
            upstream, result, logs = around
            by_q, by_k, by_v = _backward(
                upstream, *_own(length, index, q, k, v), result, logs[..., 0], 0.0, True, scale=scaling
            )
            d_q[index] = by_q.transpose(1, 2).flatten(0, 1).to(total)
            for whole, part in ((d_k, by_k), (d_v, by_v)):
                shared = part.unflatten(1, (heads, repeats)).sum(2, dtype=total)
                whole[index] = shared.transpose(1, 2).flatten(0, 1)
        folded, upstream, result, logs, by_queries = (_fold(x, heads) for x in (q, grad, out, sums[..., None], d_q))
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        for start, stop, end in calls.over:
            rows = slice(stop * repeats, end * repeats)
            of_queries = (x[None, :, rows] for x in (folded, result, upstream))
            queries, attended, slope = of_queries
            of_keys = keys[None, :, start:stop], values[None, :, start:stop]
            by_q, by_k, by_v = _backward(
                slope, queries, *of_keys, attended, logs[None, :, rows, 0], 0.0, False, scale=scaling
            )
            by_queries[:, rows] += by_q[0]
            d_k[start:stop] += by_k[0].transpose(0, 1)
            d_v[start:stop] += by_v[0].transpose(0, 1)
        return _unfold(by_queries, repeats).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _fold(x: Tensor, heads: int) -> Tensor:
    """[N, heads * repeats, D] to [heads, N * repeats, D], contiguous."""
    return x.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2).contiguous()


def _unfold(x: Tensor, repeats: int) -> Tensor:
    """Undo ``_fold``."""
    return x.unflatten(1, (-1, repeats)).transpose(0, 1).flatten(1, 2).contiguous()


def _rows(x: Tensor, length: int, index: Tensor) -> Tensor:
    """Nodes of one length, [S, heads, length, ...], of [N, heads, ...]."""
    return x.index_select(0, index).unflatten(0, (-1, length)).transpose(1, 2)


def _own(length: int, index: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
    """Queries, keys and values of nodes of one length, each head of keys for each of its queries."""
    yield _rows(q, length, index)
    for x in (k, v):
        yield _rows(x, length, index).repeat_interleave(q.shape[1] // k.shape[1], 1)
