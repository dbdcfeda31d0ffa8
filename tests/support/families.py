"""A tiny random model of every family: the options that make one of a Hugging Face model type, and how much it has."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.trainer.families import FAMILIES

VOCAB = 96
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # Large, so that attention is far from uniform and caps bite.
    "initializer_range": 0.15,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
TWO_WINDOWS = ["full_attention", "sliding_attention"] * 2
TWO_STATES = ["linear_attention", "full_attention"] * 2
DELTA_NET: dict[str, Any] = {
    "layer_types": TWO_STATES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 5, "layer_types": TWO_WINDOWS},
    "cwm": {"sliding_window": 5, "layer_types": TWO_WINDOWS},
    "deepseek_v2": LATENT | ROUTED | {"topk_method": "greedy", "n_shared_experts": 1},
    "deepseek_v3": LATENT | ROUTED,
    "dots1": ROUTED | {"n_shared_experts": 1, "sliding_window": 5, "layer_types": TWO_WINDOWS},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "exaone4": {"sliding_window": 5, "layer_types": TWO_WINDOWS},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.5},
    "flex_olmo": EXPERTS,
    "gemma2": {
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "sliding_window": 5,
        "layer_types": TWO_WINDOWS,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma4_text": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "glm4": {"attention_bias": True},
    "glm4_moe": ROUTED | {"n_shared_experts": 1},
    "glm4_moe_lite": LATENT | ROUTED | {"n_shared_experts": 1, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "layer_types": TWO_WINDOWS},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": {"logits_scaling": 4.0, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "logits_scaling": 4.0, "num_local_experts": 4}
    | {"shared_intermediate_size": 32},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 32},
    "kimi_linear": LATENT
    | {"q_lora_rank": None, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": TWO_STATES},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "ministral": {"sliding_window": 5, "layer_types": TWO_WINDOWS},
    # Queries grow with their positions from original_max_position_embeddings on.
    "ministral3": {
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "llama_4_scaling_beta": 0.1}
        | {"original_max_position_embeddings": 8, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": ROUTED
    | {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "ssm_state_size": 8, "mamba_num_heads": 8}
    | {"mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "moe_shared_expert_intermediate_size": 32},
    # Without the clipping of queries, keys and values OLMo is a Llama whose norms have no weights.
    "olmo": {"clip_qkv": 0.3},
    "olmo3": {"sliding_window": 5, "layer_types": TWO_WINDOWS},
    "olmo_hybrid": DELTA_NET | {"linear_num_key_heads": 4},
    "olmoe": EXPERTS,
    "phi3": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "layer_types": TWO_WINDOWS},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "layer_types": TWO_WINDOWS},
    "qwen3_5_moe_text": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA_NET,
    "qwen3_moe": EXPERTS,
    "qwen3_next": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32},
    "starcoder2": {"sliding_window": 5, "hidden_act": "gelu_pytorch_tanh"},
}
# Families that train padded.
PADDED: dict[str, dict[str, Any]] = {
    "deepseek_v32": LATENT
    | ROUTED
    | {"n_shared_experts": 1, "index_topk": 4, "index_head_dim": 8, "index_n_heads": 16},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "q_lora_rank": 24,
        "o_lora_rank": 16,
        "o_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": 5,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8}
    | {"mamba_dt_rank": 4},
    "nemotron": {},
    "stablelm": {},
}
# The layers of these families have no feature that none of the others has (scales, caps, windows, layers without
# positions, partial rotation, biases, sinks, experts, latent attention, states). Where the code does not distinguish
# families, `make test-nightly` tries these, and `make test` the others, to which a family with something new belongs.
ALIKE = {
    *("apertus", "arcee", "bamba", "cohere", "cohere2", "deepseek_v2", "dots1", "ernie4_5", "ernie4_5_moe"),
    *("exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "granite", "granitemoe"),
    *("granitemoehybrid", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "kimi_linear", "lfm2", "lfm2_moe"),
    *("minimax_m2", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "seed_oss", "starcoder2", "cwm", "glm4_moe_lite", "olmo"),
    "flex_olmo",
}
DISTINCT = FAMILIES.keys() - ALIKE


def config_of(kind: str, **options: Any) -> Any:
    """The config of a tiny model of this kind."""
    return AutoConfig.for_model(kind, **(COMMON | SPECIAL.get(kind, {}) | PADDED.get(kind, {}) | options))


def saved(kind: str, folder: Path, **options: Any) -> Any:
    """A random model of this kind, saved, and loaded with Transformers' own attention."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind, **options)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
