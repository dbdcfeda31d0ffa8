"""The critic's part in a trainer step: what its optimizer follows, its targets, its loss and its metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import CriticConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged
from rl_async.trainer.algorithms.advantages import AdvantageInputs
from rl_async.trainer.algorithms.aggregation import count, token_mean
from rl_async.trainer.algorithms.rows import Rows, on_tokens
from rl_async.trainer.algorithms.values import explained_variance, gae, value_loss
from rl_async.trainer.backends.interface import Backend, LossFn, Outputs
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.step.whole_batch import MicroBatch


def policy_training(config: RunConfig) -> TrainerConfig:
    """Return the policy's optimizer settings: its schedule leaves out the steps in which only the critic trains."""
    waits = config.critic.warmup_steps if config.critic else 0
    return msgspec.structs.replace(config.trainer, steps=config.trainer.steps - waits)


def critic_training(trainer: TrainerConfig, critic: CriticConfig) -> TrainerConfig:
    """Return the optimizer settings of a critic with a model of its own, all of whose weights train."""
    return msgspec.structs.replace(
        trainer,
        learning_rate=critic.learning_rate,
        schedule=critic.schedule,
        warmup_steps=critic.lr_warmup_steps,
        grad_clip=critic.grad_clip,
        lora=None,
    )


@dataclass
class CriticUpdate:
    """What the critic learns from a batch, [M], and the losses of this rank's mini-batches.

    Every sampled token of a scored row has a target, also those that the correction takes from the policy.
    """

    ranks: DataParallel
    config: CriticConfig
    values: Tensor  # float32, before the step
    returns: Tensor  # float32
    mask: Tensor
    rows: Rows
    losses: list[Tensor] = field(default_factory=list)  # of this rank, by micro-batch; on the device
    norms: list[float] = field(default_factory=list)  # by mini-batch; none when shared
    minibatches: int = 0

    def wrap_loss(
        self, critic: Backend | None, policy_loss: LossFn, parts: Sequence[MicroBatch], rows: Sequence[int]
    ) -> LossFn:
        """Train on this rank's ``parts`` of the mini-batch ``rows``. Returns the loss for the policy's model.

        A critic of its own takes its optimizer step here; a shared one adds its loss to the policy's. Raises
        TrainingDiverged, before the critic's weights change.
        """
        loss_fn = self._minibatch(parts, rows)
        self.minibatches += 1
        if critic is None:
            return lambda number, outputs: (
                policy_loss(number, outputs) + self.config.value_coef * loss_fn(number, outputs)
            )
        try:
            _, norm = critic.step([part.tensors for part in parts], loss_fn)
        except TrainingDiverged as error:
            raise TrainingDiverged(f"critic: {error}") from error
        self.norms.append(norm)
        return policy_loss

    def _minibatch(self, parts: Sequence[MicroBatch], rows: Sequence[int]) -> LossFn:
        """Make the value loss: a mean over the mini-batch's tokens of all ranks, whatever the policy's aggregation."""
        counts = count(self.mask[self.rows.positions(rows)], torch.ones(len(rows)), width=1)

        def loss_fn(number: int, outputs: Outputs) -> Tensor:
            micro, values = parts[number], outputs.values
            assert values is not None, "a critic gives values"
            per_token = value_loss(values, micro.cut(self.values), micro.cut(self.returns), self.config.clip)
            loss = token_mean(per_token, micro.cut(self.mask), torch.ones(len(values)), counts)
            self.losses.append(loss.detach())
            return loss

        return loss_fn

    def _total(self) -> float:
        return sum(torch.stack(self.losses).tolist()) if self.losses else 0.0

    def shared_loss(self) -> float:
        """The part of this rank's policy losses that is the critic's."""
        return self.config.value_coef * self._total() if self.config.shared else 0.0

    def metrics(self) -> dict[str, float]:
        """Summarise the step, equal on all ranks. A collective. A shared critic's gradient is in loss/grad_norm."""
        losses = torch.tensor([self._total()], dtype=torch.float64)
        self.ranks.all_reduce(losses)
        tokens = max(int(self.mask.sum()), 1)
        metrics = {
            "critic/loss": losses.item() / self.minibatches,
            "critic/explained_variance": explained_variance(self.values, self.returns, self.mask),
            "critic/values_mean": torch.where(self.mask, self.values, 0.0).sum().item() / tokens,
            "critic/returns_mean": torch.where(self.mask, self.returns, 0.0).sum().item() / tokens,
        }
        if self.norms:
            metrics["critic/grad_norm"] = sum(self.norms) / len(self.norms)
        return metrics


def critic_update(ranks: DataParallel, x: AdvantageInputs, config: CriticConfig | None) -> CriticUpdate | None:
    """Take the batch's returns as targets for the values that the critic gave before the step; None without one."""
    if config is None:
        return None
    assert x.values is not None and x.rows is not None
    mask = x.mask & on_tokens(x.scored, x.rows)
    _, returns = gae(x.token_rewards, x.values, mask, x.options.gamma, x.options.lam, x.bootstrap, x.rows)
    return CriticUpdate(ranks, config, x.values.to(torch.float32), returns.to(torch.float32), mask, x.rows)
