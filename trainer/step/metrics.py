"""Metrics that follow from a step's batch: rewards, turns, lengths and realised staleness."""

from collections.abc import Sequence

import numpy as np
import torch

from rl_async.messages import (
    CALL_PROBLEMS,
    TIMEOUT,
    Trajectory,
    TrajectoryHeader,
    episode_rewards,
    has_signal,
    mean_role_rewards,
)
from rl_async.trainer.batches.batch import Batch
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.batches.layout import fresh_runs


def batch_metrics(headers: Sequence[TrajectoryHeader], step: int, max_staleness: int | None) -> dict[str, float]:
    """Rewards, response lengths, and the staleness of the trained tokens.

    Rewards, those of turns included, are over episodes that were scored, of which there must be one;
    ``reward/unscored_fraction`` says how many were not (a scorer failed, for one role at least). ``staleness/mean`` and
    ``staleness/max`` are over trained tokens: the step minus the step of the version that sampled each.
    ``max_staleness`` is the bound beyond which tokens were masked, or None. Greedy episodes of
    algorithm.advantage=remax count in ``reward/greedy_mean`` alone, which is over scored ones. With several roles in an
    episode its reward is the mean of theirs, and ``reward/mean/ROLE`` is each one's.
    """
    baselines = list(episode_rewards(h for h in headers if h.baseline).values())
    nbytes = float(sum(h.nbytes for h in headers))  # fetched from the queue
    without_signal = _flat_groups(headers)  # a greedy episode is compared with, so it counts here
    headers = [h for h in headers if not h.baseline]
    episodes = [h for h in headers if h.segment == 0]
    rewards = np.array(list(episode_rewards(headers).values()))
    runs = [(step - r.version.step, r.end - r.start) for h in headers for r in fresh_runs(h, step, max_staleness)]
    tokens = sum(count for _, count in runs)
    late = len({h.episode_id for h in headers if h.finish_reason == TIMEOUT})
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/unscored_fraction": 1.0 - len(rewards) / len(episodes),
        "reward/groups_without_signal": without_signal,
        "rollout/response_tokens_mean": sum(h.sampled for h in headers) / len(episodes),
        "rollout/tokens": float(sum(h.tokens for h in headers)),
        "staleness/mean": sum(age * count for age, count in runs) / max(tokens, 1),
        "staleness/max": float(max((age for age, _ in runs), default=0)),
        "batch/trajectories": float(len(headers)),
        "batch/episodes": float(len(episodes)),
        "batch/bytes": nbytes,
        **({"rollout/timeout_fraction": late / len(episodes)} if late else {}),
        **({"reward/greedy_mean": float(np.mean(baselines))} if baselines else {}),
        **{f"reward/mean/{role}": reward for role, reward in mean_role_rewards(headers).items()},
    }


def _flat_groups(headers: Sequence[TrajectoryHeader]) -> float:
    """Share of groups whose scored rewards are all equal, so that they have no signal."""
    groups: dict[int, list[TrajectoryHeader]] = {}
    for header in headers:
        groups.setdefault(header.group_id, []).append(header)
    return sum(not has_signal(group) for group in groups.values()) / max(len(groups), 1)


def conversations(ranks: DataParallel, batch: Batch) -> dict[str, float]:
    """Average turns and tool calls per episode over all ranks. A collective."""
    sums = torch.tensor(conversation_sums(batch.headers, list(batch.rows.values())), dtype=torch.float64)
    ranks.all_reduce(sums)
    return conversation_metrics(sums.tolist())


def conversation_sums(headers: Sequence[TrajectoryHeader], rows: Sequence[Trajectory]) -> list[float]:
    """[assistant turns, tool calls, failed tool calls, cut results, malformed calls of each kind, then for each
    episode its rows with an error] of a rank's sampled rows, to be added up over ranks; ``headers`` are those of all
    ranks' rows. A turn counts in the row in which it was sampled."""
    rows = [row for row in rows if not row.baseline]
    errors = {header.episode_id: 0.0 for header in headers if not header.baseline}
    for row in rows:
        errors[row.episode_id] += bool(row.error)
    turns = [turn for row in rows for turn in row.turns if row.loss_mask[turn.start : turn.end].any()]
    calls = [call for turn in turns for call in turn.tool_calls]
    return [
        float(len(turns)),
        float(len(calls)),
        float(sum(bool(call.error) for call in calls)),
        float(sum(bool(call.cut) for call in calls)),
        *(float(sum(call.problem == problem for call in calls)) for problem in CALL_PROBLEMS),
        *errors.values(),
    ]


def conversation_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Per-episode means from the summed ``conversation_sums`` of all ranks."""
    turns, calls, failed, cut, *counts = sums
    malformed, errors = counts[: len(CALL_PROBLEMS)], counts[len(CALL_PROBLEMS) :]
    episodes = len(errors)
    kinds = {f"rollout/malformed_calls/{problem}": count for problem, count in zip(CALL_PROBLEMS, malformed) if count}
    return kinds | {
        "rollout/turns_mean": turns / max(episodes, 1),
        "rollout/tool_calls_mean": calls / max(episodes, 1),
        "rollout/tool_errors_mean": failed / max(episodes, 1),
        "rollout/cut_results_mean": cut / max(episodes, 1),
        "rollout/error_fraction": sum(rows > 0 for rows in errors) / max(episodes, 1),
    }
