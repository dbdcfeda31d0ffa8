"""Model types whose rows can be packed, and those that the Megatron backend trains. Imports neither torch nor Megatron.

Other types run padded. A type may be added to ``FAMILIES`` if its layers mix tokens only by causal attention, through
Transformers' attention interface, and its logits are ``lm_head(hidden)``, scaled and capped as declared here; a test
compares each with one row at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LAYERS = {"full_attention", "sliding_attention"}
# These turn all rows of a batch by angles that the longest row decides, so packing would change results.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


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


# Models that read images and can be packed, and the language models that only occur within them.
VISION = ("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
VISION_TEXT: dict[str, Callable[[Any], LogitForm]] = {"qwen2_5_vl_text": plain, "qwen3_vl_text": plain}
# Models whose tokens of an image attend to all others of the same image.
BIDIRECTIONAL = ("gemma3",)


def text_of(config: Any) -> Any:
    """Return the Hugging Face config of the language model, which is part of that of a vision-language model."""
    return config.get_text_config() if reads_images(config) else config


def reads_images(config: Any) -> bool:
    """Return whether this is the Hugging Face config of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def why_padded(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot be packed; None if it can."""
    if config.model_type in BIDIRECTIONAL:
        return "tokens of an image attend to later ones"
    text = text_of(config)
    kind = config.model_type if reads_images(config) and config.model_type not in VISION else text.model_type
    if kind not in FAMILIES | VISION_TEXT:
        return f"models of type {kind} are not known to keep packed rows apart"
    config = text
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
    if reads_images(config):
        return "ranks do not share rows of models that read images"
    if reason := why_padded(config):
        return f"its rows cannot be packed: {reason}"
    if config.num_attention_heads % size:
        return f"that many ranks do not divide its {config.num_attention_heads} attention heads"
    return None


def logit_form(config: Any) -> LogitForm:
    """Return how a model that can be packed makes its logits."""
    text = text_of(config)
    return (FAMILIES | VISION_TEXT)[text.model_type](text)


MEGATRON_FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def why_unsupported(hf: Any) -> str | None:
    """Return the first feature of the model that is not supported here, or None."""
    if hf.model_type not in MEGATRON_FAMILIES:
        return f"is of the family {hf.model_type!r}, not of {', '.join(MEGATRON_FAMILIES)}"
    rope, moe = hf.rope_parameters, hf.model_type == "qwen3_moe"
    problems = {
        f"has the activation {hf.hidden_act!r}": hf.hidden_act != "silu",
        "has biases in attention or MLP": bool(getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False)),
        "has a sliding window": bool(getattr(hf, "use_sliding_window", False)),
        "mixes dense and sparse layers": moe and bool(hf.mlp_only_layers or hf.decoder_sparse_step != 1),
        f"scales its rotary embedding as {rope}": rope["rope_type"] != "default" and not is_llama3(rope),
    }
    return next((problem for problem, found in problems.items() if found), None)


def is_llama3(rope: dict[str, Any]) -> bool:
    """Return whether this is the scaling of Llama 3.1 and later, whose other constants are built into Megatron-Core."""
    return rope["rope_type"] == "llama3" and all(rope[key] == value for key, value in LLAMA3_ROPE.items())
