"""Choose the kernels of a model's layers: attention, and Liger's for norms, rotary embedding and gated MLPs."""

from typing import Any

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.model import attention as packed_attention
from rl_async.trainer.model.families import why_padded


def attention(config: Any) -> str:
    """The attention implementation of Transformers to load a model with, from its Hugging Face config."""
    return packed_attention.NAME if why_padded(config) is None else "sdpa"


def why_prefixes_apart(config: Any, device: str, options: TrainerConfig) -> str | None:
    """Why a model with this Hugging Face config computes what rows share once per row; None if once."""
    if reason := why_padded(config):
        return f"its rows are not packed: {reason}"
    if options.sequence_parallel > 1:
        return "ranks that share rows (trainer.sequence_parallel) exchange whole ones"
    if device != "cpu":
        return "attention over shared prefixes is made for CPUs"
    if options.compile:
        return "compiled layers (trainer.compile) would be compiled anew for every tree of prefixes"
    return None


def apply_liger(lm: Any, device: str) -> None:
    """Let a Hugging Face model, or its decoder alone, compute with Liger's Triton kernels. Not its loss:
    log-probabilities come from ``token_logprobs``.

    Liger replaces the rotary embedding for all models of the kind in this process. Raises UserError where there is no
    GPU, no Liger, or none for this kind of model.
    """
    if device == "cpu":
        raise UserError(f"trainer.kernels=liger needs a GPU, and the model is on {device}; use trainer.kernels=torch")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise UserError(
            "trainer.kernels=liger needs Liger, which is not installed; install it with `pip install 'rl-async[liger]'`"
        ) from error
    kind = lm.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # Liger itself would only log it
        raise UserError(f"trainer.kernels=liger: no kernels for models of type {kind}; use trainer.kernels=torch")
    _apply_liger_kernel_to_instance(model=lm, cross_entropy=False, fused_linear_cross_entropy=False)
