"""The output layer of a language model, computed alike by the embedded engine and the trainer: logits in float32.

Rounded to bfloat16 a logit of 20 is off by up to 0.06, and the engine's log-probability may differ from the trainer's
by as much. Products of bfloat16 numbers that are summed in float32 and stay there have no such error.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

PIECE = 2**19  # elements of the weight that are converted at once on a CPU: 2 MiB, which stay in its cache


def output_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden [N, H] times weight [V, H], plus bias [V], summed and returned in at least float32.

    Gradient flows through it, at the price of a whole copy of the weight in float32.
    """
    if torch.finfo(hidden.dtype).bits >= 32:
        return linear(hidden, weight, bias)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = _in_pieces(hidden.float(), weight)
    return logits if bias is None else logits.add_(bias)


def _in_pieces(hidden: Tensor, weight: Tensor) -> Tensor:
    rows = max(1, PIECE // weight.shape[1])
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    buffer = hidden.new_empty(min(rows, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows]
        converted = buffer[: part.shape[0]].copy_(part)
        torch.mm(hidden, converted.t(), out=logits[:, start : start + rows])
    return logits
