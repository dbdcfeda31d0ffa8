"""The cost of a row to a model, so that ranks and forward passes get equal shares: a function of the model's config."""

from dataclasses import dataclass
from typing import Any

from rl_async.model_files import experts_of


@dataclass(frozen=True)
class RowCost:
    """A row of T tokens costs linear * T + quadratic * T^2; ``padded`` rows are computed as long as the longest, and
    rows with ``shares_prefixes`` cost only what comes after the prompt that another row of their group has."""

    linear: int = 1
    quadratic: int = 0
    padded: bool = False
    shares_prefixes: bool = False

    def of(self, tokens: int) -> int:
        """Floating-point operations of a forward pass over one row, up to the factor that both terms share."""
        return self.linear * tokens + self.quadratic * tokens * tokens


def row_cost_of(config: Any, *, padded: bool = False, shares_prefixes: bool = False) -> RowCost:
    """Derive a decoder's cost per row from its Hugging Face config.

    Linear: 2 operations per weight that a token uses, the chosen experts' and the last layer's included. Quadratic:
    scores and their sum over values, 2 operations per head and element each, for the T^2 / 2 pairs under the diagonal
    (Narayanan et al., arXiv:2104.04473, appendix, with causal attention). A sliding window counts as full attention.
    """
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    attention, score_width = _latent_attention(config) if _latent(config) else _attention(config)
    dense, sparse = _mlp_layers(config)
    weights = layers * attention + dense * 3 * hidden * config.intermediate_size
    weights += sparse * _expert_weights(config) + hidden * config.vocab_size
    return RowCost(
        linear=2 * weights, quadratic=layers * heads * score_width, padded=padded, shares_prefixes=shares_prefixes
    )


def _latent(config: Any) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None


def _attention(config: Any) -> tuple[int, int]:
    """Weights of one layer's projections, and elements per head and pair of scores and values."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.hidden_size * width * (heads + kv_heads), 2 * width


def _latent_attention(config: Any) -> tuple[int, int]:
    """The same for DeepSeek's multi-head latent attention (arXiv:2412.19437, section 2.1.1)."""
    hidden, heads, rank, value = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.v_head_dim,
    )
    scored = config.qk_nope_head_dim + config.qk_rope_head_dim
    query = config.q_lora_rank
    weights = heads * scored * hidden if query is None else query * (hidden + heads * scored)
    weights += hidden * (rank + config.qk_rope_head_dim) + rank * heads * (config.qk_nope_head_dim + value)
    return weights + heads * value * hidden, scored + value


def _mlp_layers(config: Any) -> tuple[int, int]:
    """Layers with one MLP, and layers with experts."""
    if not experts_of(config):
        return config.num_hidden_layers, 0
    dense = min(getattr(config, "first_k_dense_replace", 0) or 0, config.num_hidden_layers)
    return dense, config.num_hidden_layers - dense


def _expert_weights(config: Any) -> int:
    """Weights of the router and of the experts that one token meets in a layer."""
    if not experts_of(config):
        return 0
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    met = config.num_experts_per_tok * width + (getattr(config, "n_shared_experts", 0) or 0) * width
    met += getattr(config, "shared_expert_intermediate_size", 0) or 0
    return config.hidden_size * (3 * met + experts_of(config))
