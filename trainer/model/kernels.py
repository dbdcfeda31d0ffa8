"""Choose the kernels of a model's layers: attention, and Liger's for norms, rotary embedding and gated MLPs."""

from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.model import attention as packed_attention
from rl_async.trainer.model.families import why_padded


def attention(config: Any, device: str, dtype: torch.dtype, options: TrainerConfig) -> str:
    """The attention implementation of Transformers to load a model with, from its Hugging Face config.

    Raises UserError when ``trainer.attention=flash`` cannot be honoured for this model and device.
    """
    padded = why_padded(config)
    suits = device != "cpu" and dtype == torch.bfloat16
    if options.attention == "flash":
        if padded is not None:
            raise UserError(f"trainer.attention=flash is for rows that can be packed, and {padded}; use auto")
        if not suits:
            raise UserError(f"trainer.attention=flash needs bfloat16 on a GPU, not {dtype} on {device}; use auto")
        if not is_flash_attn_2_available():
            raise UserError(
                "trainer.attention=flash needs FlashAttention 2, which is not installed; install it with "
                "`pip install --no-build-isolation 'rl-async[flash-attn]'`, or use auto"
            )
        return "flash_attention_2"
    if padded is not None:
        return "sdpa"
    if options.attention == "auto" and options.sequence_parallel == 1 and suits and is_flash_attn_2_available():
        return "flash_attention_2"
    return packed_attention.NAME


def why_prefixes_apart(config: Any, implementation: str, device: str, options: TrainerConfig) -> str | None:
    """Why a model with this Hugging Face config and attention computes what rows share once per row; None if once."""
    if reason := why_padded(config):
        return f"its rows are not packed: {reason}"
    if options.sequence_parallel > 1:
        return "ranks that share rows (trainer.sequence_parallel) exchange whole ones"
    if implementation != packed_attention.NAME or device != "cpu":
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
