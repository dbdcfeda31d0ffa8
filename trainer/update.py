"""One trainer step on one batch: look, judge, then mini-batches of loss and optimizer.

look      forward passes without gradient: pi_old, reference        -> whole-batch tensors on every rank
judge     advantages and correction, pure functions of the whole batch
train     epochs of mini-batches: the objective on each micro-batch, cut out of the whole batch
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema import RunConfig
from rl_async.errors import RewardsMissing, TrainingDiverged
from rl_async.messages import Trajectory, TrajectoryHeader
from rl_async.trainer import batching, shaping
from rl_async.trainer.advantages import AdvantageInputs
from rl_async.trainer.algorithm import Algorithm
from rl_async.trainer.backend import Backend, Outputs
from rl_async.trainer.batching import MiniBatch, RowKey
from rl_async.trainer.correction import Corrected, correction_metrics
from rl_async.trainer.objective import Looked, Objective, Tally
from rl_async.trainer.whole_batch import Micro, WholeBatch, assemble, gather


@dataclass(frozen=True)
class Batch:
    """A reserved batch as one rank sees it: every header, and the payloads of this rank's rows."""

    step: int
    headers: Sequence[TrajectoryHeader]
    plan: list[MiniBatch]
    rows: dict[RowKey, Trajectory]


@dataclass(frozen=True)
class Models:
    """Those that take part in a step."""

    policy: Backend
    reference: Backend | None = None


@dataclass(frozen=True)
class Updated:
    """Metrics of the step, equal on all ranks, and what became of each token of the batch, [N, T]."""

    metrics: dict[str, float]
    corrected: Corrected


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
    )


def mask_bound(config: RunConfig) -> int | None:
    """The staleness beyond which tokens are masked; None: the queue's own bound suffices."""
    return config.queue.max_staleness if config.queue.on_straggler == "mask" else None


def update(models: Models, batch: Batch, algorithm: Algorithm, config: RunConfig) -> Updated:
    """Train on ``batch``.

    Raises RewardsMissing if no row has a reward, and TrainingDiverged naming the step and the batch's groups when a
    number is not finite; no weight has changed in the mini-batch that failed.
    """
    require_rewards(batch)
    minis = [_collate(batch, mini, models.policy.device, config) for mini in batch.plan]
    micros = [micro for mini in minis for micro in mini]
    whole = assemble(batch.headers, micros)
    looked, outputs = look(models, whole, micros, algorithm)
    gains = algorithm.advantage(advantage_inputs(whole, outputs, config))
    gains = (gains * shaping.repeats(batch.headers, config.algorithm.shaping, config.seed, batch.step)[:, None]).float()
    corrected = algorithm.correct(looked.proximal, whole.behaviour, whole.mask, whole.age)
    tally = Tally()
    objective = Objective(
        whole, looked, gains, corrected if algorithm.decoupled else None, algorithm, config.algorithm, tally
    )
    metrics = train_minibatches(models.policy, objective, batch, minis, config)
    target = looked.proximal
    if not algorithm.decoupled:
        target = tally.first_pass(micros, whole.shape)
        corrected = algorithm.correct(target, whole.behaviour, whole.mask, whole.age)
    metrics |= shaping.shaping_metrics(batch.headers, config.algorithm.shaping)
    metrics |= tally.metrics() | correction_metrics(target, whole.behaviour, whole.mask, whole.age, corrected)
    return Updated({**metrics, "tokens/trained": float(corrected.keep.sum())}, corrected)


def require_rewards(batch: Batch) -> None:
    """A broken reward function must not look like a healthy run.

    Raises RewardsMissing, on every rank, with what was said of this rank's rows.
    """
    if any(header.scored for header in batch.headers):
        return
    said = sorted({row.error for row in batch.rows.values() if row.error})
    raise RewardsMissing(
        f"step {batch.step}: none of the batch's {len(batch.headers)} trajectories could be scored "
        f"(reward.functions); {said[0] if said else 'see the agent workers in logs/'}"
    )


def look(
    models: Models, whole: WholeBatch, micros: Sequence[Micro], algorithm: Algorithm
) -> tuple[Looked, list[Outputs]]:
    """The passes without gradient, and all that the policy's own brought. A collective."""
    proximal, reference, outputs = whole.behaviour, None, list[Outputs]()
    if algorithm.decoupled:
        outputs = [models.policy.forward(micro.tensors, algorithm.looks) for micro in micros]
        proximal = gather(micros, [_logprobs(o) for o in outputs], whole.shape)
    if models.reference is not None:
        passes = [models.reference.forward(micro.tensors) for micro in micros]
        reference = gather(micros, [_logprobs(o) for o in passes], whole.shape)
    return Looked(proximal, reference), outputs


def advantage_inputs(whole: WholeBatch, outputs: Sequence[Outputs], config: RunConfig) -> AdvantageInputs:
    """The batch as an advantage estimator sees it."""
    headers = whole.headers
    rewards = shaping.rewards(headers, config.algorithm.shaping)
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=whole.turn_rewards.double() + on_last_token(rewards, whole.mask),
        mask=whole.mask,
        groups=torch.tensor([h.group_id for h in headers]),
        scored=torch.tensor([h.scored for h in headers]),
        row_weights=whole.row_weights,
        turns=whole.turns,
        options=config.algorithm.advantage_options,
        parts={
            name: torch.tensor([h.reward_parts.get(name, 0.0) for h in headers], dtype=torch.float64)
            for name in sorted({name for h in headers for name in h.reward_parts})
        },
    )


def train_minibatches(
    policy: Backend, objective: Objective, batch: Batch, minis: Sequence[Sequence[Micro]], config: RunConfig
) -> dict[str, float]:
    """Every epoch's optimizer steps. Returns the loss, summed over ranks, and the gradient norm, as means."""
    losses, norms = torch.zeros(1, dtype=torch.float64), list[float]()
    for epoch in range(config.algorithm.epochs):
        for number, (mini, parts) in enumerate(zip(batch.plan, minis, strict=True)):
            seed = hash((config.seed, batch.step, epoch, number))
            loss_fn = objective.minibatch(parts, mini.rows, config.rollout.max_model_len, seed)
            try:
                loss, norm = policy.step([part.tensors for part in parts], loss_fn, objective.algorithm.wants)
            except TrainingDiverged as error:
                groups = sorted({h.group_id for h in batch.headers})
                raise TrainingDiverged(
                    f"step {batch.step}, mini-batch {number} of {len(batch.plan)}, groups {groups}: {error}"
                ) from error
            losses += loss
            norms.append(norm)
    dist.all_reduce(losses)
    return {"loss/policy": losses.item() / len(norms), "loss/grad_norm": sum(norms) / len(norms)}


def on_last_token(rows: Tensor, mask: Tensor) -> Tensor:
    """Each row's number [N] on the last token that its mask [N, T] is true for, 0 elsewhere."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rows[:, None], 0.0)


def _collate(batch: Batch, mini: MiniBatch, device: str, config: RunConfig) -> list[Micro]:
    keys = row_keys(batch.headers)
    trains = shaping.trains(batch.headers, config.algorithm.shaping)
    micros = []
    for rows in mini.ranks[dist.get_rank()]:
        tensors = batching.empty_tensors(device)
        if rows:
            tensors = batching.collate(
                [batch.rows[keys[i]] for i in rows], step=batch.step, max_staleness=mask_bound(config), device=device
            )
            tensors.mask &= trains[rows].to(device)[:, None]
        micros.append(Micro(rows, tensors))
    return micros


def _logprobs(outputs: Outputs) -> Tensor:
    assert outputs.logprobs is not None, "a policy gives log-probabilities"
    return outputs.logprobs
