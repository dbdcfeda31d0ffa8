"""Names and shapes of small models of the known families, as the layouts want them."""

from rl_async.weight_sync.layout import TensorSpec


def specs(
    *,
    layers: int = 2,
    hidden: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 2,
    inner: int = 12,
    vocab: int = 10,
    experts: int = 0,
    stacked: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    dtype: str = "float32",
) -> dict[str, TensorSpec]:
    """Llama; with ``bias`` Qwen2, with ``qk_norm`` Qwen3, with ``experts`` Qwen3-MoE."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for which, size in rows.items():
            shapes[f"{at}.self_attn.{which}_proj.weight"] = (size, hidden)
            if bias:
                shapes[f"{at}.self_attn.{which}_proj.bias"] = (size,)
            if qk_norm and which != "v":
                shapes[f"{at}.self_attn.{which}_norm.weight"] = (head_dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if experts:
            shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        if stacked:
            shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, inner)
            continue
        for mlp in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            shapes[f"{at}.{mlp}.gate_proj.weight"] = shapes[f"{at}.{mlp}.up_proj.weight"] = (inner, hidden)
            shapes[f"{at}.{mlp}.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}
