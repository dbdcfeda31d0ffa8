"""One trainer step on one batch: advantages, old log-probabilities, mini-batches, loss, optimizer, metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema import RunConfig
from rl_async.errors import TrainingDiverged
from rl_async.messages import Trajectory, TrajectoryHeader
from rl_async.trainer import batching
from rl_async.trainer.advantages import advantages
from rl_async.trainer.backend import Backend, LossFn
from rl_async.trainer.batching import MiniBatch, RowKey, Tensors
from rl_async.trainer.correction import CORRECTIONS, MismatchMeter, truncated_importance_weights
from rl_async.trainer.losses import LOSSES, LossInputs, k3_kl, token_mean


@dataclass(frozen=True)
class Batch:
    """A reserved batch as one rank sees it: every header, and the payloads of this rank's rows."""

    step: int
    headers: Sequence[TrajectoryHeader]
    plan: list[MiniBatch]
    rows: dict[RowKey, Trajectory]


@dataclass
class Micro:
    """One forward pass of this rank with what the loss needs beside it, all [B, T-1]."""

    tensors: Tensors
    proximal: Tensor | None = None
    reference: Tensor | None = None


def row_keys(headers: Sequence[TrajectoryHeader]) -> list[RowKey]:
    """(group, sample) of each row, in batch order."""
    return [(h.group_id, h.sample) for h in headers]


def plan_batch(headers: Sequence[TrajectoryHeader], step: int, config: RunConfig, ranks: int) -> list[MiniBatch]:
    """The layout of a batch under this config; the same on every rank."""
    return batching.layout(
        headers,
        step=step,
        minibatches=config.trainer.minibatches,
        ranks=ranks,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        seed=config.seed,
        max_staleness=mask_bound(config),
    )


def mask_bound(config: RunConfig) -> int | None:
    """The staleness beyond which tokens are masked; None: the queue's own bound suffices."""
    return config.queue.max_staleness if config.queue.on_straggler == "mask" else None


def update(backend: Backend, reference: Backend | None, batch: Batch, config: RunConfig) -> dict[str, float]:
    """Train on ``batch`` and return the step's loss and correction metrics, equal on all ranks.

    Raises TrainingDiverged naming the step and the batch's groups when a number is not finite; no weight has changed
    in the mini-batch that failed.
    """
    algorithm, correction = config.algorithm, CORRECTIONS[config.algorithm.correction]
    gains = advantages(
        algorithm.advantage, [h.reward for h in batch.headers], [h.group_id for h in batch.headers]
    ).tolist()
    micros = [_collate(batch, mini, gains, backend.device, config) for mini in batch.plan]
    meter = MismatchMeter()
    with torch.no_grad():
        for micro in (m for mini in micros for m in mini):
            if correction.proximal == "recompute":
                micro.proximal = backend.logprobs(micro.tensors)
                meter.add(micro.proximal, micro.tensors.behaviour, micro.tensors.mask)
            if reference is not None:
                micro.reference = reference.logprobs(micro.tensors)
    totals = torch.zeros(4, dtype=torch.float64)  # loss, kl, clipped tokens, tokens
    norms = []
    for number, (mini, parts) in enumerate(zip(batch.plan, micros, strict=True)):
        loss_fn = _loss_fn(parts, mini.tokens, config, totals, meter if number == 0 else None)
        try:
            loss, norm = backend.step([p.tensors for p in parts], loss_fn)
        except TrainingDiverged as error:
            groups = sorted({h.group_id for h in batch.headers})
            raise TrainingDiverged(
                f"step {batch.step}, mini-batch {number} of {len(batch.plan)}, groups {groups}: {error}"
            ) from error
        totals[0] += loss
        norms.append(norm)
    return _reduce(totals, meter, norms)


def _collate(batch: Batch, mini: MiniBatch, gains: list[float], device: str, config: RunConfig) -> list[Micro]:
    keys = row_keys(batch.headers)
    micros = []
    for rows in mini.ranks[dist.get_rank()]:
        if not rows:
            micros.append(Micro(batching.empty_tensors(device)))
            continue
        micros.append(
            Micro(
                batching.collate(
                    [batch.rows[keys[i]] for i in rows],
                    [gains[i] for i in rows],
                    step=batch.step,
                    max_staleness=mask_bound(config),
                    device=device,
                )
            )
        )
    return micros


def _loss_fn(parts: list[Micro], tokens: int, config: RunConfig, totals: Tensor, meter: MismatchMeter | None) -> LossFn:
    """The loss of one mini-batch's micro-batches; adds KL and clip counts to ``totals`` as it goes.

    When old log-probabilities are bypassed, nothing was recomputed, so the mismatch is measured here, in the first
    mini-batch, where the policy still is the one that the step began with.
    """
    algorithm, correction = config.algorithm, CORRECTIONS[config.algorithm.correction]

    def loss_fn(number: int, logprobs: Tensor) -> Tensor:
        part = parts[number]
        x = part.tensors
        bypass = part.proximal is None
        proximal = x.behaviour if part.proximal is None else part.proximal
        if bypass and meter is not None:
            meter.add(logprobs, x.behaviour, x.mask)
        weights = torch.ones_like(logprobs)
        if correction.weight == "token":
            weights = truncated_importance_weights(proximal, x.behaviour, algorithm.importance_cap)
        inputs = LossInputs(logprobs, proximal, x.advantages, weights, algorithm.clip_low, algorithm.clip_high)
        per_token = LOSSES[algorithm.loss](inputs)
        if part.reference is not None:
            kl = k3_kl(logprobs, part.reference)
            per_token = per_token + algorithm.kl_coef * kl
            totals[1] += torch.where(x.mask, kl.detach(), 0.0).sum().item()
        ratio = (logprobs.detach() - proximal).exp()
        outside = (ratio < 1 - algorithm.clip_low) | (ratio > 1 + algorithm.clip_high)
        totals[2] += (outside & x.mask).sum().item()
        totals[3] += x.mask.sum().item()
        return token_mean(per_token, x.mask, max(tokens, 1))

    return loss_fn


def _reduce(totals: Tensor, meter: MismatchMeter, norms: list[float]) -> dict[str, float]:
    dist.all_reduce(totals)
    dist.all_reduce(meter.sums)
    dist.all_reduce(meter.largest, op=dist.ReduceOp.MAX)
    loss, kl, clipped, tokens = totals.tolist()
    return {
        "loss/policy": loss / len(norms),
        "loss/kl_reference": kl / max(tokens, 1),
        "loss/clip_fraction": clipped / max(tokens, 1),
        "loss/grad_norm": sum(norms) / len(norms),
        "tokens/trained": tokens,
        **meter.metrics(),
    }
