"""The models that the embedded engine serves."""

from typing import Any

SERVED = ("llama", "qwen2", "qwen3")  # whose log-probabilities are the log-softmax of lm_head(model(...))
ROPES = ("default", "linear", "llama3", "yarn")  # others depend on the longest sequence of the batch


def why_not_served(config: Any) -> str | None:
    """Name what in a Hugging Face config would make batched results differ from a plain forward pass; None: nothing."""
    if config.model_type not in SERVED:
        return f"model type {config.model_type!r}"
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"layers of kind {', '.join(sorted(kinds))}"
    if (rope := (config.rope_parameters or {}).get("rope_type", "default")) not in ROPES:
        return f"rotary embedding {rope!r}"
    return None
