"""How many experts a model has."""

from typing import Any


def experts_of(config: Any) -> int:
    """Return the number of experts in a layer of a model with this Hugging Face config; 0 for a dense one."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)
