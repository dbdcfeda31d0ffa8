"""The models that the Megatron backend trains. Imports nothing of Megatron-Core."""

from typing import Any

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def why_unsupported(hf: Any) -> str | None:
    """Return the first feature of the model that is not supported here; None if there is none."""
    if hf.model_type not in FAMILIES:
        return f"is of the family {hf.model_type!r}, not of {', '.join(FAMILIES)}"
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
