"""One trainer step on one batch.

precompute   forward passes without gradient: pi_old, reference, values -> whole-batch tensors on every rank
advantages   advantages and correction, pure functions of the whole batch
train        epochs of mini-batches: the objective on each micro-batch, cut out of the whole batch, and the critic's
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import KlConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RewardsMissing, TrainingDiverged
from rl_async.messages import TrajectoryHeader, episode_rewards
from rl_async.trainer.algorithms import shaping
from rl_async.trainer.algorithms.advantages import AdvantageInputs, Groups
from rl_async.trainer.algorithms.algorithm import Algorithm
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.correction_metrics import correction_metrics
from rl_async.trainer.algorithms.rows import Rows, on_tokens, row_sums
from rl_async.trainer.backends.interface import Backend, LossFn, OutputName
from rl_async.trainer.batches.batch import Batch
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.batches.layout import cost_imbalance, mask_bound, token_imbalance
from rl_async.trainer.batches.tensors import collate, empty_tensors
from rl_async.trainer.step.critic import CriticUpdate, critic_update
from rl_async.trainer.step.explanation import TokenOutcomes, attributed
from rl_async.trainer.step.models import Models
from rl_async.trainer.step.objective import LossSums, Objective, Precomputed
from rl_async.trainer.step.performance import model_flops
from rl_async.trainer.step.whole_batch import MicroBatch, WholeBatch, assemble, gather

log = logging.getLogger("rl_async.trainer")


@dataclass(frozen=True)
class Updated:
    """Metrics of the step, equal on all ranks, and what became of each token of the batch, and why."""

    metrics: dict[str, float]
    tokens: TokenOutcomes


def update(models: Models, batch: Batch, algorithm: Algorithm, config: RunConfig, kl_coef: float = 0.0) -> Updated:
    """Train on ``batch``. ``kl_coef`` is the weight of the KL to the reference in this step.

    Raises RewardsMissing if no episode has a reward, and TrainingDiverged naming the step and the batch's groups when a
    number is not finite; no weight of that model has changed in the mini-batch that failed.
    """
    require_rewards(batch)
    headers, options, ranks = batch.headers, config.algorithm.shaping, models.data_parallel
    trains = shaping.trains(headers, options)
    whole = assemble(ranks, batch, mask_bound(config), trains)
    minis = [[micro_batch(batch, whole, rows, models) for rows in mini.ranks[ranks.rank]] for mini in batch.plan]
    micros = [micro for mini in minis for micro in mini]
    sums = LossSums(ranks)
    before = precompute(models, whole, micros, algorithm, sums)
    whole = whole.without_masks(before.proximal)
    corrected = None
    if algorithm.decoupled:
        corrected = corrected_batch(algorithm, before.proximal, whole)
    inputs = advantage_inputs(whole, before, corrected, config)
    inputs, kl = penalised(
        inputs, whole.players, before, algorithm, config.algorithm.kl, kl_coef, whole.grammar_weights
    )
    advantages = algorithm.advantage(inputs)
    repeats = shaping.repeats(headers, options, config.seed, batch.step)
    advantages = (advantages * on_tokens(repeats, whole.rows)).float()
    objective = Objective(
        whole=whole,
        precomputed=before,
        advantages=advantages,
        corrected=corrected,
        algorithm=algorithm,
        config=config.algorithm,
        sums=sums,
        kl_coef=kl_coef,
        reference=models.reference if config.algorithm.kl.estimator == "full" else None,
    )
    critic = critic_update(ranks, inputs, config.critic)
    metrics = train_minibatches(models, objective, critic, batch, minis, config)
    target = before.proximal
    if corrected is None:
        target = sums.first_pass(micros, whole.rows)
        corrected = corrected_batch(algorithm, target, whole)
    metrics |= shaping.shaping_metrics(headers, options)
    metrics |= sums.metrics() | kl
    metrics |= correction_metrics(
        target, whole.behaviour, whole.free, whole.age, corrected, algorithm.rules, whole.rows
    )
    metrics |= grammar_metrics(whole)
    metrics["tokens/trained"] = float(corrected.keep.sum())
    metrics["batch/token_imbalance"] = token_imbalance(batch.plan, headers, models.row_cost)
    metrics["batch/work_imbalance"] = cost_imbalance(batch.plan, headers, models.row_cost)
    metrics["batch/shared_tokens"] = shared_tokens(ranks, micros)
    metrics["compute/model_flops"] = model_flops(
        models,
        batch,
        epochs=config.trainer.epochs,
        trains_policy=trains_policy(config, batch.step),
        recomputes=bool(algorithm.precompute) or recomputes(algorithm, whole),
    )
    return Updated(metrics, TokenOutcomes(whole.rows, attributed(corrected, whole, ~trains), target, advantages))


def corrected_batch(algorithm: Algorithm, target: Tensor, whole: WholeBatch) -> Corrected:
    """Correct the whole batch, and weigh what was sampled under a grammar's mask."""
    corrected = algorithm.correct(target, whole.behaviour, whole.mask, whole.age, whole.free, whole.rows)
    return corrected.times(whole.grammar_weights)


def grammar_metrics(whole: WholeBatch) -> dict[str, float]:
    """Return the share of tokens that a grammar's mask restricted, and the mean of their weights; nothing without any.

    On-policy the weight is the probability that the policy had left to the allowed tokens.
    """
    there = whole.mask & whole.constrained
    if whole.grammar_weights is None or not there.any():
        return {}
    share, weight = there.sum() / whole.mask.sum(), whole.grammar_weights[there].mean()
    return {"constrained/share": share.item(), "constrained/weight_mean": weight.item()}


def shared_tokens(ranks: DataParallel, micros: Sequence[MicroBatch]) -> float:
    """The share of the batch's tokens that no pass computes, since another row of its micro-batch begins with them.

    A collective.
    """
    there = [micro.tensors for micro in micros if micro.rows]
    sums = torch.tensor([sum(x.computed for x in there), sum(int(x.lengths.sum()) for x in there)], dtype=torch.float64)
    ranks.all_reduce(sums)
    return 1.0 - (sums[0] / sums[1]).item()


def require_rewards(batch: Batch) -> None:
    """Raise RewardsMissing, on every rank, if no episode was scored: a broken reward function must not look healthy.

    The error quotes what was said of one of this rank's rows.
    """
    if episode_rewards(header for header in batch.headers if not header.baseline):
        return
    reported = sorted({row.error for row in batch.rows.values() if row.error})
    raise RewardsMissing(
        f"step {batch.step}: none of the episodes of the batch's {len(batch.headers)} trajectories could be scored "
        f"(reward.functions); {reported[0] if reported else 'see the agent workers in logs/'}"
    )


def micro_batch(batch: Batch, whole: WholeBatch, rows: list[int], models: Models) -> MicroBatch:
    """Put the tensors of some of this rank's rows on the device: what a model reads, and the mask."""
    device = models.policy.device
    if not rows:
        return MicroBatch(rows, empty_tensors(device), whole.rows)
    payloads = [batch.rows[batch.headers[i].key] for i in rows]
    width = max(max(len(row.token_ids) for row in payloads) - 1, 1)
    tensors = collate(
        payloads,
        device=device,
        mask=whole.rows.pad(whole.mask, rows, width),
        share_prefixes=models.row_cost.shares_prefixes,
        replay_routers=models.policy.replays_routers,
    )
    if models.policy.replays_routers and tensors.experts is None:
        warn_unrecorded()
    return MicroBatch(rows, tensors, whole.rows)


@functools.cache  # once per process
def warn_unrecorded() -> None:
    """Say that rows of a mixture of experts came without a record of its routers."""
    log.warning(
        "rows do not say which experts the engine chose, so the trainer's routers choose again, perhaps others; see "
        "trainer.router_replay"
    )


def recomputes(algorithm: Algorithm, whole: WholeBatch) -> bool:
    """Whether log pi_old is computed. The weight of a token that was sampled under a grammar's mask needs it whatever
    the algorithm asks for."""
    return algorithm.decoupled or bool(whole.constrained.any())


def precompute(
    models: Models, whole: WholeBatch, micros: Sequence[MicroBatch], algorithm: Algorithm, sums: LossSums
) -> Precomputed:
    """Run the forward passes without gradient that the algorithm asks for. A collective.

    ``sums`` hears which experts the policy's tokens met.
    """

    def whole_batch(parts: Sequence[Tensor | None]) -> Tensor:
        return gather(models.data_parallel, micros, [part for part in parts if part is not None], whole.rows)

    found = Precomputed(proximal=whole.behaviour)
    if algorithm.precompute or recomputes(algorithm, whole):
        outputs = [models.policy.forward(micro.tensors, algorithm.precompute) for micro in micros]
        for micro, output in zip(micros, outputs, strict=True):
            sums.add_routes(micro, output)
        if recomputes(algorithm, whole):
            passed = whole_batch([o.logprobs for o in outputs])
            bypassed = torch.where(whole.constrained, passed, whole.behaviour)
            found = replace(found, proximal=passed if algorithm.decoupled else bypassed)
        if "sum_squares" in algorithm.precompute:
            found = replace(found, sum_squares=whole_batch([o.sum_squares for o in outputs]))
        if "values" in algorithm.precompute:
            found = replace(found, values=whole_batch([o.values for o in outputs]))
    if models.reference is not None and "distribution" not in algorithm.train_outputs:
        found = replace(found, reference=whole_batch([models.reference.forward(m.tensors).logprobs for m in micros]))
    if models.critic is not None:
        found = replace(found, values=whole_batch([models.critic.forward(m.tensors).values for m in micros]))
    return found


def advantage_inputs(
    whole: WholeBatch, before: Precomputed, corrected: Corrected | None, config: RunConfig
) -> AdvantageInputs:
    """Shape the batch's rewards and collect what an advantage estimator may read."""
    headers = whole.headers
    outcomes = shaping.rewards(headers, config.algorithm.shaping)
    turn_rewards = whole.turn_rewards.double() / shaping.divisor(headers, config.algorithm.shaping)
    rewards = outcomes + player_sums(row_sums(turn_rewards, whole.rows), whole.players)
    weights = {term.name: term.weight for term in config.reward.functions}
    options = config.algorithm.advantage_options
    baselines, compared = greedy_baselines(headers, rewards)
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=turn_rewards + on_last_token(outcomes, whole.mask, whole.rows),
        mask=whole.mask,
        groups=whole.groups,
        scored=torch.tensor([h.scored and not h.baseline for h in headers]) & compared,
        baselines=baselines,
        row_weights=whole.player_weights,
        lengths=torch.tensor([h.sampled for h in headers], dtype=torch.float64),
        turns=whole.turns,
        options=msgspec.structs.replace(options, gdpo_weights=weights | options.gdpo_weights),
        parts={
            name: torch.tensor([h.reward_parts.get(name, 0.0) for h in headers], dtype=torch.float64)
            for name in weights
        },
        values=None if before.values is None else before.values.double(),
        logprobs=before.proximal.double(),
        sum_squares=None if before.sum_squares is None else before.sum_squares.double(),
        importance=None if corrected is None else torch.where(corrected.keep, corrected.weights, 0.0).double(),
        cut=shaping.cut(headers),
        rows=whole.rows,
    )


def penalised(
    x: AdvantageInputs,
    players: Tensor,
    before: Precomputed,
    algorithm: Algorithm,
    kl: KlConfig,
    coef: float,
    weights: Tensor | None = None,
) -> tuple[AdvantageInputs, dict[str, float]]:
    """Subtract coef * KL(pi_old || reference) from every token's reward with ``kl.place=reward``.

    ``players``, int64 [N], says which rows have one reward; ``weights`` per token, if any, multiply the
    estimates. Returns the inputs, and the mean of that KL as a metric; the inputs alone as they were in any other case.
    """
    if kl.place != "reward" or before.reference is None:
        return x, {}
    penalty = torch.where(x.mask, algorithm.kl(before.proximal.double(), before.reference.double()), 0.0)
    penalty = penalty if weights is None else penalty * weights
    mean = penalty.sum().item() / max(int(x.mask.sum()), 1)
    rewards = x.rewards - coef * player_sums(row_sums(penalty, x.rows), players)
    return replace(x, rewards=rewards, token_rewards=x.token_rewards - coef * penalty), {"loss/kl_reference": mean}


def player_sums(rows: Tensor, players: Tensor) -> Tensor:
    """Sum numbers of rows [N] over all rows of each one's player, [N]."""
    return Groups.of(players, torch.ones_like(rows)).sum(rows)


def greedy_baselines(headers: Sequence[TrajectoryHeader], rewards: Tensor) -> tuple[Tensor | None, Tensor]:
    """Look up what each row's role earned in the greedy episode of its group, [N], and whether there is one, bool [N].

    Without greedy episodes in the batch: None, and true everywhere.
    """
    pairs = zip(headers, rewards.tolist(), strict=True)
    greedy = {(h.group_id, h.role): reward for h, reward in pairs if h.baseline and h.scored}
    if not any(h.baseline for h in headers):
        return None, torch.ones(len(headers), dtype=torch.bool)
    keys = [(h.group_id, h.role) for h in headers]
    found = torch.tensor([key in greedy for key in keys])
    return torch.tensor([greedy.get(key, 0.0) for key in keys], dtype=torch.float64), found


def train_minibatches(
    models: Models,
    objective: Objective,
    critic: CriticUpdate | None,
    batch: Batch,
    minis: Sequence[Sequence[MicroBatch]],
    config: RunConfig,
) -> dict[str, float]:
    """Take every epoch's optimizer steps.

    Returns the mean loss (summed over ranks) and gradient norm per mini-batch, and what the critic learned.
    """
    train_policy = _step if trains_policy(config, batch.step) else _observe
    losses, norms = torch.zeros(1, dtype=torch.float64), list[float]()
    for epoch in range(config.trainer.epochs):
        for number, (mini, parts) in enumerate(zip(batch.plan, minis, strict=True)):
            seed = hash((config.seed, batch.step, epoch, number))
            loss_fn = objective.minibatch(parts, mini.rows, config.rollout.max_model_len, seed)
            try:
                if critic is not None:
                    loss_fn = critic.wrap_loss(models.critic, loss_fn, parts, mini.rows)
                loss, norm = train_policy(models.policy, parts, loss_fn, objective.algorithm.train_outputs)
            except TrainingDiverged as error:
                groups = sorted({h.group_id for h in batch.headers})
                raise TrainingDiverged(
                    f"step {batch.step}, mini-batch {number} of {len(batch.plan)}, groups {groups}: {error}"
                ) from error
            losses += loss
            norms.append(norm)
    losses -= critic.shared_loss() if critic else 0.0
    models.data_parallel.all_reduce(losses)
    metrics = {"loss/policy": losses.item() / len(norms), "loss/grad_norm": sum(norms) / len(norms)}
    return metrics | (critic.metrics() if critic else {})


def trains_policy(config: RunConfig, step: int) -> bool:
    """Whether the policy's weights change in this step, and not only those of a critic that warms up."""
    return config.critic is None or step >= config.critic.warmup_steps


def _step(
    policy: Backend, parts: Sequence[MicroBatch], loss_fn: LossFn, requested: frozenset[OutputName]
) -> tuple[float, float]:
    return policy.step([part.tensors for part in parts], loss_fn, requested)


def _observe(
    policy: Backend, parts: Sequence[MicroBatch], loss_fn: LossFn, requested: frozenset[OutputName]
) -> tuple[float, float]:
    """Compute the loss that ``_step`` would have stepped on, while only the critic trains."""
    outputs = (policy.forward(part.tensors, requested) for part in parts)
    losses = [loss_fn(number, out) for number, out in enumerate(outputs)]
    return sum(torch.stack(losses).tolist()), 0.0


def on_last_token(values: Tensor, mask: Tensor, rows: Rows | None = None) -> Tensor:
    """Put each row's value [N] on the last of its tokens where ``mask`` is true, 0 elsewhere; [N, T], or packed [M]."""
    counts = row_sums(mask, rows).long()
    found = torch.zeros(int(counts.sum()), dtype=values.dtype)
    found[counts.cumsum(0)[counts > 0] - 1] = values[counts > 0]
    return torch.zeros_like(mask, dtype=values.dtype).masked_scatter_(mask, found)
