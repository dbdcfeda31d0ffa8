"""Trains a reward model on preference pairs by the Bradley-Terry likelihood."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_async.errors import TrainingDiverged
from rl_async.reward_loop.server.classifier import score, values

REPORTS = 10
# Share of the steps over which the learning rate rises.
WARMUP = 0.1
GRAD_CLIP = 1.0


class TokenPair(NamedTuple):
    """Token ids of two conversations; the first is better by at least ``margin``."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


@dataclass(frozen=True)
class PairTraining:
    """Settings of a training with ``batch_size`` pairs per step.

    The learning rate rises over the first tenth of the steps, then falls linearly to 0.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    seed: int


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    """Return the mean of -log sigmoid(chosen - rejected - margin), a scalar, from float32 [B] each.

    The negative log-likelihood of the preferences under Bradley and Terry's model, as in InstructGPT
    (arXiv:2203.02155, equation 1) with the margin of Llama 2 (arXiv:2307.09288, equation 2).
    """
    return -logsigmoid(chosen - rejected - margin).mean()


def train_pairs(
    model: torch.nn.Module, pairs: Sequence[TokenPair], how: PairTraining, report: Callable[[str], None]
) -> None:
    """Train ``model``, a sequence classifier with one label; ``report`` gets lines of text.

    Raises TrainingDiverged when the gradient norm is not finite.
    """
    draw = random.Random(how.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    per_epoch = -(-len(pairs) // how.batch_size)
    steps = how.epochs * per_epoch
    model.train()
    order: list[TokenPair] = []
    for step in range(steps):
        if step % per_epoch == 0:
            order = draw.sample(pairs, len(pairs))
        start = step % per_epoch * how.batch_size
        for group in optimizer.param_groups:
            group["lr"] = how.learning_rate * _scale(step, steps)
        loss, right = _loss(model, order[start : start + how.batch_size])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"step {step}: loss {loss.item():g}, gradient norm {norm.item():g}; nothing is saved"
            )
        optimizer.step()
        if (step + 1) % max(1, steps // REPORTS) == 0 or step + 1 == steps:
            report(f"{step + 1} of {steps} steps: loss {loss.item():.4f}, accuracy in the batch {right:.2f}")
    model.eval()


def _scale(step: int, steps: int) -> float:
    warmup = max(1, round(WARMUP * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup), 1.0)


def _loss(model: torch.nn.Module, batch: Sequence[TokenPair]) -> tuple[Tensor, float]:
    """Return the loss, and the share of pairs in the right order."""
    rewards = values(model, [pair.chosen for pair in batch] + [pair.rejected for pair in batch])
    chosen, rejected = rewards[: len(batch)], rewards[len(batch) :]
    margin = torch.tensor([pair.margin for pair in batch], device=rewards.device)
    return bradley_terry(chosen, rejected, margin), (chosen > rejected).float().mean().item()


def accuracy(model: torch.nn.Module, pairs: Sequence[TokenPair], batch_size: int) -> float:
    """Return the share of pairs whose chosen conversation has the higher reward; a tie counts as wrong."""
    right = 0
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        rewards = score(model, [pair.chosen for pair in batch] + [pair.rejected for pair in batch])
        right += sum(better > worse for better, worse in zip(rewards, rewards[len(batch) :]))
    return right / len(pairs)
