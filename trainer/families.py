"""Model types whose rows can be packed, and those that the Megatron backend trains. Imports neither torch nor Megatron.

Other types run padded. A type may be added to ``FAMILIES`` if its layers mix tokens only by causal attention, through
Transformers' attention interface, or by modules of ``model_files.MIXERS`` (``model.keep_rows_apart``), and its
logits are ``lm_head(hidden)``, scaled and capped as declared here; a test compares each with one row at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from rl_async.configs.schema.data import ATTENTION_KEY, FLASH_ATTN
from rl_async.model_files import TEXT_ALONE

LAYERS = frozenset({"full_attention", "sliding_attention"})
# These turn all rows of a batch by angles that the longest row decides, so packing would change results.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class LogitForm:
    """Logits from those of the last linear layer: x * scale, then c * tanh(x / c) with ``softcap`` c."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Family:
    """A model type whose rows can be packed.

    Attributes:
        logits: How a model with this Hugging Face config makes its logits.
        layers: The kinds of layers, as ``layer_types`` of the config names them.
    """

    logits: Callable[[Any], LogitForm] = lambda _: LogitForm()
    layers: frozenset[str] = LAYERS


def _scaled(config: Any) -> LogitForm:
    return LogitForm(scale=1.0 / config.logits_scaling)


def _capped(config: Any) -> LogitForm:
    return LogitForm(softcap=config.final_logit_softcapping)


def _multiplied(config: Any) -> LogitForm:
    return LogitForm(scale=config.logit_scale)


PLAIN = Family()
LINEAR = LAYERS | {"linear_attention"}
FAMILIES: dict[str, Family] = {
    "apertus": PLAIN,
    "arcee": PLAIN,
    "bamba": Family(layers=LINEAR),
    "cohere": Family(_multiplied),
    "cohere2": Family(_multiplied),
    "cwm": PLAIN,
    "deepseek_v2": PLAIN,
    "deepseek_v3": PLAIN,
    "dots1": PLAIN,
    "ernie4_5": PLAIN,
    "ernie4_5_moe": PLAIN,
    "exaone4": PLAIN,
    "falcon_h1": Family(lambda config: LogitForm(scale=config.lm_head_multiplier), LAYERS | {"hybrid"}),
    "flex_olmo": PLAIN,
    "gemma": PLAIN,
    "gemma2": Family(_capped),
    "gemma3_text": Family(_capped),
    "gemma4_text": Family(_capped),
    "glm": PLAIN,
    "glm4": PLAIN,
    "glm4_moe": PLAIN,
    "glm4_moe_lite": PLAIN,
    "gpt_oss": PLAIN,
    "granite": Family(_scaled),
    "granitemoe": Family(_scaled),
    "granitemoehybrid": Family(_scaled, LINEAR),
    "helium": PLAIN,
    "hunyuan_v1_dense": PLAIN,
    "hunyuan_v1_moe": PLAIN,
    "kimi_linear": Family(layers=LINEAR),
    "lfm2": Family(layers=LAYERS | {"conv"}),
    "lfm2_moe": Family(layers=LAYERS | {"conv"}),
    "llama": PLAIN,
    "minimax_m2": PLAIN,
    "ministral": PLAIN,
    "ministral3": PLAIN,
    "mistral": PLAIN,
    "mixtral": PLAIN,
    "nemotron_h": Family(layers=LINEAR | {"mlp", "moe"}),
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "olmo3": PLAIN,
    "olmo_hybrid": Family(layers=LINEAR),
    "olmoe": PLAIN,
    "phi3": PLAIN,
    "qwen2": PLAIN,
    "qwen2_moe": PLAIN,
    "qwen3": PLAIN,
    "qwen3_5_moe_text": Family(layers=LINEAR),
    "qwen3_5_text": Family(layers=LINEAR),
    "qwen3_moe": PLAIN,
    "qwen3_next": Family(layers=LINEAR),
    "seed_oss": PLAIN,
    "smollm3": PLAIN,
    "starcoder2": PLAIN,
}


# Models that read images and can be packed, and the language models that only occur within them.
VISION = ("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
VISION_TEXT: dict[str, Family] = {"qwen2_5_vl_text": PLAIN, "qwen3_vl_text": PLAIN}
# Models whose tokens of an image attend to all others of the same image.
BIDIRECTIONAL = ("gemma3",)


def text_of(config: Any) -> Any:
    """Return the Hugging Face config of the language model, which is part of that of a vision-language model."""
    return config.get_text_config() if reads_images(config) else config


def reads_images(config: Any) -> bool:
    """Return whether this is the Hugging Face config of a vision-language model whose images are read."""
    return getattr(config, "vision_config", None) is not None and config.model_type not in TEXT_ALONE


def family_of(config: Any) -> Family:
    """Return the family of the language model of a model that can be packed."""
    return (FAMILIES | VISION_TEXT)[text_of(config).model_type]


# The first release of Transformers whose layers pass on to their mixer what a forward pass is given besides.
PASSED_ON_SINCE = {"lfm2": "5.22", "lfm2_moe": "5.22"}


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def why_padded(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot be packed; None if it can."""
    if (chosen := getattr(config, ATTENTION_KEY, None)) and chosen != FLASH_ATTN:
        return f"model.override.attention={chosen} computes one row at a time"
    if config.model_type in BIDIRECTIONAL:
        return "tokens of an image attend to later ones"
    text = text_of(config)
    kind = config.model_type if reads_images(config) and config.model_type not in VISION else text.model_type
    family = (FAMILIES | VISION_TEXT).get(kind)
    if family is None:
        return f"models of type {kind} are not known to keep packed rows apart"
    if (needed := PASSED_ON_SINCE.get(kind)) and _release(version("transformers")) < _release(needed):
        return f"before {needed} Transformers does not tell its convolutions which rows are packed; upgrade it"
    config = text
    others = set(getattr(config, "layer_types", None) or ()) - family.layers
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
    return family_of(config).logits(text_of(config))


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
