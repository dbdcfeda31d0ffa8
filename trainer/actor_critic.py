"""The models of a step, how the config makes them, what a critic learns, and how many operations their passes take.

``build_models`` loads the policy, and the reference and the critic that the algorithm needs. ``CriticUpdate`` has a
critic's targets, loss and metrics. Model FLOPs and their share of the device's peak (MFU) follow from the batch.
"""

import functools
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from rl_async.configs.derived import compute_type, reference_is_base
from rl_async.configs.schema.algorithm import CriticConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged
from rl_async.torch_shared import give_back
from rl_async.trainer.algorithms.advantages import AdvantageInputs, explained_variance, gae, value_loss
from rl_async.trainer.algorithms.losses import count, token_mean
from rl_async.trainer.algorithms.rows import Rows, on_tokens
from rl_async.trainer.backend import Backend, LossFn, Outputs, Reference
from rl_async.trainer.batch_layout import RowCost, forward_flops
from rl_async.trainer.batches import Batch, MicroBatch
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.ranks import DataParallel

log = logging.getLogger("rl_async.trainer")


class PolicyBase:
    """The policy without its adapters, which needs no memory of its own: a reference for ``trainer.lora``."""

    def __init__(self, policy: Fsdp2Backend) -> None:
        self.forward, self.row_cost = policy.forward_base, policy.row_cost

    def sleep(self) -> None:
        """Do nothing: the policy does it."""

    def wake(self) -> None:
        """Do nothing: the policy does it."""


@dataclass(frozen=True)
class Models:
    """The models of a step. A critic that shares the policy's backbone is not a model of its own."""

    policy: Backend
    reference: Reference | None = None
    critic: Backend | None = None
    whole_distributions: bool = False  # are computed of every row: [rows, length, vocabulary] in a micro-batch

    @property
    def row_cost(self) -> RowCost:
        """The policy's cost of a row. It is padded if any of the models pads rows, which then are grouped by length.
        Rows share prefixes if all models can, and if no distributions are kept, whose memory grows with the rows."""
        return replace(
            self.policy.row_cost,
            padded=any(model.row_cost.padded for model in self._all()),
            shares_prefixes=not self.whole_distributions
            and all(model.row_cost.shares_prefixes for model in self._all()),
        )

    @property
    def data_parallel(self) -> DataParallel:
        """This process's place among the data-parallel ranks, the same for all models."""
        return self.policy.data_parallel

    def trained(self) -> dict[str, Backend]:
        """Return the models whose weights change, by their folder in a checkpoint."""
        return {".": self.policy} | ({"critic": self.critic} if self.critic else {})

    def sleep(self) -> None:
        """Free the device's memory, as far as the backends can."""
        for model in self._all():
            model.sleep()
        give_back(torch.device(self.policy.device))

    def wake(self) -> None:
        """Undo ``sleep``: bring the weights back to the device."""
        for model in self._all():
            model.wake()

    def _all(self) -> list[Reference]:
        return [model for model in (self.policy, self.reference, self.critic) if model is not None]


def build_models(config: RunConfig, device: str) -> Models:
    """Load the policy, and what the algorithm needs beside it, onto ``device``. A collective.

    Raises UserError naming the key whose model cannot be loaded.
    """
    model, critic, kl = config.model, config.critic, config.algorithm.kl
    make = functools.partial(BACKENDS[config.trainer.backend](), dtype=compute_type(model), device=device)
    shared = critic is not None and critic.shared
    models = Models(make(model.path, config=policy_training(config), head="both" if shared else "policy"))
    if reference_is_base(config, experts=models.policy.replays_routers):
        # No other backend has adapters.
        assert isinstance(models.policy, Fsdp2Backend)
        models = replace(models, reference=PolicyBase(models.policy))
    elif kl.coef > 0:
        reference: Backend = make(kl.reference_path or model.path, config=config.trainer, trains=False)
        models = replace(models, reference=reference, whole_distributions=kl.estimator == "full")
    if critic is not None and not shared:
        training = critic_training(config.trainer, critic)
        models = replace(models, critic=make(critic.path or model.path, config=training, head="value"))
    return models


def _fsdp2() -> Callable[..., Backend]:
    return Fsdp2Backend


def _megatron() -> Callable[..., Backend]:
    with warnings.catch_warnings():  # at every import: it could use them, and does without
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")
        from rl_async.trainer.megatron.backend import MegatronBackend  # an optional installation
    log.info("trainer.backend=megatron: what rows begin with is computed for each of them")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    return MegatronBackend


BACKENDS = {"fsdp2": _fsdp2, "megatron": _megatron}


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


# Dense bfloat16 operations per second, by words of the name that PyTorch gives the device; the first that fits counts.
# From NVIDIA's data sheets, whose figures "with sparsity" are twice these.
BFLOAT16_PEAKS = (
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("G?H200", 989.4e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
)
BACKWARD = 2  # times the forward pass: gradients of weights and of inputs


def peak_flops(device: str, dtype: str) -> float | None:
    """Return a device's peak by its name; None if it is not known, as for CPUs and for float32."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in BFLOAT16_PEAKS if re.search(rf"\b{name}\b", device)), None)


def model_flops(models: Models, batch: Batch, *, epochs: int, trains_policy: bool, recomputes: bool) -> float:
    """Return the operations that the models' passes over the batch need, on all ranks together.

    The policy: in each epoch a forward pass, and a backward pass if it is trained; one forward pass more if its
    log-probabilities are computed before. A critic of its own: a forward pass before, and both in each epoch. A
    reference: a forward pass. Layers that are computed again for the backward pass and padding do not count (Chowdhery
    et al., arXiv:2204.02311, appendix B: MFU, not hardware utilisation), a prompt that is computed once for several
    rows counts once. ``RowCost`` has the formula of a row.
    """
    shares = models.row_cost.shares_prefixes

    def forward(model: Reference | None) -> float:
        if model is None:
            return 0.0
        return float(forward_flops(batch.plan, batch.headers, replace(model.row_cost, shares_prefixes=shares)))

    both = 1 + BACKWARD
    policy = epochs * (both if trains_policy else 1) + recomputes
    return forward(models.policy) * policy + forward(models.critic) * (1 + both * epochs) + forward(models.reference)


def compute_rates(metrics: Mapping[str, float], ranks: int, device: str, dtype: str) -> dict[str, float]:
    """Return TFLOP/s of each rank during the update, and ``compute/mfu`` if the peak of the ``device`` is known."""
    each = metrics["compute/model_flops"] / ranks / max(metrics["time/update_s"], 1e-9)
    peak = peak_flops(device, dtype)
    return {"compute/tflops_per_s": each / 1e12} | ({} if peak is None else {"compute/mfu": each / peak})


def device_name(device: str) -> str:
    """Return the name of a PyTorch device, by which its peak is known."""
    return device if device == "cpu" else torch.get_device_module(device).get_device_name(device)
