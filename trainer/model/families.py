"""Model types whose rows can be packed; a test compares each with one row at a time.

Other types run padded. A type may be added if its layers mix tokens only by causal attention, through Transformers'
attention interface, and its logits are ``lm_head(hidden)``, scaled and capped as declared here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LAYERS = {"full_attention", "sliding_attention"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # one angle for all rows, by the longest of the batch


@dataclass(frozen=True)
class LogitForm:
    """Logits from those of the last linear layer: x * scale, then c * tanh(x / c) with ``softcap`` c."""

    scale: float = 1.0
    softcap: float | None = None


def plain(_: Any) -> LogitForm:
    return LogitForm()


FAMILIES: dict[str, Callable[[Any], LogitForm]] = {
    "cohere": lambda config: LogitForm(scale=config.logit_scale),
    "cohere2": lambda config: LogitForm(scale=config.logit_scale),
    "deepseek_v3": plain,
    "gemma": plain,
    "gemma2": lambda config: LogitForm(softcap=config.final_logit_softcapping),
    "gemma3_text": lambda config: LogitForm(softcap=config.final_logit_softcapping),
    "glm4": plain,
    "granite": lambda config: LogitForm(scale=1.0 / config.logits_scaling),
    "llama": plain,
    "mistral": plain,
    "mixtral": plain,
    "olmo2": plain,
    "phi3": plain,
    "qwen2": plain,
    "qwen2_moe": plain,
    "qwen3": plain,
    "qwen3_moe": plain,
    "smollm3": plain,
}


def why_padded(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot be packed; None if it can."""
    if config.model_type not in FAMILIES:
        return f"models of type {config.model_type} are not known to keep packed rows apart"
    others = set(getattr(config, "layer_types", None) or ()) - LAYERS
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if kinds & LENGTH_DEPENDENT_ROPE:
        return f"its positions ({', '.join(sorted(kinds & LENGTH_DEPENDENT_ROPE))}) depend on the longest row"
    return None


def why_not_shared(config: Any, size: int) -> str | None:
    """Why rows of a model with this Hugging Face config cannot be shared by so many ranks; None if they can."""
    if reason := why_padded(config):
        return f"its rows cannot be packed: {reason}"
    if config.num_attention_heads % size:
        return f"that many ranks do not divide its {config.num_attention_heads} attention heads"
    return None


def logit_form(config: Any) -> LogitForm:
    """Return how a model that can be packed makes its logits."""
    return FAMILIES[config.model_type](config)
