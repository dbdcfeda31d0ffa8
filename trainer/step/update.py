"""One trainer step on one batch: look, judge, then mini-batches of loss and optimizer.

look      forward passes without gradient: pi_old, reference, values -> whole-batch tensors on every rank
judge     advantages and correction, pure functions of the whole batch
train     epochs of mini-batches: the objective on each micro-batch, cut out of the whole batch; the critic's beside it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import KlConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RewardsMissing, TrainingDiverged
from rl_async.messages import RowKey, Trajectory, TrajectoryHeader
from rl_async.trainer.algorithms import shaping
from rl_async.trainer.algorithms.advantages import AdvantageInputs
from rl_async.trainer.algorithms.algorithm import Algorithm
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.correction_metrics import correction_metrics
from rl_async.trainer.backends.interface import Backend, LossFn, OutputName
from rl_async.trainer.batches import batching
from rl_async.trainer.batches.batching import MiniBatch
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.step.critic import CriticUpdate, critic_update
from rl_async.trainer.step.explanation import attributed
from rl_async.trainer.step.objective import LossSums, Objective, Precomputed
from rl_async.trainer.step.whole_batch import MicroBatch, WholeBatch, assemble, gather


@dataclass(frozen=True)
class Batch:
    """A reserved batch as one rank sees it: every header, and the payloads of its cell's rows."""

    step: int
    headers: Sequence[TrajectoryHeader]
    plan: list[MiniBatch]
    rows: dict[RowKey, Trajectory]


@dataclass(frozen=True)
class Models:
    """Those that take part in a step. A critic that shares the policy's backbone is no model of its own."""

    policy: Backend
    reference: Backend | None = None
    critic: Backend | None = None

    @property
    def row_cost(self) -> RowCost:
        """What a row costs the policy, and whether any of them pads rows, which then are grouped by length."""
        return replace(self.policy.row_cost, padded=any(model.row_cost.padded for model in self._all()))

    @property
    def data_parallel(self) -> DataParallel:
        """Of this rank; the same for all of them."""
        return self.policy.data_parallel

    def trained(self) -> dict[str, Backend]:
        """Those whose weights change, by their folder in a checkpoint."""
        return {".": self.policy} | ({"critic": self.critic} if self.critic else {})

    def sleep(self) -> None:
        """Give the device's memory back, as far as the backend can."""
        for model in self._all():
            model.sleep()

    def wake(self) -> None:
        """Undo ``sleep``."""
        for model in self._all():
            model.wake()

    def _all(self) -> list[Backend]:
        return [model for model in (self.policy, self.reference, self.critic) if model is not None]


@dataclass(frozen=True)
class Updated:
    """Metrics of the step, equal on all ranks, and what became of each token of the batch, [N, T], and why."""

    metrics: dict[str, float]
    corrected: Corrected


def row_keys(headers: Sequence[TrajectoryHeader]) -> list[RowKey]:
    """The name of each row, in batch order."""
    return [header.key for header in headers]


def plan_batch(
    headers: Sequence[TrajectoryHeader], step: int, config: RunConfig, ranks: int, cost: RowCost
) -> list[MiniBatch]:
    """The layout of a batch over this many data-parallel ranks; the same on every rank."""
    return batching.layout(
        headers,
        step=step,
        minibatches=config.trainer.minibatches,
        ranks=ranks,
        max_tokens=config.trainer.max_tokens_per_microbatch,
        seed=config.seed,
        cost=cost,
    )


def mask_bound(config: RunConfig) -> int | None:
    """The staleness beyond which tokens are masked; None: the queue's own bound suffices."""
    return config.queue.max_staleness if config.queue.on_straggler == "mask" else None


def update(models: Models, batch: Batch, algorithm: Algorithm, config: RunConfig, kl_coef: float = 0.0) -> Updated:
    """Train on ``batch``. ``kl_coef`` is the weight of the KL to the reference in this step.

    Raises RewardsMissing if no row has a reward, and TrainingDiverged naming the step and the batch's groups when a
    number is not finite; no weight of that model has changed in the mini-batch that failed.
    """
    require_rewards(batch)
    data_parallel = models.data_parallel
    minis = [_collate(batch, mini.ranks[data_parallel.rank], models.policy.device, config) for mini in batch.plan]
    micros = [micro for mini in minis for micro in mini]
    whole = assemble(data_parallel, batch.headers, micros)
    before = precompute(models, whole, micros, algorithm)
    inputs, kl = penalised(advantage_inputs(whole, before, config), before, algorithm, config.algorithm.kl, kl_coef)
    gains = algorithm.advantage(inputs)
    gains = (gains * shaping.repeats(batch.headers, config.algorithm.shaping, config.seed, batch.step)[:, None]).float()
    corrected = None
    if algorithm.decoupled:
        corrected = algorithm.finish(algorithm.correct(before.proximal, whole.behaviour, whole.mask, whole.age))
    tally = LossSums(data_parallel)
    objective = Objective(
        whole=whole,
        precomputed=before,
        advantages=gains,
        corrected=corrected,
        algorithm=algorithm,
        config=config.algorithm,
        tally=tally,
        kl_coef=kl_coef,
        reference=models.reference if config.algorithm.kl.estimator == "full" else None,
    )
    metrics = train_minibatches(
        models, objective, critic_update(data_parallel, inputs, config.critic), batch, minis, config
    )
    target = before.proximal
    if corrected is None:
        target = tally.first_pass(micros, whole.shape)
        corrected = algorithm.correct(target, whole.behaviour, whole.mask, whole.age)
    metrics |= shaping.shaping_metrics(batch.headers, config.algorithm.shaping)
    metrics |= tally.metrics() | kl
    metrics |= correction_metrics(target, whole.behaviour, whole.mask, whole.age, corrected, algorithm.rules)
    filtered = ~shaping.trains(batch.headers, config.algorithm.shaping)
    metrics["tokens/trained"] = float(corrected.keep.sum())
    metrics["batch/token_imbalance"] = batching.token_imbalance(batch.plan, batch.headers)
    metrics["batch/work_imbalance"] = batching.cost_imbalance(batch.plan, batch.headers, models.policy.row_cost)
    return Updated(metrics, attributed(corrected, whole, filtered))


def require_rewards(batch: Batch) -> None:
    """A broken reward function must not look like a healthy run.

    Raises RewardsMissing, on every rank, with what was said of this rank's rows.
    """
    if any(header.scored and not header.baseline for header in batch.headers):
        return
    said = sorted({row.error for row in batch.rows.values() if row.error})
    raise RewardsMissing(
        f"step {batch.step}: none of the batch's {len(batch.headers)} trajectories could be scored "
        f"(reward.functions); {said[0] if said else 'see the agent workers in logs/'}"
    )


def precompute(models: Models, whole: WholeBatch, micros: Sequence[MicroBatch], algorithm: Algorithm) -> Precomputed:
    """The passes without gradient. A collective."""

    def whole_batch(parts: Sequence[Tensor | None]) -> Tensor:
        return gather(models.data_parallel, micros, [part for part in parts if part is not None], whole.shape)

    before = Precomputed(proximal=whole.behaviour)
    if algorithm.decoupled or algorithm.precompute:
        outputs = [models.policy.forward(micro.tensors, algorithm.precompute) for micro in micros]
        if algorithm.decoupled:
            before = replace(before, proximal=whole_batch([o.logprobs for o in outputs]))
        if "sum_squares" in algorithm.precompute:
            before = replace(before, sum_squares=whole_batch([o.sum_squares for o in outputs]))
        if "values" in algorithm.precompute:
            before = replace(before, values=whole_batch([o.values for o in outputs]))
    if models.reference is not None and "distribution" not in algorithm.train_outputs:
        before = replace(before, reference=whole_batch([models.reference.forward(m.tensors).logprobs for m in micros]))
    if models.critic is not None:
        before = replace(before, values=whole_batch([models.critic.forward(m.tensors).values for m in micros]))
    return before


def advantage_inputs(whole: WholeBatch, before: Precomputed, config: RunConfig) -> AdvantageInputs:
    """The batch as an advantage estimator sees it."""
    headers = whole.headers
    outcomes = shaping.rewards(headers, config.algorithm.shaping)
    turn_rewards = whole.turn_rewards.double() / shaping.divisor(headers, config.algorithm.shaping)
    rewards = outcomes + turn_rewards.sum(1)
    weights = {term.name: term.weight for term in config.reward.functions}
    options = config.algorithm.advantage_options
    baselines, compared = greedy_baselines(headers, rewards)
    return AdvantageInputs(
        rewards=rewards,
        token_rewards=turn_rewards + on_last_token(outcomes, whole.mask),
        mask=whole.mask,
        groups=torch.tensor([h.group_id for h in headers]),
        scored=torch.tensor([h.scored and not h.baseline for h in headers]) & compared,
        baselines=baselines,
        row_weights=whole.row_weights,
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
    )


def penalised(
    x: AdvantageInputs, before: Precomputed, algorithm: Algorithm, kl: KlConfig, coef: float
) -> tuple[AdvantageInputs, dict[str, float]]:
    """With ``kl.place=reward``, every token's reward less coef * KL(pi_old || reference), and the mean of that KL."""
    if kl.place != "reward" or before.reference is None:
        return x, {}
    penalty = torch.where(x.mask, algorithm.kl(before.proximal.double(), before.reference.double()), 0.0)
    mean = penalty.sum().item() / max(int(x.mask.sum()), 1)
    rewards = x.rewards - coef * penalty.sum(1)
    return replace(x, rewards=rewards, token_rewards=x.token_rewards - coef * penalty), {"loss/kl_reference": mean}


def greedy_baselines(headers: Sequence[TrajectoryHeader], rewards: Tensor) -> tuple[Tensor | None, Tensor]:
    """The greedy episode's reward of each row's group, [N], and whether there is one; None and true if nobody asked."""
    pairs = zip(headers, rewards.tolist(), strict=True)
    greedy = {h.group_id: reward for h, reward in pairs if h.baseline and h.scored}
    if not any(h.baseline for h in headers):
        return None, torch.ones(len(headers), dtype=torch.bool)
    found = torch.tensor([h.group_id in greedy for h in headers])
    return torch.tensor([greedy.get(h.group_id, 0.0) for h in headers], dtype=torch.float64), found


def train_minibatches(
    models: Models,
    objective: Objective,
    learns: CriticUpdate | None,
    batch: Batch,
    minis: Sequence[Sequence[MicroBatch]],
    config: RunConfig,
) -> dict[str, float]:
    """Every epoch's optimizer steps. Returns the loss, summed over cells, and the gradient norm, as means, and what
    the critic learned."""
    train_policy = _observe if config.critic and batch.step < config.critic.warmup_steps else _step
    losses, norms = torch.zeros(1, dtype=torch.float64), list[float]()
    for epoch in range(config.trainer.epochs):
        for number, (mini, parts) in enumerate(zip(batch.plan, minis, strict=True)):
            seed = hash((config.seed, batch.step, epoch, number))
            loss_fn = objective.minibatch(parts, mini.rows, config.rollout.max_model_len, seed)
            try:
                if learns is not None:
                    loss_fn = learns.wrap_loss(models.critic, loss_fn, parts, mini.rows)
                loss, norm = train_policy(models.policy, parts, loss_fn, objective.algorithm.train_outputs)
            except TrainingDiverged as error:
                groups = sorted({h.group_id for h in batch.headers})
                raise TrainingDiverged(
                    f"step {batch.step}, mini-batch {number} of {len(batch.plan)}, groups {groups}: {error}"
                ) from error
            losses += loss
            norms.append(norm)
    losses -= learns.shared_loss() if learns else 0.0
    models.data_parallel.all_reduce(losses)
    metrics = {"loss/policy": losses.item() / len(norms), "loss/grad_norm": sum(norms) / len(norms)}
    return metrics | (learns.metrics() if learns else {})


def _step(
    policy: Backend, parts: Sequence[MicroBatch], loss_fn: LossFn, requested: frozenset[OutputName]
) -> tuple[float, float]:
    return policy.step([part.tensors for part in parts], loss_fn, requested)


def _observe(
    policy: Backend, parts: Sequence[MicroBatch], loss_fn: LossFn, requested: frozenset[OutputName]
) -> tuple[float, float]:
    """The loss that ``_step`` would have stepped on, while only the critic trains."""
    outputs = (policy.forward(part.tensors, requested) for part in parts)
    return sum(loss_fn(number, out).item() for number, out in enumerate(outputs)), 0.0


def on_last_token(rows: Tensor, mask: Tensor) -> Tensor:
    """Each row's number [N] on the last token that its mask [N, T] is true for, 0 elsewhere."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rows[:, None], 0.0)


def _collate(batch: Batch, parts: Sequence[list[int]], device: str, config: RunConfig) -> list[MicroBatch]:
    keys = row_keys(batch.headers)
    trains = shaping.trains(batch.headers, config.algorithm.shaping)
    micros = []
    for rows in parts:
        tensors = batching.empty_tensors(device)
        if rows:
            tensors = batching.collate(
                [batch.rows[keys[i]] for i in rows], step=batch.step, max_staleness=mask_bound(config), device=device
            )
            tensors.mask &= trains[rows].to(device)[:, None]
        micros.append(MicroBatch(rows, tensors))
    return micros
