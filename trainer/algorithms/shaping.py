"""Reward shaping, between scoring and advantages: pure functions of a batch's headers.

    scored reward ── + overlong penalty ── / scale ── clip ──> advantages ── x repeats ──> loss of the rows that train

What is recorded stays as it was scored, and so does what the queue's dynamic sampling looks at. Every rank sees all
headers, so all of them compute the same. The order within a reward: the penalty belongs to it (DAPO adds it to the
correctness reward), scaling sees what is learned from, and clipping bounds what comes out.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import ShapingConfig
from rl_async.messages import TIMEOUT, TrajectoryHeader

EPSILON = 1e-8
RESAMPLE = 1  # beside (seed, step), so that this draw has nothing to do with that of mini-batches
# Finish reasons of trajectories that reached a limit on tokens or time, and of all that a limit cut.
CUT_OFF = ("length", TIMEOUT)
LIMITS = (*CUT_OFF, "max_turns")
BEST_AND_OTHERS = (0.4, 0.1)  # weights of max_random


def rewards(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Compute the rewards that advantages see, float64 [N]; those of unscored rows are 0."""
    scored = torch.tensor([h.scored for h in headers])
    values = torch.tensor([h.reward for h in headers], dtype=torch.float64)
    values = torch.where(scored, values + penalties(headers, options), 0.0)
    values = values / divisor(headers, options)
    if options.reward_clip is not None:
        values = values.clamp(-options.reward_clip, options.reward_clip)
    return values


def penalties(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Compute the soft overlong punishment, float64 [N], from -overlong_factor to 0.

    With L sampled tokens in all rows of the episode, or of its role in it, which have one reward: 0 up to max - cache,
    ((max - cache) - L) / cache up to max, -1 beyond. Source: DAPO (arXiv:2503.14476), eq. 13; there the factor is 1.
    """
    sampled = Counter[tuple[str, str]]()
    for h in headers:
        sampled[h.episode_id, h.role] += h.sampled
    lengths = torch.tensor([sampled[h.episode_id, h.role] for h in headers], dtype=torch.float64)
    if options.overlong_max_tokens is None:
        return torch.zeros_like(lengths)
    begins = options.overlong_max_tokens - options.overlong_cache_tokens
    return options.overlong_factor * ((begins - lengths) / options.overlong_cache_tokens).clamp(-1.0, 0.0)


def divisor(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> float:
    """Return the divisor of outcome and turn rewards: the biased standard deviation of the scored outcomes that train.

    Penalties are included. 1 if the deviation is 0 or ``reward_scale`` is none.

    The mean is not taken away, so signs stay. Source: reward scaling, arXiv:2005.12729, section 2, which divides by
    the deviation of a rolling sum of discounted rewards. Here it is that of the batch, so that a step depends on its
    batch alone and a checkpoint has nothing to keep.
    """
    penalised = torch.tensor([h.reward for h in headers], dtype=torch.float64) + penalties(headers, options)
    known = penalised[torch.tensor([h.scored and not h.baseline for h in headers])]
    if options.reward_scale == "none" or not known.numel():
        return 1.0
    deviation = known.std(correction=0).item()
    return deviation if deviation > EPSILON else 1.0


def trains(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Which rows train, bool [N]. Source: overlong filtering, DAPO (arXiv:2503.14476), section 3.4."""
    return torch.tensor([not (options.overlong_filter and h.finish_reason in CUT_OFF) for h in headers])


def cut(headers: Sequence[TrajectoryHeader]) -> Tensor:
    """Which rows ended because of a limit on tokens, turns or time, bool [N]: the episode could have gone on."""
    return torch.tensor([h.finish_reason in LIMITS for h in headers])


def repeats(headers: Sequence[TrajectoryHeader], options: ShapingConfig, seed: int, step: int) -> Tensor:
    """Count how often each row is drawn, float64 [N]: N_scored draws with replacement, fixed by (seed, step).

    Source: PF-PPO (arXiv:2409.06957) keeps rows whose rewards are reliable. The weights are those of verl's
    ``compute_pf_ppo_reweight_data``, over the whole batch; the paper's own table of weights was not at hand.

    A row that counts k times has its advantage multiplied by k, which is k copies of it in every loss that is linear in
    positive factors of the advantage. The loss is divided by the counts of the batch as it was, and KL and entropy
    terms see every row once.
    """
    scored = torch.tensor([h.scored and not h.baseline for h in headers])
    counts = torch.ones(len(headers), dtype=torch.float64)
    values = rewards(headers, options)
    if options.resample == "none" or not scored.any() or not values.isfinite().all():
        return counts  # an infinite reward makes the loss diverge, which names the step
    odds = resample_weights(values[scored].numpy(), options)
    draw = np.random.default_rng([seed & 0xFFFFFFFF, step, RESAMPLE])
    counts[scored] = torch.from_numpy(draw.multinomial(len(odds), odds / odds.sum())).double()
    return counts


def resample_weights(values: np.ndarray, options: ShapingConfig) -> np.ndarray:
    """Weigh the scored rewards for drawing, float64 [n], never 0."""
    match options.resample:
        case "pow":
            weights = np.abs(values) ** options.resample_power
        case "max_min":
            weights = ((values == values.max()) | (values == values.min())).astype(np.float64)
        case "max_random":
            weights = np.where(values == values.max(), *BEST_AND_OTHERS)
        case _:
            weights = np.ones_like(values)
    return weights + EPSILON


def shaping_metrics(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> dict[str, float]:
    """Report what shaping did to a batch; empty if no option changes rewards or rows."""
    if options == ShapingConfig(dynamic_sampling=options.dynamic_sampling, max_refills=options.max_refills):
        return {}
    scored = torch.tensor([h.scored and not h.baseline for h in headers])
    return {
        "shaping/reward_mean": rewards(headers, options)[scored].mean().item(),
        "shaping/overlong_penalty_mean": penalties(headers, options).mean().item(),
        "shaping/filtered_fraction": 1.0 - trains(headers, options).double().mean().item(),
    }
