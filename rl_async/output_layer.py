"""The output layer of a language model, computed alike by the embedded engine and the trainer: logits in float32.

Rounded to bfloat16 a logit of 20 is off by up to 0.06, and the engine's log-probability may differ from the trainer's
by as much. Products of bfloat16 numbers that are summed in float32 and stay there have no such error.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_changing = threading.Lock()  # two threads would restore each other's setting


def widened(weight: Tensor) -> Tensor:
    """Return the weight in the form from which ``output_logits`` computes at once: on a CPU in at least float32.

    Of a weight that is read many times before it changes, such as by an engine's steps, keep this.
    """
    return weight if weight.device.type != "cpu" else weight.to(torch.promote_types(weight.dtype, torch.float32))


def output_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden [N, H] times weight [V, H], plus bias [V], summed and returned in at least float32.

    The weight may have been widened before. Gradient flows through it, at the price of a copy of the weight in float32.
    """
    if torch.finfo(hidden.dtype).bits >= 32:
        return linear(hidden, weight, bias)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    if hidden.device.type != "cpu":
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        with bfloat16_products(hidden.dtype):
            logits = torch.mm(hidden.float(), widened(weight).t())
    return logits if bias is None else logits.add_(bias)


@contextmanager
def bfloat16_products(kind: torch.dtype) -> Iterator[None]:
    """Have a CPU multiply float32 matrices as bfloat16 ones, summed in float32, if ``kind`` is bfloat16.

    Nothing is lost where their elements were bfloat16 before, and a CPU that has such instructions needs half the time.
    The setting is PyTorch's and holds for all threads: float32 products of another thread lose precision meanwhile.
    """
    if kind != torch.bfloat16:
        yield
        return
    mkldnn: Any = torch.backends.mkldnn  # its types do not have all of it
    with _changing:
        before = mkldnn.matmul.fp32_precision
        mkldnn.matmul.fp32_precision = "bf16"
        try:
            yield
        finally:
            mkldnn.matmul.fp32_precision = before
