"""Causal attention among packed sequences, for Transformers' models: no sequence can see another.

On a GPU in bfloat16 one call of PyTorch's FlashAttention serves the whole packed row. Elsewhere equally long
sequences, which stand side by side (``packing.Packed``), are a view [sequences, length] of the row, and one call of
fused attention serves each such group: no padding, no copy, no mask over the whole row.
"""

import inspect
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rl_async.torch_shared import has_flash_attention, windowed
from rl_async.trainer.batches.packed_tree import TreeCalls
from rl_async.trainer.model.tree_attention import can_merge, copied, merged
from rl_async.trainer.model.ulysses import to_heads, to_sequence

NAME = "rl_async_packed"
Groups = tuple[tuple[int, int], ...]  # (length, sequences)
KERNEL_HEAD_DIM = 256  # FlashAttention's largest
_kernel: Any = varlen_attn
if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # then fewer key heads are refused without it
    _kernel = partial(varlen_attn, enable_gqa=True)
UNKNOWN = ("s_aux", "position_bias")  # would change the result, and are not computed here


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_groups: Groups | None = None,
    packed_tree: TreeCalls | None = None,
    packed_borders: Tensor | None = None,
    sharing_ranks: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """One layer's attention of [1, heads, N, D], and its result [1, N, heads, D], as ``AttentionInterface`` calls it.

    A token sees those of its own sequence up to itself, or the last ``sliding_window`` of them. With ``softcap`` c
    scores are c * tanh(score / c) (Gemma 2, arXiv:2408.00118, section 2). With ``sharing_ranks`` N are this rank's
    tokens of the row, and ``packed_groups`` and ``packed_borders`` are of all of it. With ``packed_tree`` sequences
    share what they begin with (``tree_attention.py``). Raises ValueError when the model asks for anything else, so that
    none is computed wrongly.
    """
    asked = [name for name in UNKNOWN if options.get(name) is not None]
    if (
        (packed_groups is None or packed_borders is None) == (packed_tree is None)
        or attention_mask is not None
        or not getattr(module, "is_causal", False)
        or asked
    ):
        raise ValueError(
            f"packed attention of {type(module).__name__} needs packed rows or a tree of them, and causal attention "
            f"without a mask, and has none of {asked or UNKNOWN}; leave the model's kind out of "
            "trainer/model/families.py"
        )
    if packed_tree is not None:
        return _of_tree(query, key, value, packed_tree, scaling, sliding_window, softcap)[None], None
    assert packed_groups is not None and packed_borders is not None
    if sharing_ranks is not None:
        query, key, value = (to_heads(x, sharing_ranks) for x in (query, key, value))
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    if softcap is None and _has_kernel(query, value):
        longest = max(length for length, _ in packed_groups)
        back = -1 if sliding_window is None else sliding_window - 1
        borders = (packed_borders, packed_borders, longest, longest)
        attended = _kernel(query, key, value, *borders, scale=scaling, window_size=(back, 0))[None]
    else:
        attended = _by_groups(query, key, value, packed_groups, scaling, sliding_window, softcap)[None]
    return attended if sharing_ranks is None else to_sequence(attended, sharing_ranks), None


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's FlashAttention for rows of several sequences takes such heads, [N, heads, D]."""
    size = query.shape[-1]
    return (
        has_flash_attention(query.device)
        and query.dtype == torch.bfloat16
        and size == value.shape[-1]
        and size <= KERNEL_HEAD_DIM
        and size % 8 == 0
    )


def _by_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Groups,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[N, heads, D] of a packed row, a call for each group of equally long sequences."""
    sizes = [length * sequences for length, sequences in groups]
    outputs = []
    for (length, sequences), *parts in zip(
        groups, query.split(sizes), key.split(sizes), value.split(sizes), strict=True
    ):
        q, k, v = (part.unflatten(0, (sequences, length)).transpose(1, 2) for part in parts)
        outputs.append(_attended(q, k, v, scaling, window, softcap).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _of_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TreeCalls,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[N, heads, D] of [1, heads, N, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = None if window is None or tree.longest <= window else window
    if window is None and softcap is None and can_merge(q, v):
        return merged(q, k, v, tree, scaling)

    return copied(q, k, v, tree, window, partial(_masked, scaling=scaling, softcap=softcap))


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of whole sequences, [B, heads, L, D]."""
    if window is not None and window < q.shape[2]:
        return windowed(q, k, v, window, partial(_masked, scaling=scaling, softcap=softcap))
    return _masked(q, k, v, None, scaling=scaling, softcap=softcap)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, *, scaling: float | None, softcap: float | None
) -> Tensor:
    """``sees``: bool [L, S], what each token sees; None: all up to itself."""
    return _fused(q, k, v, sees, scaling) if softcap is None else _capped(q, k, v, sees, scaling, softcap)


def _fused(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(
        q, k, v, attn_mask=sees, is_causal=sees is None, scale=scaling, enable_gqa=k.shape[1] != q.shape[1]
    )


def _capped(q: Tensor, k: Tensor, v: Tensor, sees: Tensor | None, scaling: float | None, softcap: float) -> Tensor:
    """[B, heads, L, D] with every score in memory, [B, heads, L, S]: no fused kernel of PyTorch's caps them."""
    length, repeats = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if sees is None:
        sees = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


AttentionInterface.register(NAME, packed_attention)
