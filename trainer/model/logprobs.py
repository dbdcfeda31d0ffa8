"""Log-probabilities of chosen tokens from hidden states, without logits of all of them at once.

Logits [rows, V] exist for one chunk of rows at a time, in the forward pass and again in the backward pass, which
computes them anew: what is kept between the two is a few numbers per row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_async.torch_shared import bfloat16_products, output_logits, widened
from rl_async.trainer.model.families import LogitForm

CPU_CHUNK_LOGITS = 2**23  # the fastest of those measured
GPU_CHUNK_LOGITS = 2**26  # a GPU needs larger matrices


class TokenStats(NamedTuple):
    """Float32 [N] each; None if not requested."""

    logprobs: Tensor
    entropy: Tensor | None  # of the distribution over the next token
    sum_squares: Tensor | None  # sum over the vocabulary of pi^2


class Head(NamedTuple):
    """The last layer: weight [V, H], bias [V], and how its outputs become logits."""

    weight: Tensor
    bias: Tensor | None
    form: LogitForm


def token_stats(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: Tensor,
    requested: frozenset[str] = frozenset(),
    chunk_logits: int | None = None,
) -> TokenStats:
    """Evaluate softmax(logits / temperature) at ``targets``; gradient flows to hidden, weight and bias.

    Args:
        hidden: [N, H].
        targets: int64 [N].
        temperature: float32 [N].
        requested: of "entropy" and "sum_squares"; other names are ignored.
        chunk_logits: logits in memory at once; None: what suits the device.
    """
    usual = CPU_CHUNK_LOGITS if hidden.device.type == "cpu" else GPU_CHUNK_LOGITS
    chunk = max(1, (chunk_logits or usual) // head.weight.shape[0])
    flags = "entropy" in requested, "sum_squares" in requested
    result: Any = _Chunked.apply(hidden, head.weight, head.bias, targets, temperature, head.form, flags, chunk)
    return TokenStats(*result)


def head_logits(hidden: Tensor, head: Head, temperature: Tensor) -> Tensor:
    """All logits [N, V] over the temperature, computed in at least float32."""
    logits, form = output_logits(hidden, head.weight, head.bias), head.form
    if form.softcap is None:
        return logits.mul_(form.scale / temperature[:, None])
    return logits.mul_(form.scale / form.softcap).tanh().mul(form.softcap / temperature[:, None])


class _Chunked(torch.autograd.Function):
    """With p = softmax(z), H the entropy and S = sum p^2, the gradients by the logits z are:

    log p_t: onehot_t - p;    H: -p (log p + H);    S: 2 p (p - S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        form: LogitForm,
        flags: tuple[bool, bool],
        chunk: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows, head = hidden.shape[0], Head(widened(weight), bias, form)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser = (torch.empty(rows, dtype=dtype, device=hidden.device) for _ in range(2))
        entropy, squares = (torch.empty_like(logprobs) if flag else None for flag in flags)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            z = head_logits(hidden[part], head, temperature[part])
            normaliser[part] = z.logsumexp(-1)
            logprobs[part] = z.gather(1, targets[part, None])[:, 0] - normaliser[part]
            if entropy is None and squares is None:
                continue
            z -= normaliser[part, None]
            if squares is not None:
                squares[part] = (2 * z).exp_().sum(-1)
            if entropy is not None:
                entropy[part] = -(z.exp() * z).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, normaliser, entropy, squares)
        ctx.form, ctx.chunk = form, chunk
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, normaliser, entropy, squares = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        d_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if to_weight else None
        d_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if to_bias else None
        head = Head(widened(weight), bias, ctx.form)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = head_logits(hidden[part], head, temperature[part])
            slope = _slope(z, ctx.form, temperature[part])
            z -= normaliser[part, None]
            x = _Rows(targets[part], *(None if t is None else t[part, None] for t in (entropy, squares, *grads)))
            dz = _by_logits(z, x).mul_(slope).to(weight.dtype)
            if d_hidden is not None:
                torch.mm(dz, weight, out=d_hidden[part])
            if d_weight is not None:
                _add_product(d_weight, dz, hidden[part])
            if d_bias is not None:
                d_bias += dz.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(weight.dtype),
            *(None,) * 5,
        )


class _Rows(NamedTuple):
    """A chunk's targets [R], its entropy and sum of squares [R, 1], and the gradients by what was computed [R, 1]."""

    targets: Tensor
    entropy: Tensor | None
    squares: Tensor | None
    by_logprobs: Tensor | None
    by_entropy: Tensor | None
    by_squares: Tensor | None


def _slope(z: Tensor, form: LogitForm, temperature: Tensor) -> Tensor:
    """d z / d lm_head's output, [R, V] with a cap, else [R, 1]. z are the final logits over the temperature."""
    slope = form.scale / temperature[:, None].to(z)
    if form.softcap is None:
        return slope
    capped = z * temperature[:, None] / form.softcap
    return slope * (1 - capped * capped)


def _by_logits(logp: Tensor, x: _Rows) -> Tensor:
    """The gradient by the logits [R, V] from their log-probabilities, which are overwritten."""
    if x.by_entropy is None and x.by_squares is None:
        dz = logp.exp_()
        dz *= 0.0 if x.by_logprobs is None else -x.by_logprobs
    else:
        factor = torch.zeros_like(logp)
        if x.by_logprobs is not None:
            factor -= x.by_logprobs
        if x.by_entropy is not None and x.entropy is not None:
            factor -= x.by_entropy * (logp + x.entropy)
        p = logp.exp_()
        if x.by_squares is not None and x.squares is not None:
            factor += 2 * x.by_squares * (p - x.squares)
        dz = factor.mul_(p)
    if x.by_logprobs is not None:
        dz.scatter_add_(1, x.targets[:, None], x.by_logprobs)
    return dz


def _add_product(total: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """total [V, H] += dz^T hidden, in the precision of ``total``."""
    if total.device.type != "cpu" and total.dtype != dz.dtype:
        total += dz.t() @ hidden
        return
    with bfloat16_products(dz.dtype):
        total.addmm_(dz.t().to(total.dtype), hidden.to(total.dtype))
