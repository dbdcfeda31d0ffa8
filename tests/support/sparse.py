"""Tiny mixtures of experts, and which experts their routers choose in a plain forward pass."""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def sparse_model(vocab: int = 64, layers: int = 2, **more: Any) -> Qwen3MoeForCausalLM:
    """A random Qwen3-MoE of 8 experts, two for each token, away from the even distribution of a fresh one."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | more))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() >= 2 else 1.0)
    return model


def chosen(model: Any, tokens: list[int]) -> Tensor:
    """The experts [tokens, layers, k] of a plain forward pass over one sequence, each token's in ascending order."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _module, _arguments, output: found.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values
