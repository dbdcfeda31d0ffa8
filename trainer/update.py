"""One trainer step on one batch.

    precompute   forward passes without gradient, of policy, reference, teacher and critic -> whole-batch tensors
    advantages   advantages and correction, pure functions of the whole batch
    train        epochs of mini-batches: the objective on each micro-batch, cut out of the whole batch, and the critic's

``update`` runs them in this order. ``Objective`` is the policy's loss on a mini-batch, micro-batch by micro-batch;
``LossSums`` are the sums that it keeps on the way.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import RULES, AlgorithmConfig, KlConfig, TeacherConfig, advantage_needs
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RewardsMissing, TrainingDiverged
from rl_async.messages import Trajectory, TrajectoryHeader, episode_rewards
from rl_async.trainer.actor_critic import CriticUpdate, Models, critic_update, model_flops
from rl_async.trainer.algorithms import advantages as shaping
from rl_async.trainer.algorithms.advantages import AdvantageInputs, Groups
from rl_async.trainer.algorithms.algorithm import Algorithm
from rl_async.trainer.algorithms.correction import LOG_RATIO_LIMIT, Corrected, correction_metrics
from rl_async.trainer.algorithms.losses import LossInputs, SelectInputs, count, high_entropy, near_policy
from rl_async.trainer.backend import LossFn, Outputs, Reference
from rl_async.trainer.batch_layout import Shown, TowerCost, cost_imbalance, mask_bound, token_imbalance
from rl_async.trainer.batches import Batch, MicroBatch, WholeBatch, assemble, gather
from rl_async.trainer.packing import Rows, collate, empty_tensors, lay_images, on_tokens, row_sums
from rl_async.trainer.ranks import DataParallel
from rl_async.trainer.records import TokenOutcomes
from rl_async.trainer.teacher import Answer, Teachers

log = logging.getLogger("rl_async.trainer")
# Called before each micro-batch with the pass, and how many of its micro-batches are done, of how many.
OnMicroBatch = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Updated:
    """Metrics of the step, equal on all ranks, and the outcome of each token of the batch with its reason."""

    metrics: dict[str, float]
    tokens: TokenOutcomes


def update(
    models: Models,
    batch: Batch,
    algorithm: Algorithm,
    config: RunConfig,
    kl_coef: float = 0.0,
    on_micro_batch: OnMicroBatch = lambda work, done, total: None,
) -> Updated:
    """Train on ``batch``. ``kl_coef`` is the weight of the KL to the reference in this step.

    Raises RewardsMissing if no episode has a reward, and TrainingDiverged naming the step and the batch's groups when a
    number is not finite; in the mini-batch that failed, no weight of that model has changed.
    """
    if config.algorithm.uses_rewards:
        require_rewards(batch)
    headers, options, ranks = batch.headers, config.algorithm.shaping, models.policy.data_parallel
    row_cost = models.row_cost
    trains = shaping.trainable_rows(headers, options)
    needs = advantage_needs(config.algorithm.advantage)
    whole = assemble(ranks, batch, mask_bound(config), trains, with_states="states" in needs)
    payloads = {i: batch.rows[headers[i].key] for mini in batch.plan for rows in mini.ranks[ranks.rank] for i in rows}
    minis = [
        [micro_batch(rows, payloads, batch.media, whole, models) for rows in mini.ranks[ranks.rank]]
        for mini in batch.plan
    ]
    micros = [micro for mini in minis for micro in mini]
    # The weight of a token that was sampled under a grammar's mask needs log pi_old in any algorithm.
    recomputes = algorithm.decoupled or bool(whole.constrained.any())
    trains_policy = config.critic is None or batch.step >= config.critic.warmup_steps

    sums = LossSums(ranks)
    before = precompute(models, whole, micros, algorithm, sums, recomputes, on_micro_batch)
    whole = whole.without_masks(before.proximal)
    corrected = None
    if algorithm.decoupled:
        corrected = corrected_batch(algorithm, before.proximal, whole)
    inputs = advantage_inputs(whole, before, corrected, config)
    inputs, kl = penalised(
        inputs, whole.players, before, algorithm, config.algorithm.kl, kl_coef, whole.grammar_weights
    )
    advantages = (
        algorithm.advantage(inputs) if config.algorithm.uses_rewards else torch.zeros_like(inputs.token_rewards)
    )
    advantages, taught = taught_advantages(advantages, whole, before, config.algorithm.teacher)
    repeats = shaping.row_repeats(headers, options, config.seed, batch.step)
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
        reference=models.reference if algorithm.whole_reference else None,
        teachers=models.teachers if algorithm.divergence is not None else None,
    )
    outcomes = torch.tensor([h.reward for h in headers], dtype=torch.float64)
    critic = critic_update(ranks, inputs, config.critic, outcomes)
    metrics = train_minibatches(models, objective, critic, batch, minis, config, trains_policy, on_micro_batch)

    target = before.proximal
    if corrected is None:
        # With bypass, the correction is by log pi_theta as it was when each token's mini-batch was first trained.
        target = gather(ranks, micros, [sums.first[tuple(micro.rows)] for micro in micros], whole.rows)
        corrected = corrected_batch(algorithm, target, whole)
    metrics |= shaping.shaping_metrics(headers, options)
    metrics |= sums.metrics() | kl | taught
    metrics |= correction_metrics(
        target, whole.behaviour, whole.free, whole.age, corrected, algorithm.rules, whole.rows
    )
    metrics |= grammar_metrics(whole)
    metrics["tokens/trained"] = float(corrected.keep.sum())
    metrics["batch/token_imbalance"] = token_imbalance(batch.plan, headers, row_cost)
    metrics["batch/work_imbalance"] = cost_imbalance(batch.plan, headers, row_cost)
    metrics["batch/shared_tokens"] = shared_tokens(ranks, micros)
    metrics["compute/model_flops"] = model_flops(
        models,
        batch,
        images_shown(ranks, micros, row_cost.tower),
        epochs=config.trainer.epochs,
        trains_policy=trains_policy,
        recomputes=bool(algorithm.precompute) or recomputes,
    )
    return Updated(metrics, TokenOutcomes(whole.rows, attributed(corrected, whole, ~trains), target, advantages))


def require_rewards(batch: Batch) -> None:
    """Raise RewardsMissing, on every rank, if no episode was scored: a broken reward function must not look healthy.

    The message quotes the error of one of this rank's rows.
    """
    if episode_rewards(header for header in batch.headers if not header.baseline):
        return
    reported = sorted({row.error for row in batch.rows.values() if row.error})
    raise RewardsMissing(
        f"step {batch.step}: none of the episodes of the batch's {len(batch.headers)} trajectories could be scored "
        f"(reward.functions); {reported[0] if reported else 'see the agent workers in logs/'}"
    )


def micro_batch(
    rows: list[int], payloads: Mapping[int, Trajectory], media: Mapping[str, bytes], whole: WholeBatch, models: Models
) -> MicroBatch:
    """Put the tensors of some of this rank's rows on the device: what a model reads, and the mask.

    Raises DataError if a row has ``media`` that the policy cannot read.
    """
    device, tensors = models.policy.device, empty_tensors(models.policy.device)
    if not rows:
        readings = {} if models.teachers is None else models.teachers.read([], tensors)
        return MicroBatch(rows, tensors, whole.rows, readings)
    own = [payloads[i] for i in rows]
    tensors = collate(
        own,
        device=device,
        mask=whole.rows.pad(whole.mask, rows, max(max(len(row.token_ids) for row in own) - 1, 1)),
        share_prefixes=models.row_cost.shares_prefixes,
        replay_routers=models.policy.replays_routers,
        images=lay_images(own, media, models.policy.pictures, device),
    )
    # Every pass of the step reads the same.
    tensors.packings = {}
    if models.policy.replays_routers and tensors.experts is None:
        warn_unrecorded()
    readings = {} if models.teachers is None else models.teachers.read(own, tensors)
    return MicroBatch(rows, tensors, whole.rows, readings)


@functools.cache
def warn_unrecorded() -> None:
    """Warn, once per process, that rows of a mixture of experts came without a record of its routers."""
    log.warning(
        "rows do not say which experts the engine chose, so the trainer's routers choose again, perhaps others; see "
        "trainer.router_replay"
    )


# --- Passes without gradient


SUMS = (
    "kl",
    "entropy",
    "clipped",
    "tokens",
    "routed",
    "agreed",
    "distance",
    "taught",
    "masked",
    "surprise",
    "imitated",
    "unforeseen",
    "observed",
)


@dataclass
class LossSums:
    """Sums over the tokens that this data-parallel rank trains, and log pi_theta of the first pass over each row.

    Sums, float64 scalars, stay on the device until ``metrics`` reads them: reading one per micro-batch would wait for
    the device. ``first`` maps a micro-batch's rows to log pi_theta [B, T-1] of its first training pass; ``routed``
    are the micro-batches whose agreement was added.
    """

    ranks: DataParallel
    sums: dict[str, Tensor] = field(default_factory=dict)
    first: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    routed: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the values of the tokens where ``mask`` is true."""
        value = torch.where(mask, values.detach().double(), 0.0).sum()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_routes(self, micro: MicroBatch, outputs: Outputs) -> None:
        """Add the number of tokens whose experts were replayed, and the share of layers that agree with the record.

        Only the first pass over each row of the step counts.
        """
        recorded, agreement = micro.recorded, outputs.agreement
        if recorded is None or agreement is None or tuple(micro.rows) in self.routed:
            return
        self.routed.add(tuple(micro.rows))
        self.add("routed", torch.ones_like(agreement), recorded)
        self.add("agreed", agreement, recorded)

    def metrics(self) -> dict[str, float]:
        """Average over the tokens of all ranks. A collective."""
        zero = torch.zeros((), dtype=torch.float64)
        totals = torch.stack([self.sums.get(name, zero).cpu() for name in SUMS])
        self.ranks.all_reduce(totals)
        kl, entropy, clipped, tokens, routed, agreed, distance, taught, masked, *means = totals.tolist()
        surprise, imitated, unforeseen, observed = means
        metrics = {
            "loss/kl_reference": kl / max(tokens, 1),
            "loss/entropy": entropy / max(tokens, 1),
            "loss/clip_fraction": clipped / max(tokens, 1),
        }
        metrics |= {"loss/kl_teacher": distance / taught} if taught else {}
        metrics |= {"loss/imitation": surprise / imitated} if imitated else {}
        metrics |= {"loss/observations": unforeseen / observed} if observed else {}
        metrics |= {"loss/masked_fraction": masked / max(tokens, 1)} if "masked" in self.sums else {}
        return metrics | ({"router/agreement": agreed / routed} if routed else {})


@dataclass(frozen=True)
class Precomputed:
    """Results of the passes without gradient, on the host, [M].

    ``proximal`` is log pi_old, or log mu when bypassed; ``values`` are the critic's, and ``process`` are
    log-probabilities by a process reward model in its place; ``sum_squares`` is the sum of
    pi_old^2 over the vocabulary, and ``entropy`` that of pi_old. ``reference`` and ``teacher`` are log-probabilities
    by these models, the latter infinite in rows without a teacher. ``told``, by the rows of this rank's micro-batches,
    is what servers of teachers answered.
    """

    proximal: Tensor
    reference: Tensor | None = None
    teacher: Tensor | None = None
    process: Tensor | None = None
    values: Tensor | None = None
    sum_squares: Tensor | None = None
    entropy: Tensor | None = None
    told: Mapping[tuple[int, ...], Mapping[str, Answer]] = field(default_factory=dict)


def precompute(
    models: Models,
    whole: WholeBatch,
    micros: Sequence[MicroBatch],
    algorithm: Algorithm,
    sums: LossSums,
    recomputes: bool,
    on_micro_batch: OnMicroBatch,
) -> Precomputed:
    """Run the forward passes without gradient that the algorithm asks for. A collective.

    ``sums`` count the experts that were replayed. ``recomputes`` says whether log pi_old is needed.
    """

    def whole_batch(parts: Sequence[Tensor | None]) -> Tensor:
        return gather(sums.ranks, micros, [part for part in parts if part is not None], whole.rows)

    def passed_by(work: str) -> Iterator[MicroBatch]:
        for done, micro in enumerate(micros):
            on_micro_batch(work, done, len(micros))
            yield micro

    def scored(model: Reference, work: str) -> Tensor:
        return whole_batch([model.forward(micro.tensors).logprobs for micro in passed_by(work)])

    found = Precomputed(proximal=whole.behaviour)
    if algorithm.precompute or recomputes:
        work = "log-probabilities before the update"
        outputs = [models.policy.forward(micro.tensors, algorithm.precompute) for micro in passed_by(work)]
        for micro, output in zip(micros, outputs, strict=True):
            sums.add_routes(micro, output)
        if recomputes:
            passed = whole_batch([o.logprobs for o in outputs])
            bypassed = torch.where(whole.constrained, passed, whole.behaviour)
            found = replace(found, proximal=passed if algorithm.decoupled else bypassed)
        if "sum_squares" in algorithm.precompute:
            found = replace(found, sum_squares=whole_batch([o.sum_squares for o in outputs]))
        if "entropy" in algorithm.precompute:
            found = replace(found, entropy=whole_batch([o.entropy for o in outputs]))
        if "values" in algorithm.precompute:
            found = replace(found, values=whole_batch([o.values for o in outputs]))
    if models.reference is not None and not algorithm.whole_reference:
        found = replace(found, reference=scored(models.reference, "log-probabilities of the reference"))
    if (teachers := models.teachers) is not None:
        told = {tuple(micro.rows): answers for micro, answers in zip(micros, teachers.ask(micros), strict=True)}
        found = replace(found, told=told)
        if algorithm.divergence is None:
            passes = passed_by("log-probabilities of the teacher")
            found = replace(
                found, teacher=whole_batch([teachers.logprobs(micro, told[tuple(micro.rows)]) for micro in passes])
            )
    if models.critic is not None and algorithm.process:
        found = replace(found, process=scored(models.critic, "log-probabilities of the process reward model"))
    elif models.critic is not None:
        values = [models.critic.forward(micro.tensors).values for micro in passed_by("values of the critic")]
        found = replace(found, values=whole_batch(values))
    return found


# --- Correction and advantages


def corrected_batch(algorithm: Algorithm, target: Tensor, whole: WholeBatch) -> Corrected:
    """Correct the whole batch, and multiply in the weights of tokens sampled under a grammar's mask."""
    corrected = algorithm.correct(target, whole.behaviour, whole.mask, whole.age, whole.free, whole.rows)
    return corrected.times(whole.grammar_weights)


def attributed(corrected: Corrected, whole: WholeBatch, filtered: Tensor) -> Corrected:
    """Complete a correction [M]: every sampled token that does not train names a rule and has weight 0.

    ``filtered``, bool [N], are the rows that overlong_filter took out. Any other token that the correction never saw
    was masked by the queue's bound.
    """
    greedy = torch.tensor([h.baseline for h in whole.headers])
    cause = torch.full_like(corrected.rule, RULES.index("max_staleness"))
    cause[on_tokens(filtered, whole.rows)] = RULES.index("overlong_filter")
    cause[on_tokens(greedy, whole.rows)] = RULES.index("greedy")
    cause[whole.mask] = RULES.index("correction")
    unnamed = ~corrected.keep & (corrected.rule == 0)
    weights = torch.where(corrected.keep, corrected.weights, 0.0)
    return Corrected(weights, corrected.keep, torch.where(unnamed, cause, corrected.rule))


def advantage_inputs(
    whole: WholeBatch, before: Precomputed, corrected: Corrected | None, config: RunConfig
) -> AdvantageInputs:
    """Shape the batch's rewards and collect the inputs of an advantage estimator."""
    headers = whole.headers
    outcomes = shaping.shaped_rewards(headers, config.algorithm.shaping)
    turn_rewards = whole.turn_rewards.double() / shaping.reward_divisor(headers, config.algorithm.shaping)
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
        reference=None if before.reference is None else before.reference.double(),
        process=None if before.process is None else before.process.double(),
        sum_squares=None if before.sum_squares is None else before.sum_squares.double(),
        importance=None if corrected is None else torch.where(corrected.keep, corrected.weights, 0.0).double(),
        states=whole.states,
        cut=shaping.cut_rows(headers),
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

    ``players``, int64 [N], numbers the rows that share a reward; optional ``weights`` per token multiply the estimates.
    Returns the inputs, and the mean of that KL as a metric. With any other ``kl.place`` the inputs are unchanged.
    """
    if kl.place != "reward" or before.reference is None:
        return x, {}
    penalty = torch.where(x.mask, algorithm.kl(before.proximal.double(), before.reference.double()), 0.0)
    penalty = penalty if weights is None else penalty * weights
    mean = penalty.sum().item() / max(int(x.mask.sum()), 1)
    rewards = x.rewards - coef * player_sums(row_sums(penalty, x.rows), players)
    return replace(x, rewards=rewards, token_rewards=x.token_rewards - coef * penalty), {"loss/kl_reference": mean}


def taught_advantages(
    advantages: Tensor, whole: WholeBatch, before: Precomputed, config: TeacherConfig | None
) -> tuple[Tensor, dict[str, float]]:
    """Subtract coef * (log pi_old - log teacher) from every trained token's advantage [M], if a teacher scored them.

    The difference is an unbiased estimate of the token's share in KL(pi || teacher), of which this is the policy
    gradient (on-policy distillation as in MiniLLM, arXiv:2306.08543, one token ahead). It is limited to +-20, and
    multiplied by the weights of tokens that were sampled under a grammar's mask. Also returns its mean as a metric.
    """
    if config is None or before.teacher is None:
        return advantages, {}
    taught = whole.mask & (before.teacher != torch.inf)
    distance = (before.proximal - before.teacher).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    distance = distance if whole.grammar_weights is None else distance * whole.grammar_weights
    distance = torch.where(taught, distance, 0.0)
    mean = distance.sum().item() / max(int(taught.sum()), 1)
    return advantages - config.coef * distance, {"loss/kl_teacher": mean}


def player_sums(rows: Tensor, players: Tensor) -> Tensor:
    """Sum values of rows [N] over all rows of the same player, [N]."""
    return Groups.of(players, torch.ones_like(rows)).sum(rows)


def greedy_baselines(headers: Sequence[TrajectoryHeader], rewards: Tensor) -> tuple[Tensor | None, Tensor]:
    """Look up the reward of each row's role in the greedy episode of its group, [N].

    The second result, bool [N], is false for rows whose group has no scored greedy episode. A batch without greedy
    episodes has no rewards of them, and is true everywhere.
    """
    pairs = zip(headers, rewards.tolist(), strict=True)
    greedy = {(h.group_id, h.role): reward for h, reward in pairs if h.baseline and h.scored}
    if not any(h.baseline for h in headers):
        return None, torch.ones(len(headers), dtype=torch.bool)
    keys = [(h.group_id, h.role) for h in headers]
    found = torch.tensor([key in greedy for key in keys])
    return torch.tensor([greedy.get(key, 0.0) for key in keys], dtype=torch.float64), found


def on_last_token(values: Tensor, mask: Tensor, rows: Rows | None = None) -> Tensor:
    """Put each row's value [N] on its last token where ``mask`` is true, and 0 elsewhere; [N, T], or packed [M]."""
    counts = row_sums(mask, rows).long()
    found = torch.zeros(int(counts.sum()), dtype=values.dtype)
    found[counts.cumsum(0)[counts > 0] - 1] = values[counts > 0]
    return torch.zeros_like(mask, dtype=values.dtype).masked_scatter_(mask, found)


# --- The objective, and the steps on it


@dataclass(frozen=True)
class Objective:
    """The policy's loss on any mini-batch of a step.

    ``advantages`` are float32 [M]. ``corrected`` is None if old log-probabilities are bypassed: then the loss corrects
    by log pi_theta. A ``reference`` and ``teachers`` give whole distributions during the loss, micro-batch by
    micro-batch.
    """

    whole: WholeBatch
    precomputed: Precomputed
    advantages: Tensor
    corrected: Corrected | None
    algorithm: Algorithm
    config: AlgorithmConfig
    sums: LossSums
    kl_coef: float = 0.0
    reference: Reference | None = None
    teachers: Teachers | None = None

    def minibatch(self, parts: Sequence[MicroBatch], rows: Sequence[int], width: int, seed: int) -> LossFn:
        """Make the loss of this rank's ``parts`` of the mini-batch ``rows`` (of all ranks).

        Args:
            width: the length that divides with seq-mean-token-sum-norm.
            seed: of this mini-batch, for losses that draw tokens.
        """
        whole, sums, row_weights = self.whole, self.sums, self.whole.row_weights
        mask = whole.mask if self.corrected is None else self.corrected.keep
        positions = whole.rows.positions(rows)
        counts = count(mask[positions], row_weights[rows], width)
        selected, uncertain = self._chosen(mask, positions, rows, seed)
        observations, observed = self.config.observations, max(int(whole.observed[positions].sum()), 1)
        imitation, good, imitated = self.config.imitation, torch.zeros_like(whole.mask), 1
        if imitation is not None:
            by_row = torch.tensor([h.scored and h.reward > imitation.above for h in whole.headers])
            good = mask & on_tokens(by_row, whole.rows)
            imitated = max(int(good[positions].sum()), 1)
        by_loss: list[Tensor | None] = [
            *(self.precomputed.proximal, whole.behaviour, self.advantages, whole.free),
            *(selected, uncertain, whole.grammar_weights, self.precomputed.reference),
            good if imitation is not None else None,
            whole.observed if observations is not None else None,
        ]
        if self.corrected is None:
            by_loss += [whole.age]
        else:
            by_loss += [self.corrected.weights, self.corrected.keep, self.corrected.rule]
        for micro in parts:
            micro.upload([tensor for tensor in by_loss if tensor is not None], row_weights)

        def loss_fn(number: int, outputs: Outputs) -> Tensor:
            micro, logprobs = parts[number], outputs.logprobs
            assert logprobs is not None
            sums.first.setdefault(tuple(micro.rows), logprobs.detach())
            sums.add_routes(micro, outputs)
            corrected = self._corrected(micro, logprobs)
            inputs = LossInputs(
                logprobs=torch.where(corrected.keep, logprobs, 0.0),
                proximal=torch.where(corrected.keep, micro.cut(self.precomputed.proximal), 0.0),
                behaviour=torch.where(corrected.keep, micro.cut(whole.behaviour), 0.0),
                advantages=micro.cut(self.advantages),
                weights=corrected.weights,
                mask=corrected.keep,
                free=corrected.keep & micro.cut(whole.free),
                options=self.config,
                selected=None if selected is None else micro.cut(selected),
            )
            per_token, clipped = self.algorithm.loss.per_token(inputs), inputs.clipped
            if uncertain is not None or self.config.off_policy_mask is not None:
                trains = inputs.mask if uncertain is None else micro.cut(uncertain)
                if self.config.off_policy_mask is not None:
                    trains = trains & near_policy(inputs, self.config.off_policy_mask)
                per_token = torch.where(trains, per_token, 0.0)
                sums.add("masked", torch.ones_like(logprobs), inputs.mask & ~trains)
            regularisation = torch.zeros_like(inputs.logprobs)
            kl = self._kl(micro, inputs, outputs)
            if kl is not None:
                regularisation = regularisation + self.kl_coef * kl
            distance: Tensor | None = None
            if self.teachers is not None and self.config.teacher is not None:
                assert outputs.distribution is not None and self.algorithm.divergence is not None
                told = self.precomputed.told[tuple(micro.rows)]
                distance = self.teachers.divergence(micro, told, outputs.distribution, self.algorithm.divergence)
                regularisation = regularisation + self.config.teacher.coef * distance
                if not self.config.uses_rewards:
                    # Some losses have a gradient also where all advantages are 0.
                    per_token = torch.zeros_like(per_token)
            if outputs.entropy is not None:
                regularisation = regularisation - self.config.entropy_coef * outputs.entropy
            per_token = per_token + regularisation
            weights = micro.cut_rows(row_weights).to(logprobs.dtype)
            loss = self.algorithm.aggregate(per_token, inputs.mask, weights, counts)
            if imitation is not None:
                own, surprise = inputs.mask & micro.cut(good), -inputs.logprobs
                loss = loss + imitation.coef * torch.where(own, surprise, 0.0).sum() / imitated
                sums.add("surprise", surprise, own)
                sums.add("imitated", torch.ones_like(surprise), own)
            if observations is not None:
                # A pass predicts every token of a row, so that those of others cost nothing more.
                read = micro.cut(whole.observed)
                loss = loss + observations.coef * torch.where(read, -logprobs, 0.0).sum() / observed
                sums.add("unforeseen", -logprobs, read)
                sums.add("observed", torch.ones_like(logprobs), read)
            sums.add("clipped", clipped, inputs.mask)
            sums.add("tokens", torch.ones_like(logprobs), inputs.mask)
            if kl is not None:
                sums.add("kl", kl, inputs.mask)
            if outputs.entropy is not None:
                sums.add("entropy", outputs.entropy, inputs.mask)
            if distance is not None:
                sums.add("distance", distance, inputs.mask)
                sums.add("taught", torch.ones_like(distance), inputs.mask)
            return loss

        return loss_fn

    def _kl(self, micro: MicroBatch, inputs: LossInputs, outputs: Outputs) -> Tensor | None:
        """Return the KL of each token [b, t] that belongs to the loss; None if none does."""
        if self.config.kl.place == "reward":
            return None
        if self.reference is not None:
            reference = self.reference.forward(micro.tensors, frozenset({"distribution"})).distribution
            assert outputs.distribution is not None and reference is not None
            return self.algorithm.kl(outputs.distribution, reference)
        if self.precomputed.reference is None:
            return None
        kl = self.algorithm.kl(inputs.logprobs, torch.where(inputs.mask, micro.cut(self.precomputed.reference), 0.0))
        if self.config.kl.unbiased:
            kl = kl * inputs.ratio
        # An estimate from the sampled token is weighted where a grammar's mask restricted the choice. A whole
        # distribution needs no weight.
        if self.whole.grammar_weights is not None:
            kl = kl * micro.cut(self.whole.grammar_weights)
        return kl

    def _chosen(
        self, mask: Tensor, positions: Tensor, rows: Sequence[int], seed: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Choose among the tokens of a mini-batch, which are at ``positions`` and have true in ``mask``.

        Returns those that the loss selects, and those of high entropy, each bool of the whole batch; None if all are.
        """
        whole, selected, uncertain = self.whole, None, None
        if self.algorithm.loss.select is not None:
            selected = torch.zeros_like(whole.mask)
            selected[positions] = self.algorithm.loss.select(
                SelectInputs(
                    proximal=self.precomputed.proximal[positions],
                    behaviour=whole.behaviour[positions],
                    advantages=self.advantages[positions],
                    mask=mask[positions] & whole.free[positions],
                    options=self.config,
                    seed=seed,
                    rows=Rows(whole.rows.lengths[rows]),
                )
            )
        if self.precomputed.entropy is not None:
            uncertain = torch.zeros_like(whole.mask)
            uncertain[positions] = high_entropy(
                self.precomputed.entropy[positions], mask[positions], self.config.top_entropy
            )
        return selected, uncertain

    def _corrected(self, micro: MicroBatch, logprobs: Tensor) -> Corrected:
        """Cut this micro-batch's part of the correction, or with bypass correct by the policy as it is now."""
        if self.corrected is None:
            weights = self.whole.grammar_weights
            behaviour, age, free = (micro.cut(x) for x in (self.whole.behaviour, self.whole.age, self.whole.free))
            corrected = self.algorithm.correct(logprobs, behaviour, micro.tensors.mask, age, free)
            return corrected.times(None if weights is None else micro.cut(weights))
        return Corrected(
            *(micro.cut(part) for part in (self.corrected.weights, self.corrected.keep, self.corrected.rule))
        )


def train_minibatches(
    models: Models,
    objective: Objective,
    critic: CriticUpdate | None,
    batch: Batch,
    minis: Sequence[Sequence[MicroBatch]],
    config: RunConfig,
    trains_policy: bool,
    on_micro_batch: OnMicroBatch,
) -> dict[str, float]:
    """Take every epoch's optimizer steps.

    Returns the mean loss (summed over ranks) and gradient norm per mini-batch, and the critic's metrics.
    """
    requested = objective.algorithm.train_outputs
    losses, norms = torch.zeros(1, dtype=torch.float64), list[float]()
    done, total = 0, config.trainer.epochs * sum(map(len, minis))
    for epoch in range(config.trainer.epochs):
        for number, (mini, parts) in enumerate(zip(batch.plan, minis, strict=True)):
            seed = hash((config.seed, batch.step, epoch, number))
            width = config.algorithm.norm_length or config.rollout.max_model_len
            loss_fn = objective.minibatch(parts, mini.rows, width, seed)
            try:
                if critic is not None:
                    loss_fn = critic.wrap_loss(models.critic, loss_fn, parts, mini.rows)
                loss_fn = counted(loss_fn, functools.partial(on_micro_batch, "training"), done, total)
                if trains_policy:
                    loss, norm = models.policy.step([part.tensors for part in parts], loss_fn, requested)
                else:
                    # While only the critic trains, the loss is still computed, so that its metrics go on.
                    outputs = (models.policy.forward(part.tensors, requested) for part in parts)
                    found = [loss_fn(micro, out) for micro, out in enumerate(outputs)]
                    loss, norm = sum(torch.stack(found).tolist()), 0.0
            except TrainingDiverged as error:
                groups = sorted({h.group_id for h in batch.headers})
                raise TrainingDiverged(
                    f"step {batch.step}, mini-batch {number} of {len(batch.plan)}, groups {groups}: {error}"
                ) from error
            losses += loss
            norms.append(norm)
            done += len(parts)
    losses -= critic.shared_loss() if critic else 0.0
    models.policy.data_parallel.all_reduce(losses)
    metrics = {"loss/policy": losses.item() / len(norms), "loss/grad_norm": sum(norms) / len(norms)}
    return metrics | (critic.metrics() if critic else {})


def counted(loss_fn: LossFn, on_loss: Callable[[int, int], None], done: int, total: int) -> LossFn:
    """Return a loss that first calls ``on_loss`` with the micro-batches done before, and with their total."""

    def count_and_compute(number: int, outputs: Outputs) -> Tensor:
        on_loss(done + number, total)
        return loss_fn(number, outputs)

    return count_and_compute


# --- Metrics


def grammar_metrics(whole: WholeBatch) -> dict[str, float]:
    """Return the share of tokens that a grammar's mask restricted, and the mean of their weights.

    On-policy the weight is the probability that the policy had left to the allowed tokens. Returns nothing if no token
    was restricted.
    """
    there = whole.mask & whole.constrained
    if whole.grammar_weights is None or not there.any():
        return {}
    share, weight = there.sum() / whole.mask.sum(), whole.grammar_weights[there].mean()
    return {"constrained/share": share.item(), "constrained/weight_mean": weight.item()}


def images_shown(ranks: DataParallel, micros: Sequence[MicroBatch], tower: TowerCost | None) -> Shown:
    """Return how much the images of all ranks' micro-batches are. A collective, for models with a ``tower``."""
    if tower is None:
        return Shown()
    here = [micro.tensors.images.shown(tower.side) for micro in micros if micro.tensors.images is not None]
    sums = torch.tensor([Shown(), *here], dtype=torch.float64).sum(0)
    ranks.all_reduce(sums)
    return Shown(*map(int, sums.tolist()))


def shared_tokens(ranks: DataParallel, micros: Sequence[MicroBatch]) -> float:
    """Return the share of tokens that no pass computes, as another row of the micro-batch begins with them.

    A collective.
    """
    there = [micro.tensors for micro in micros if micro.rows]
    sums = torch.tensor([sum(x.computed for x in there), sum(int(x.lengths.sum()) for x in there)], dtype=torch.float64)
    ranks.all_reduce(sums)
    return 1.0 - (sums[0] / sums[1]).item()
