"""SDPA as Transformers calls it, but for layers with a window: without a mask they attend in blocks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_async.torch_shared import windowed

NAME = "rl_async_embedded"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, as ``AttentionInterface`` calls it.

    Without a mask, the queries of a layer with a window are of the last tokens that keys and values are of.
    """
    if attention_mask is not None or sliding_window is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None

    def attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scaling, enable_gqa=True)

    return windowed(query, key, value, sliding_window, attend).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
