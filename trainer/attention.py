"""Causal attention among packed rows, for Transformers' models: on one rank, over a tree, and over several ranks.

No sequence can see another. On a GPU in bfloat16 one call of PyTorch's FlashAttention serves the whole packed row.
Elsewhere equally long sequences, which stand side by side (``packing.Packed``), are a view [sequences, length] of the
row, and one call of fused attention serves each such group: no padding, no copy, no mask over the whole row.

*A tree of prefixes* (``packing.PrefixTree``): a token sees those on its path from the root. ``merged`` attends in
parts, and never copies shared tokens. Each node attends causally to itself, and all descendants of a node, which
follow it, attend to all of it: one call without a mask over views of the packed row. The parts are put together by
the logarithms of their sums of exponentials, as in ring attention (arXiv:2310.01889, section 3.1), and so is the
backward pass: a part's gradient follows from the whole output and the whole sum. On GPUs ``merged_by_kernel`` does the
same with FlashAttention. ``copied`` gives each node the keys
of its path from the root, copied, and a mask. It serves the cases that PyTorch's fused kernel for CPUs cannot:
windows, capped scores, values that are not as wide as keys.

*Ranks that share each packed row*: DeepSpeed-Ulysses (arXiv:2309.14509). Each of S ranks holds N / S tokens of a row
of N, for everything that a token does by itself. Around attention an all-to-all exchanges sequence for heads, so that
every rank attends over the whole row with 1 / S of the heads, and a second one goes back:

    [heads, N / S] ──> to_heads ──> [heads / S, N] ──> attention ──> to_sequence ──> [heads, N / S]

Results for tokens (log-probabilities, entropies, values) are gathered, so that all S ranks compute the same loss L
from the same numbers of the whole row, and nothing after the forward pass is aware of the exchange: losses of whole
sequences, means over tokens and returns need no change. Why the gradient is right: ``gathered`` passes to each rank
dL / d(its own outputs) alone, so over the S ranks L is counted once, and every exchange passes gradients back to the
rank whose tokens they belong to. A rank's gradient of a weight is then the part of dL / dw that goes through its
tokens and its heads, and dL / dw is the sum over ranks. FSDP adds up exactly that over all ranks, those of one row
and those of different rows alike: no factor depends on S. The transpose of a plain all-gather would add up S equal
losses, and each of them would have to be divided by S.

``PackedAttention`` is a core attention of Megatron-Core's layers. Ranks may share each row. Megatron-Core then cuts it
into twice as many equal parts as there are ranks, and gives rank r the r-th part from the front and the r-th from the
back; it turns queries and keys by these positions too. Its own attention over such rows needs Transformer Engine; this
one exchanges tokens for heads.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from rl_async.errors import UserError
from rl_async.torch_shared import Attend, windowed
from rl_async.trainer.packing import RowCalls, TreeCalls
from rl_async.trainer.ranks import DataParallel, adjacent_and_strided, pure_data_parallel

NAME = "rl_async_packed"
# The same with kernels of FlashAttention's package. Transformers takes a name with "flash" in it for one of its own.
NAME_BY_PACKAGE = "rl_async_packed_by_package"
# For each length, how many sequences of that length stand side by side.
Groups = tuple[tuple[int, int], ...]
# FlashAttention's largest head.
KERNEL_HEAD_DIM = 256
_kernel: Any = varlen_attn
# Versions of PyTorch that have this parameter refuse fewer key heads without it.
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _kernel = partial(varlen_attn, enable_gqa=True)
# FlashAttention's packages, in the order of preference, with the function of theirs for rows of several sequences and
# the arguments that it is given by name: so in flash-attn 2.8.3, and in its folder hopper, which is FlashAttention 3.
PACKAGES = ("flash_attn_interface", "flash_attn")
VARLEN = "flash_attn_varlen_func"
VARLEN_ARGUMENTS = ("softmax_scale", "causal", "window_size", "softcap")
BORDERS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
Kernel = Callable[..., Any]
# Options that would change the result and are not computed here.
UNKNOWN = ("position_bias",)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_row: RowCalls | None = None,
    packed_tree: TreeCalls | None = None,
    sharing_ranks: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    by_package: Kernel | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """One layer's attention of [1, heads, N, D], and its result [1, N, heads, D], as ``AttentionInterface`` calls it.

    A token sees those of its own sequence up to itself, or the last ``sliding_window`` of them. With ``softcap`` c
    scores are c * tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2). ``s_aux`` [heads] are attention sinks, each
    one more score of its head's softmax, of a value of zeros (gpt-oss, arXiv:2508.10925). With ``sharing_ranks`` N are
    this rank's tokens of the row, and ``packed_row`` is of all of it. With ``packed_tree`` sequences share prefixes, as
    the module describes. ``by_package`` is that of ``package_kernel``, for rows whose sequences share no prefixes.
    Raises ValueError when the model asks for anything else, rather than compute it wrongly.
    """
    asked = [name for name in UNKNOWN if options.get(name) is not None]
    if (
        (packed_row is None) == (packed_tree is None)
        or attention_mask is not None
        or not getattr(module, "is_causal", False)
        or asked
    ):
        raise ValueError(
            f"packed attention of {type(module).__name__} needs packed rows or a tree of them, and causal attention "
            f"without a mask, and has none of {asked or UNKNOWN}; leave the model's kind out of "
            "trainer/families.py"
        )
    form = _Form(scaling, softcap, s_aux)
    if packed_tree is not None:
        return _of_tree(query, key, value, packed_tree, sliding_window, form)[None], None
    assert packed_row is not None
    if sharing_ranks is not None:
        return _shared(query, key, value, packed_row, sliding_window, form, by_package, sharing_ranks), None
    return _of_row(query, key, value, packed_row, sliding_window, form, by_package), None


# Graphs of torch.compile end before exchanges among ranks.
@torch.compiler.disable
def _shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: RowCalls,
    window: int | None,
    form: "_Form",
    by_package: Kernel | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Attend over a whole row with this rank's heads; in and out go this rank's tokens of all heads."""
    query, key, value = (to_heads(x, group) for x in (query, key, value))
    if form.sinks is not None:
        form = form._replace(sinks=form.sinks.chunk(group.size())[group.rank()])
    return to_sequence(_of_row(query, key, value, row, window, form, by_package), group)


def _of_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: RowCalls,
    window: int | None,
    form: "_Form",
    by_package: Kernel | None,
) -> Tensor:
    """Attend in a packed row, [1, heads, N, D] to [1, N, heads, D], on the fastest way that computes this."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    plain = form.softcap is None and form.sinks is None
    if row.has_kernel and _kernel_takes(query, value):
        sees = (-1 if window is None else window - 1, 0)
        borders = (row.borders, row.borders, row.longest, row.longest)
        if by_package is not None and form.sinks is None:
            named = dict(zip(BORDERS, borders, strict=True))
            cap = form.softcap or 0.0
            found = by_package(
                query, key, value, **named, softmax_scale=form.scaling, causal=True, window_size=sees, softcap=cap
            )
            # Some builds return the sums of the softmax behind the result.
            return (found[0] if isinstance(found, tuple) else found)[None]
        if plain:
            attended: Tensor = _kernel(query, key, value, *borders, scale=form.scaling, window_size=sees)
            return attended[None]
    if torch.compiler.is_compiling() and plain and window is None and _is_plain_cpu(query, value):
        compiled: Tensor = row_attention(query, key, value, row.host_borders, form.scaling)[0]
        return compiled[None]
    return _by_groups(query, key, value, row.groups, window, form)[None]


def package_kernel() -> Kernel:
    """Return the function for rows of several sequences of FlashAttention's package, 3 where it is installed, else 2.

    Raises UserError without either, or if the function does not take the arguments that it would be given.
    """
    found = next((name for name in PACKAGES if find_spec(name) is not None), None)
    key = "model.override.attention=flash_attn"
    if found is None:
        raise UserError(
            f"{key} needs flash-attn, which is not installed; install it with `pip install 'rl-async[flash-attn]'`, or "
            "FlashAttention 3 from the folder hopper of its sources"
        )
    try:
        kernel: Kernel = getattr(importlib.import_module(found), VARLEN)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{key}: {VARLEN} of {found} cannot be used here: {error}; install another version") from error
    takes = inspect.signature(kernel).parameters
    if missing := [name for name in (*BORDERS, *VARLEN_ARGUMENTS) if name not in takes]:
        raise UserError(f"{key}: {VARLEN} of {found} takes no {', '.join(missing)}; install flash-attn 2.8")
    return kernel


def _is_plain_cpu(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's fused kernel for CPUs takes such heads, [N, heads, D]."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's FlashAttention for rows of several sequences takes such heads, [N, heads, D]."""
    size = query.shape[-1]
    return query.dtype == torch.bfloat16 and size == value.shape[-1] and size <= KERNEL_HEAD_DIM and size % 8 == 0


class _Form(NamedTuple):
    """What a model does with scores, as ``packed_attention`` says; ``scaling`` is 1 / sqrt(D) if it is None."""

    scaling: float | None
    softcap: float | None
    sinks: Tensor | None


# Their number and sizes differ in every micro-batch, and a graph of torch.compile has fixed ones.
@torch.compiler.disable
def _by_groups(query: Tensor, key: Tensor, value: Tensor, groups: Groups, window: int | None, form: _Form) -> Tensor:
    """Attend in a packed row, [N, heads, D], with one call for each group of equally long sequences."""
    sizes = [length * sequences for length, sequences in groups]
    outputs = []
    for (length, sequences), *parts in zip(
        groups, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
    ):
        q, k, v = (part.unflatten(0, (sequences, length)).transpose(1, 2) for part in parts)
        outputs.append(_attended(q, k, v, window, form).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _of_tree(query: Tensor, key: Tensor, value: Tensor, tree: TreeCalls, window: int | None, form: _Form) -> Tensor:
    """Attend over a tree of prefixes, [1, heads, N, D] to [N, heads, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = None if window is None or tree.longest <= window else window
    if window is None and form.softcap is None and form.sinks is None:
        if _is_plain_cpu(q, v):
            return merged(q, k, v, tree, form.scaling)
        if q.device.type != "cpu" and _kernel_takes(q, v):
            return merged_by_kernel(q, k, v, tree, form.scaling)
    return copied(q, k, v, tree, window, partial(_masked, form=form))


def _attended(q: Tensor, k: Tensor, v: Tensor, window: int | None, form: _Form) -> Tensor:
    """Attention of whole sequences, [B, heads, L, D]."""
    if window is not None and window < q.shape[2]:
        return windowed(q, k, v, window, partial(_masked, form=form))
    return _masked(q, k, v, None, form=form)


def _masked(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, *, form: _Form) -> Tensor:
    """Attend by ``sees``, bool [L, S], or causally if it is None."""
    scaling = q.shape[3] ** -0.5 if form.scaling is None else form.scaling
    if form.sinks is not None:
        return _sunk(q, k, v, sees, form._replace(scaling=scaling))
    if form.softcap is not None:
        return _capped(q, k, v, sees, scaling, form.softcap)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=sees, is_causal=sees is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )


def _sunk(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, form: _Form) -> Tensor:
    """Attend with sinks, as ``_masked`` without them over one more key, of zeros but for one more element.

    That element of a query is its head's sink, and of the key 1 / scaling, so that their score is the sink. The key
    stands first, and a query that is dropped beside it, so that attention remains causal and fused kernels take it.
    """
    assert form.sinks is not None and form.scaling is not None
    width = v.shape[3]
    q = torch.cat([q, form.sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)], 3)
    sink = pad(torch.zeros_like(k[:, :, :1]), (0, 1), value=1 / form.scaling)
    k = torch.cat([sink, pad(k, (0, 1))], 2)
    v = pad(v, (0, 1, 1, 0))
    plain = form._replace(sinks=None)
    if sees is None:
        return _masked(pad(q, (0, 0, 1, 0)), k, v, None, form=plain)[:, :, 1:, :width]
    return _masked(q, k, v, pad(sees, (1, 0), value=True), form=plain)[..., :width]


def _capped(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, scaling: float, softcap: float) -> Tensor:
    """Attend with every score in memory, [B, heads, L, S], since no fused kernel of PyTorch caps scores."""
    length, repeats = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    if sees is None:
        sees = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


AttentionInterface.register(NAME, packed_attention)


# --- Operators

aten: Any = torch.ops.aten
_forward = aten._scaled_dot_product_flash_attention_for_cpu
_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("rl_async::row_attention", mutates_args=())
def row_attention(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
    """Attend causally among the sequences of a packed row on a CPU, as one operator of a compiled graph.

    In go queries [N, heads, D], as many or fewer heads of keys and values, and the sequences' borders [B + 1]; out come
    [N, heads, D] and the logarithms of the sums of exponentials [N, heads].
    """
    out, sums = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=_wide(q))
    for rows in _sequences(borders):
        part, part_sums = _forward(*_sequence(rows, q, k, v), is_causal=True, scale=scaling)
        out[rows], sums[rows] = part[0].transpose(0, 1), part_sums[0].transpose(0, 1)
    return out, sums


@torch.library.custom_op("rl_async::row_attention_backward", mutates_args=())
def _row_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, borders: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by queries, keys and values from that by the result, [N, heads, D] each."""
    found = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows in _sequences(borders):
        around = (x[None, rows].transpose(1, 2) for x in (grad, out, sums))
        upstream, result, logs = around
        parts = _backward(upstream, *_sequence(rows, q, k, v), result, logs, 0.0, True, scale=scaling)
        for whole, part in zip(found, parts, strict=True):
            # Queries that share a head of keys add up.
            shared = part[0].unflatten(0, (whole.shape[1], -1)).sum(1, dtype=_wide(q))
            whole[rows] = shared.transpose(0, 1).to(whole.dtype)
    return found[0], found[1], found[2]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sequences(borders: Tensor) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise(borders.tolist()))


def _sequence(rows: slice, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
    """A sequence's queries, keys and values, [1, heads, L, D], each head of keys for each of its queries."""
    yield q[None, rows].transpose(1, 2)
    for x in (k, v):
        yield x[None, rows].transpose(1, 2).repeat_interleave(q.shape[1] // k.shape[1], 1)


@row_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_wide(q))


@_row_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, borders: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, borders, out, sums = ctx.saved_tensors
    return (*_row_backward(grad, q, k, v, out, sums, borders, ctx.scaling), None, None)


row_attention.register_autograd(_differentiate, setup_context=_keep)


# --- A tree of prefixes


def copied(q: Tensor, k: Tensor, v: Tensor, calls: TreeCalls, window: int | None, attend: Attend) -> Tensor:
    """Attend over a tree with each path's keys copied, [N, heads, D] to [N, heads, D]."""
    out = q.new_empty(*q.shape[:2], v.shape[2])
    tokens, parts = [], []
    for queries, keys in calls.paths:
        # [S, heads, L, D] of [N, heads, D] by an index [S, L].
        node_q, path_k, path_v = (
            x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
            for x, index in ((q, queries), (k, keys), (v, keys))
        )
        part = windowed(node_q, path_k, path_v, window, attend)
        tokens.append(queries.flatten())
        parts.append(part.transpose(1, 2).flatten(0, 1))
    return out.index_copy(0, torch.cat(tokens), torch.cat(parts))


def merged(q: Tensor, k: Tensor, v: Tensor, calls: TreeCalls, scaling: float | None) -> Tensor:
    """Attend over a tree in parts, with queries [N, heads, D] and as many or fewer heads of keys and values."""
    result: Tensor = _Merged.apply(q, k, v, calls, scaling)
    return result


def merged_by_kernel(q: Tensor, k: Tensor, v: Tensor, calls: TreeCalls, scaling: float | None) -> Tensor:
    """Attend over a tree in parts with FlashAttention for rows of several sequences, as ``merged`` does on a CPU."""
    result: Tensor = _MergedByKernel.apply(q, k, v, calls, scaling)
    return result


class _MergedByKernel(torch.autograd.Function):
    """One call for what all nodes attend to within themselves, and one for the descendants of each node that has any.

    A kernel's backward pass takes the result and the sum of exponentials of all parts, as FlashAttention splits long
    rows itself (arXiv:2307.08691, section 3.1.2). Dropout is 0, so no call reads the random state of another.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: TreeCalls, scaling: float | None) -> Tensor:
        flash, nodes, longest = aten._flash_attention_forward, calls.borders, calls.longest_node
        own, sums, random, *_ = flash(q, k, v, nodes, nodes, longest, longest, 0.0, True, False, scale=scaling)
        # Sums of another layout, as those of PyTorch before 2.5, would be sliced wrongly.
        if sums.shape != (q.shape[1], len(q)):
            raise RuntimeError(f"FlashAttention gave sums {[*sums.shape]} for {len(q)} tokens of {q.shape[1]} heads")
        out, sums = own.float(), sums.clone()
        for (start, stop, end), borders in zip(calls.over, calls.over_borders, strict=True):
            lengths, rows, keys = (end - stop, stop - start), slice(stop, end), slice(start, stop)
            part, part_sums, *_ = flash(q[rows], k[keys], v[keys], *borders, *lengths, 0.0, False, False, scale=scaling)
            # Sums are [heads, N].
            whole = torch.logaddexp(sums[:, rows], part_sums)
            out[rows] *= (sums[:, rows] - whole).exp_().t()[..., None]
            out[rows] += part * (part_sums - whole).exp_().t()[..., None]
            sums[:, rows] = whole
        out = out.to(q.dtype)
        ctx.calls, ctx.scaling = calls, scaling
        ctx.save_for_backward(q, k, v, out, sums, random)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, random = ctx.saved_tensors
        calls, grad, unused = ctx.calls, grads[0].contiguous(), random.new_empty(0)
        flash, nodes, longest = aten._flash_attention_backward, calls.borders, calls.longest_node
        around = grad, q, k, v, out, sums, nodes, nodes, longest, longest
        d_q, d_k, d_v = (x.float() for x in flash(*around, 0.0, True, random, unused, scale=ctx.scaling))
        for (start, stop, end), borders in zip(calls.over, calls.over_borders, strict=True):
            lengths, rows, keys = (end - stop, stop - start), slice(stop, end), slice(start, stop)
            around = grad[rows], q[rows], k[keys], v[keys], out[rows], sums[:, rows].contiguous(), *borders, *lengths
            by_q, by_k, by_v = flash(*around, 0.0, False, random, unused, scale=ctx.scaling)
            d_q[rows] += by_q
            d_k[keys] += by_k
            d_v[keys] += by_v
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


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


# --- Ranks that share each packed row


@dataclass(frozen=True)
class Sharing:
    """The ranks that share each packed row: this one's place, their number, and their group."""

    rank: int
    size: int
    group: dist.ProcessGroup


def join_groups(size: int, timeout_s: float) -> tuple[DataParallel, Sharing | None]:
    """Let runs of ``size`` adjacent processes share rows, as one data-parallel rank each. A collective.

    The second result is None if every process has rows of its own. Exchanges wait no longer than ``timeout_s``.
    ``size`` divides the number of ranks.
    """
    if size == 1:
        return pure_data_parallel(), None
    inside, across = adjacent_and_strided(size, timeout_s)
    number, place = divmod(dist.get_rank(), size)
    data_parallel = DataParallel(number, dist.get_world_size() // size, is_recorder=place == 0, group=across)
    return data_parallel, Sharing(place, size, inside)


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's tokens of all heads [1, heads, n, D] for all tokens of its heads, [1, heads / S, N, D].

    Heads that S does not divide are repeated as often as necessary: with grouped queries a rank needs a copy of the
    key heads that its queries attend to. S divides the query heads, so each rank's queries and keys stay matched.
    """
    size = group.size()
    heads = x.shape[1]
    x = x.repeat_interleave(math.lcm(heads, size) // heads, 1)
    by_rank = x[0].unflatten(0, (size, -1))  # [S, heads / S, n, D]
    return _swapped(by_rank, group).transpose(0, 1).flatten(1, 2)[None]


def to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange the results of this rank's heads [1, N, heads / S, D] for all heads of its tokens, [1, n, heads, D]."""
    by_rank = x[0].unflatten(0, (group.size(), -1))  # [S, n, heads / S, D]
    return _swapped(by_rank, group).transpose(0, 1).flatten(1, 2)[None]


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's part [n, ...] to [N, ...]; the gradient is that of this rank's own part."""
    whole: Tensor = _Gather.apply(part, group)
    return whole


def exchanged(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate every rank's part [n, ...] to [N, ...]; the gradient is the sum of all ranks' for this rank's part.

    It is for ranks that each go on to compute a different part of the result from all tokens.
    """
    whole = part.expand(group.size(), *part.shape)
    return _swapped(whole, group).flatten(0, 1)


def _swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, ...]: x[r] goes to rank r, and result[r] came from it. It is its own transpose."""
    result: Tensor = _Swap.apply(x, group)
    return result


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.length = group.rank(), len(part)
        whole = part.new_empty(group.size() * len(part), *part.shape[1:])
        dist.all_gather(list(whole.split(len(part))), part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(0, ctx.rank * ctx.length, ctx.length), None


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
