"""Optimizers of the FSDP2 backend, built from ``trainer``'s settings.

In: groups of parameters, each with its own learning rate, and where they are kept. Out: one of torch's optimizers.
"""

from typing import Any

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import ADAM_BETA1


def adamw_form(device: str) -> dict[str, bool]:
    """Return the fastest form of torch's AdamW on a type of device: one kernel for all, or one per operation.

    Both read and write every element once per kernel, so that one kernel takes a fraction of the time.
    """
    if device.partition(":")[0] in _get_fused_kernels_supported_devices():
        return {"fused": True}
    return {"foreach": True}


def build_optimizer(groups: list[dict[str, Any]], config: TrainerConfig, device: str) -> torch.optim.AdamW:
    """Return the optimizer of ``groups`` of parameters, which are kept on ``device``, float32 each."""
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(ADAM_BETA1, config.beta2),
        weight_decay=config.weight_decay,
        **adamw_form(device),
    )


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first step makes, so that a checkpoint can be read into it.

    No weight changes: the step has gradients of 0 and a learning rate of 0.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
