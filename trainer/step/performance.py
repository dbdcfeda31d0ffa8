"""How well a step uses its devices: model FLOPs, and their share of the peak (MFU)."""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from rl_async.trainer.backends.interface import Reference
from rl_async.trainer.batches.batch import Batch
from rl_async.trainer.batches.layout import forward_flops
from rl_async.trainer.step.models import Models

# Dense bfloat16 operations per second, by words of the name that PyTorch gives the device; the first that fits counts.
# From NVIDIA's data sheets, whose figures "with sparsity" are twice these.
BFLOAT16_PEAKS = (
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("G?H200", 989.4e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
)
BACKWARD = 2  # times the forward pass: gradients of weights and of inputs


def peak_flops(device: str, dtype: str) -> float | None:
    """Return a device's peak by its name; None if it is not known, as for CPUs and for float32."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in BFLOAT16_PEAKS if re.search(rf"\b{name}\b", device)), None)


def model_flops(models: Models, batch: Batch, *, epochs: int, trains_policy: bool, recomputes: bool) -> float:
    """Return the operations that the models' passes over the batch need, on all ranks together.

    The policy: in each epoch a forward pass, and a backward pass if it is trained; one forward pass more if its
    log-probabilities are computed before. A critic of its own: a forward pass before, and both in each epoch. A
    reference: a forward pass. Layers that are computed again for the backward pass and padding do not count (Chowdhery
    et al., arXiv:2204.02311, appendix B: MFU, not hardware utilisation), a prompt that is computed once for several
    rows counts once. ``RowCost`` has the formula of a row.
    """
    shares = models.row_cost.shares_prefixes

    def forward(model: Reference | None) -> float:
        if model is None:
            return 0.0
        return float(forward_flops(batch.plan, batch.headers, replace(model.row_cost, shares_prefixes=shares)))

    both = 1 + BACKWARD
    policy = epochs * (both if trains_policy else 1) + recomputes
    return forward(models.policy) * policy + forward(models.critic) * (1 + both * epochs) + forward(models.reference)


def compute_rates(metrics: Mapping[str, float], ranks: int, device: str, dtype: str) -> dict[str, float]:
    """Return TFLOP/s of each rank during the update, and ``compute/mfu`` if the peak of the ``device`` is known."""
    each = metrics["compute/model_flops"] / ranks / max(metrics["time/update_s"], 1e-9)
    peak = peak_flops(device, dtype)
    return {"compute/tflops_per_s": each / 1e12} | ({} if peak is None else {"compute/mfu": each / peak})


def device_name(device: str) -> str:
    """Return the name of a PyTorch device, by which its peak is known."""
    return device if device == "cpu" else torch.get_device_module(device).get_device_name(device)
