"""The models that the embedded engine serves, and what their layers see."""

from typing import Any

import torch
from torch import Tensor

# Whose log-probabilities are the log-softmax of lm_head(model(...)); a test compares each with a plain forward pass.
SERVED = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
LAYERS = {"full_attention", "sliding_attention"}
ROPES = ("default", "linear", "llama3", "yarn")  # others depend on the longest sequence of the batch


def why_not_served(config: Any) -> str | None:
    """Name what in a Hugging Face config would make batched results differ from a plain forward pass; None: nothing."""
    if config.model_type not in SERVED:
        return f"model type {config.model_type!r}"
    if kinds := set(getattr(config, "layer_types", None) or ()) - LAYERS:
        return f"layers of kind {', '.join(sorted(kinds))}"
    for name in ("final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            return name
    ropes = config.rope_parameters or {}
    for rope in (ropes, *ropes.values()):  # Gemma 3 has one for each kind of layer
        if isinstance(rope, dict) and (kind := rope.get("rope_type", "default")) not in ROPES:
            return f"rotary embedding {kind!r}"
    return None


def visible(config: Any, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
    """Return which of the first ``width`` positions the tokens at ``positions`` [N, T] see, as the model takes it.

    A mask is bool [N, 1, T, width]; a model with several kinds of layers takes one for each kind.
    """
    at, sees = positions[:, None, :, None], torch.arange(width, device=positions.device)
    earlier = sees <= at
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if window is None or (kinds and "sliding_attention" not in kinds):
        return earlier
    near = earlier & (sees > at - window)
    return {"full_attention": earlier, "sliding_attention": near} if kinds else near
