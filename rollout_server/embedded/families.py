"""The models that the embedded engine serves, and what their layers see."""

from typing import Any

import torch
from torch import Tensor

from rl_async.rollout_server.embedded.attention import NAME

# Whose log-probabilities are the log-softmax of lm_head(model(...)); a test compares each with a plain forward pass.
SERVED = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
LAYERS = {FULL := "full_attention", SLIDING := "sliding_attention"}
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


def visible(config: Any, positions: Tensor, width: int) -> Tensor | dict[str, Tensor | None]:
    """Return which of the first ``width`` positions the tokens at ``positions`` [N, T] see, as the model takes it.

    A mask is bool [N, 1, T, width]; a model with several kinds of layers takes one for each kind. Layers with a window
    need none for the last T positions of a single sequence, if they attend in blocks (``attention.py``).
    """
    at, sees = positions[:, None, :, None], torch.arange(width, device=positions.device)
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if window is None or (kinds and SLIDING not in kinds):
        return sees <= at
    if not kinds:
        return (sees <= at) & (sees > at - window)
    masks: dict[str, Tensor | None] = {FULL: sees <= at} if FULL in kinds else {}
    in_blocks = config._attn_implementation == NAME and len(positions) == 1 and positions.shape[1] > 1
    masks[SLIDING] = None if in_blocks else (sees <= at) & (sees > at - window)
    return masks


def visible_in_prompts(config: Any) -> dict[str, None] | None:
    """The same for whole prompts, where a layer sees all before a token, or what its window reaches.

    None has the model make its masks by itself, of the square of the length.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if config._attn_implementation != NAME or SLIDING not in kinds:
        return None
    return dict.fromkeys(kinds)
