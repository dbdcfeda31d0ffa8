"""Costs in time, and the lengths of episodes: measured on a recorded run, or assumed from a device's figures.

Model of an engine: one iteration gives every running sequence a token and takes ``base + per_sequence * sequences``.
Model of the trainer: a step takes ``per_token`` for each token that passes through it, divided by the ranks.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.launcher.folder.tail import MetricsTail, Record
from rl_async.launcher.plan.memory import ModelSize
from rl_async.recording import files_of_step, read_trajectories

SKIPPED = 1  # first steps of a run, which are slower


class EpisodeShape(msgspec.Struct, frozen=True):
    """The size of one episode: all tokens and the sampled ones, turns, seconds in tools and scorers."""

    tokens: int
    sampled: int
    turns: int
    outside_s: float


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The cost model of a run, in seconds."""

    iteration_base_s: float  # of one engine, for any batch
    iteration_sequence_s: float  # more for each sequence
    turn_s: float  # from a request to its first token: prefill, HTTP, the agent loop
    train_token_s: float  # of one rank
    sync_s: float
    other_s: float  # checkpoint, metrics: the rest of a step

    def iteration_s(self, sequences: int) -> float:
        return self.iteration_base_s + self.iteration_sequence_s * sequences


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one accelerator. The defaults are an H100 SXM's, with shares that are usual in practice."""

    tflops: float = 989.0  # dense bfloat16
    bandwidth_gb_s: float = 3350.0
    training_share: float = 0.4  # of the arithmetic rate
    decoding_share: float = 0.6  # of the bandwidth
    link_gb_s: float = 50.0  # to another machine, for weights


def assumed(size: ModelSize, device: Device, tokens: int) -> Costs:
    """Estimate costs from a device's figures.

    A token of training costs 8 operations per parameter that it meets, of a mixture those of the experts that are
    chosen for it: forward (2), backward (4), and the forward pass for the proximal policy (2). Decoding reads every
    weight once per iteration, and the cache of each sequence, ``tokens`` long on average while it decodes; both in
    2-byte numbers.
    """
    bandwidth = device.bandwidth_gb_s * 1e9 * device.decoding_share
    return Costs(
        iteration_base_s=2 * size.parameters / bandwidth,
        iteration_sequence_s=2 * size.kv_per_token * tokens / bandwidth,
        turn_s=0.05,
        train_token_s=8 * (size.parameters - size.idle) / (device.tflops * 1e12 * device.training_share),
        sync_s=0.2 + 2 * size.parameters / (device.link_gb_s * 1e9),
        other_s=0.1,
    )


def assumed_episodes(config: RunConfig, count: int = 512) -> list[EpisodeShape]:
    """Draw episode lengths: log-normal with a median of a third of ``agent.max_tokens``, cut off at all of it."""
    draw = np.random.default_rng(config.seed)
    lengths = np.minimum(draw.lognormal(np.log(config.agent.max_tokens / 3), 0.7, count), config.agent.max_tokens)
    return [EpisodeShape(int(length) + 64, max(1, int(length)), 1, 0.0) for length in lengths]


class Fit(NamedTuple):
    """Fitted seconds, none negative. ``explained`` is the share of explained variance of episode times (R squared)."""

    iteration_base_s: float
    iteration_sequence_s: float
    turn_s: float
    explained: float


def measure(run: Path, engines: int, ranks: int) -> tuple[Costs, list[EpisodeShape], Fit]:
    """Fit the costs to a recorded run with this number of engines and ranks.

    Raises UserError if it is too short, or its episodes' times do not grow with their lengths.

    The iteration's two numbers and the turn's are a least-squares fit over all episodes of a step, which all began
    together if the run was on-policy and ``agent.concurrency`` as large as the batch: an episode of n tokens took
    ``turn * turns``, and for each token ``base + per_sequence * (episodes of at least that length) / engines``.
    """
    metrics = MetricsTail(run / "metrics.jsonl").read()[SKIPPED:]
    steps = recorded_steps(run)
    if len(metrics) < 3 or len(steps) < 3:
        raise UserError(f"--run: {run} has fewer than {3 + SKIPPED} recorded steps; let it train longer")
    fit = fit_engine([steps[step] for step in sorted(steps)], engines)
    if fit.iteration_base_s + fit.iteration_sequence_s <= 0:
        raise UserError(
            f"--run: the times of {run}'s episodes do not grow with their lengths, so the cost of a token cannot be "
            "fitted; record a run with queue.max_staleness=0 and agent.concurrency at least as large as a batch"
        )
    spent = ("time/wait_batch_s", "time/train_s", "time/sync_s")
    costs = Costs(
        iteration_base_s=fit.iteration_base_s,
        iteration_sequence_s=fit.iteration_sequence_s,
        turn_s=fit.turn_s,
        train_token_s=training_token_s(metrics, ranks),
        sync_s=statistics.median(m["time/sync_s"] for m in metrics),
        other_s=statistics.median(max(0.0, m["time/step_s"] - sum(m[key] for key in spent)) for m in metrics),
    )
    return costs, [episode for episodes in steps.values() for episode, _ in episodes], fit


def training_token_s(metrics: Sequence[Record], ranks: int) -> float:
    """Return the seconds that one rank takes for a token: the median over the steps."""
    return statistics.median(m["time/train_s"] * ranks / m["rollout/tokens"] for m in metrics)


Timed = tuple[EpisodeShape, float]  # with the seconds that it spent generating


def recorded_steps(run: Path) -> dict[int, list[Timed]]:
    """Return the episodes of each recorded step but the first ones, with their generation times."""
    found: dict[int, list[Timed]] = defaultdict(list)
    folder = run / "trajectories"
    steps = sorted({int(file.name.split("-")[1].split(".")[0]) for file in folder.glob("step-*.jsonl.gz")})
    # A step that was trained again after a restart is recorded in several lineages, of which the newest counts.
    for file in (file for step in steps for file in files_of_step(folder, step)):
        step = int(file.name.split("-")[1])
        for row in read_trajectories(file):
            generate = row.timings.get("generate", 0.0)
            outside = max(0.0, row.timings.get("total", generate) - generate) + row.timings.get("reward", 0.0)
            turns = sum(turn.role == "assistant" for turn in row.turns)
            sampled = int(row.loss_mask.sum())
            found[step].append((EpisodeShape(len(row.token_ids), max(1, sampled), max(1, turns), outside), generate))
    return {step: rows for step, rows in found.items() if step >= SKIPPED}


def fit_engine(steps: Sequence[Sequence[Timed]], engines: int) -> Fit:
    """Fit the costs of an iteration, of a sequence in it, and of a turn; see ``measure``."""
    rows, seconds = [], []
    for episodes in steps:
        longest = max(episode.sampled for episode, _ in episodes)
        lengths = np.array([episode.sampled for episode, _ in episodes])
        alive = np.array([(lengths > k).sum() for k in range(longest)]) / engines  # [longest]
        shared = np.concatenate([[0.0], np.cumsum(alive)])  # sequence-iterations until token k
        rows += [(episode.sampled, shared[episode.sampled], episode.turns) for episode, _ in episodes]
        seconds += [generate for _, generate in episodes]
    inputs, target = np.array(rows, dtype=np.float64), np.array(seconds)
    fitted = _nonnegative(inputs, target)
    spread = float(((target - target.mean()) ** 2).sum())
    residual = float(((target - inputs @ fitted) ** 2).sum())
    return Fit(float(fitted[0]), float(fitted[1]), float(fitted[2]), 1 - residual / spread if spread else 0.0)


def _nonnegative(rows: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve least squares of ``rows`` [N, K] for [K], dropping one by one the columns with negative solutions."""
    active = list(range(rows.shape[1]))
    solved = np.zeros(rows.shape[1])
    while active:
        found = np.linalg.lstsq(rows[:, active], target, rcond=None)[0]
        if (found >= 0).all():
            solved[active] = found
            break
        active.pop(int(found.argmin()))
    return solved
