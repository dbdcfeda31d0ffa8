"""The policy's loss on a mini-batch, micro-batch by micro-batch, and the sums that it keeps on the way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.trainer.algorithms.aggregation import count
from rl_async.trainer.algorithms.algorithm import Algorithm
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.losses import LossInputs, SelectInputs
from rl_async.trainer.algorithms.rows import Rows
from rl_async.trainer.backends.interface import LossFn, Outputs, Reference
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.step.whole_batch import MicroBatch, WholeBatch, gather

SUMS = ("kl", "entropy", "clipped", "tokens", "routed", "agreed")


@dataclass(frozen=True)
class Precomputed:
    """Results of the passes without gradient, on the host, [M]."""

    proximal: Tensor  # log pi_old; log mu when bypassed
    reference: Tensor | None = None
    values: Tensor | None = None  # the critic's
    sum_squares: Tensor | None = None  # sum of pi_old^2 over the vocabulary


@dataclass
class LossSums:
    """Sums over the tokens that this data-parallel rank trains, and log pi_theta of the first pass over each row.

    Sums stay on the device until ``metrics`` reads them: reading one per micro-batch would wait for the device.
    """

    ranks: DataParallel
    sums: dict[str, Tensor] = field(default_factory=dict)  # float64 scalars
    first: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # rows -> [B, T-1]
    routed: set[tuple[int, ...]] = field(default_factory=set)  # rows whose agreement was added

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the values of the tokens where ``mask`` is true."""
        value = torch.where(mask, values.detach().double(), 0.0).sum()
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_routes(self, micro: MicroBatch, outputs: Outputs) -> None:
        """Add how many tokens' experts were replayed, and the share of layers that would have chosen the same, in the
        first pass over each row of the step."""
        experts, agreement = micro.tensors.experts, outputs.agreement
        if experts is None or agreement is None or tuple(micro.rows) in self.routed:
            return
        self.routed.add(tuple(micro.rows))
        recorded = micro.tensors.mask & (experts[:, :-1, 0, 0] >= 0).to(agreement.device)
        self.add("routed", torch.ones_like(agreement), recorded)
        self.add("agreed", agreement, recorded)

    def first_pass(self, micros: Sequence[MicroBatch], rows: Rows) -> Tensor:
        """Gather log pi_theta [M] as it was when each token's mini-batch was first trained. A collective."""
        return gather(self.ranks, micros, [self.first[tuple(micro.rows)] for micro in micros], rows)

    def metrics(self) -> dict[str, float]:
        """Average over the tokens of all ranks. A collective."""
        zero = torch.zeros((), dtype=torch.float64)
        totals = torch.stack([self.sums.get(name, zero).cpu() for name in SUMS])
        self.ranks.all_reduce(totals)
        kl, entropy, clipped, tokens, routed, agreed = totals.tolist()
        metrics = {
            "loss/kl_reference": kl / max(tokens, 1),
            "loss/entropy": entropy / max(tokens, 1),
            "loss/clip_fraction": clipped / max(tokens, 1),
        }
        return metrics | ({"router/agreement": agreed / routed} if routed else {})


@dataclass(frozen=True)
class Objective:
    """The policy's loss on any mini-batch of a step."""

    whole: WholeBatch
    precomputed: Precomputed
    advantages: Tensor  # float32 [M]
    corrected: Corrected | None  # None: bypassed, so decided from log pi_theta in the loss
    algorithm: Algorithm
    config: AlgorithmConfig
    sums: LossSums
    kl_coef: float = 0.0
    reference: Reference | None = None  # gives whole distributions during the loss, micro-batch by micro-batch

    def minibatch(self, parts: Sequence[MicroBatch], rows: Sequence[int], width: int, seed: int) -> LossFn:
        """Make the loss of this rank's ``parts`` of the mini-batch ``rows`` (of all ranks).

        Args:
            width: tokens of the longest possible response, for seq-mean-token-sum-norm.
            seed: of this mini-batch, for losses that draw tokens.
        """
        whole, row_weights = self.whole, self.whole.row_weights
        mask = whole.mask if self.corrected is None else self.corrected.keep
        positions = whole.rows.positions(rows)
        counts = count(mask[positions], row_weights[rows], width)
        selected = self._select(mask[positions], positions, Rows(whole.rows.lengths[rows]), seed)

        def loss_fn(number: int, outputs: Outputs) -> Tensor:
            micro, logprobs = parts[number], outputs.logprobs
            assert logprobs is not None
            self.sums.first.setdefault(tuple(micro.rows), logprobs.detach())
            self.sums.add_routes(micro, outputs)
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
            per_token = self.algorithm.loss.per_token(inputs) + self._regularisation(micro, outputs, inputs)
            self._count(inputs)
            weights = row_weights[micro.rows].to(logprobs) if micro.rows else torch.ones(1).to(logprobs)
            return self.algorithm.aggregate(per_token, inputs.mask, weights, counts)

        return loss_fn

    def _select(self, mask: Tensor, positions: Tensor, rows: Rows, seed: int) -> Tensor | None:
        """Let the loss pick tokens of the mini-batch, whose ``positions`` these are, as a mask over the batch [M]."""
        if self.algorithm.loss.select is None:
            return None
        selected = torch.zeros_like(self.whole.mask)
        selected[positions] = self.algorithm.loss.select(
            SelectInputs(
                proximal=self.precomputed.proximal[positions],
                behaviour=self.whole.behaviour[positions],
                advantages=self.advantages[positions],
                mask=mask & self.whole.free[positions],
                options=self.config,
                seed=seed,
                rows=rows,
            )
        )
        return selected

    def _corrected(self, micro: MicroBatch, logprobs: Tensor) -> Corrected:
        """Cut the batch's correction for this micro-batch, or with bypass correct by the policy as it is now."""
        if self.corrected is None:
            weights = self.whole.grammar_weights
            behaviour, age, free = (micro.cut(x) for x in (self.whole.behaviour, self.whole.age, self.whole.free))
            corrected = self.algorithm.correct(logprobs, behaviour, micro.tensors.mask, age, free)
            return corrected.times(None if weights is None else micro.cut(weights))
        return Corrected(
            *(micro.cut(part) for part in (self.corrected.weights, self.corrected.keep, self.corrected.rule))
        )

    def _regularisation(self, micro: MicroBatch, outputs: Outputs, inputs: LossInputs) -> Tensor:
        """KL to the reference and entropy bonus per token, [B, T]."""
        total = torch.zeros_like(inputs.logprobs)
        kl = self._kl(micro, outputs, inputs)
        if kl is not None:
            self.sums.add("kl", kl, inputs.mask)
            total = total + self.kl_coef * kl
        if outputs.entropy is not None:
            self.sums.add("entropy", outputs.entropy, inputs.mask)
            total = total - self.config.entropy_coef * outputs.entropy
        return total

    def _kl(self, micro: MicroBatch, outputs: Outputs, inputs: LossInputs) -> Tensor | None:
        """KL to the reference [B, T] if the loss has such a term.

        An estimate from the sampled token is weighed where a grammar's mask chose among fewer; a whole distribution has
        nothing to weigh.
        """
        if self.config.kl.place == "reward":
            return None
        if self.reference is not None:
            reference = self.reference.forward(micro.tensors, frozenset({"distribution"})).distribution
            assert outputs.distribution is not None and reference is not None
            return self.algorithm.kl(outputs.distribution, reference)
        if self.precomputed.reference is None:
            return None
        reference = torch.where(inputs.mask, micro.cut(self.precomputed.reference), 0.0)
        kl, weights = self.algorithm.kl(inputs.logprobs, reference), self.whole.grammar_weights
        return kl if weights is None else kl * micro.cut(weights)

    def _count(self, x: LossInputs) -> None:
        self.sums.add("clipped", x.clipped, x.mask)
        self.sums.add("tokens", torch.ones_like(x.logprobs), x.mask)
