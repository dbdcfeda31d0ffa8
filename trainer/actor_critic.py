"""Policy, reference, critic and teacher: building them from the config, training the critic, and counting model FLOPs.

``build_models`` loads the policy, and the reference, critic and teacher that the algorithm needs. ``CriticUpdate``
trains a critic, or the process reward model in its place. Model FLOPs and their share of the device's peak (MFU) follow
from the batch.
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
from torch.nn.functional import binary_cross_entropy_with_logits

from rl_async.configs.derived import compute_type, reference_is_base
from rl_async.configs.schema.algorithm import CriticConfig, TeacherConfig, advantage_needs
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged, UserError
from rl_async.torch_shared import give_back
from rl_async.trainer.algorithms.advantages import AdvantageInputs, explained_variance, gae, process_rewards, value_loss
from rl_async.trainer.algorithms.losses import count, token_mean
from rl_async.trainer.backend import Backend, LossFn, Outputs, Reference
from rl_async.trainer.batch_layout import RowCost, Shown, forward_flops
from rl_async.trainer.batches import Batch, MicroBatch
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Rows, on_tokens, row_sums
from rl_async.trainer.ranks import DataParallel
from rl_async.trainer.teacher import Hints, TeacherEndpoint, Teachers, check_tokenizers

log = logging.getLogger("rl_async.trainer")


@dataclass(frozen=True)
class Models:
    """The models of a step. A critic that shares the policy's backbone is not a separate model."""

    policy: Backend
    reference: Reference | None = None
    critic: Backend | None = None
    # On-policy distillation.
    teachers: Teachers | None = None
    # Whether passes keep log-probabilities of the whole vocabulary, [rows, length, vocabulary] in a micro-batch.
    whole_distributions: bool = False

    @property
    def row_cost(self) -> RowCost:
        """The policy's cost of a row. It is that of padded rows as soon as one model pads, so that length groups them.

        Rows share prefixes only if all models support it and no whole distributions are kept, since their memory grows
        with the rows.
        """
        return replace(
            self.policy.row_cost,
            padded=any(model.row_cost.padded for model in self._all()),
            shares_prefixes=not self.whole_distributions
            and all(model.row_cost.shares_prefixes for model in self._all()),
        )

    def trained(self) -> dict[str, Backend]:
        """Return the models whose weights change, by their folder in a checkpoint."""
        return {".": self.policy} | ({"critic": self.critic} if self.critic else {})

    def sleep(self) -> None:
        """Free as much of the device's memory as the backends can."""
        for model in self._all():
            model.sleep()
        give_back(torch.device(self.policy.device))

    def wake(self) -> None:
        """Undo ``sleep``: bring the weights back to the device."""
        for model in self._all():
            model.wake()

    def _all(self) -> list[Reference]:
        loaded = self.teachers.loaded if self.teachers is not None else []
        return [model for model in (self.policy, self.reference, self.critic, *loaded) if model is not None]


def build_models(config: RunConfig, device: str) -> Models:
    """Load the policy, and the reference, critic and teacher that the algorithm needs, onto ``device``. A collective.

    Raises UserError naming the key whose model cannot be loaded.
    """
    model, critic, kl = config.model, config.critic, config.algorithm.kl
    make = _maker(config, device)
    shared = critic is not None and critic.shared
    models = Models(make(model.path, config=policy_training(config), head="both" if shared else "policy"))
    if reference_is_base(config, experts=models.policy.replays_routers):
        # No other backend has adapters.
        assert isinstance(models.policy, Fsdp2Backend)
        models = replace(models, reference=PolicyView(models.policy, models.policy.forward_base))
    elif config.algorithm.uses_reference:
        reference: Backend = make(kl.reference_path or model.path, config=config.trainer, trains=False)
        models = replace(models, reference=reference)
    if config.algorithm.teacher is not None:
        models = replace(models, teachers=load_teachers(config.algorithm.teacher, config, models.policy, make))
    models = replace(models, whole_distributions=config.algorithm.keeps_distributions)
    if critic is not None and not shared:
        training = critic_training(config.trainer, critic)
        head = "policy" if "process" in advantage_needs(config.algorithm.advantage) else "value"
        models = replace(models, critic=make(critic.path or model.path, config=training, head=head))
    return models


def load_teachers(
    taught_by: TeacherConfig, config: RunConfig, policy: Backend, make: Callable[..., Backend]
) -> Teachers:
    """Load the teachers that ``make`` can load, and compare the tokenizers of all with the policy's."""
    check_tokenizers(taught_by.paths, taught_by.endpoints, config.model.path)
    models = dict[str, Reference | TeacherEndpoint]()
    for name, (key, model) in taught_by.models.items():
        if model.endpoint is not None:
            models[name] = TeacherEndpoint(model.endpoint, f"{key}.endpoint")
        elif model.path is not None:
            models[name] = make(model.path, config=config.trainer, trains=False)
        else:
            models[name] = PolicyView(policy, policy.forward)
    hints = None if taught_by.hint is None else Hints(taught_by.hint, config.model.path)
    return Teachers(models, hints, taught_by.top_k, all_rows=not taught_by.rewards)


def build_policy(config: RunConfig, device: str) -> Backend:
    """Load the policy alone onto ``device``: fine-tuning has no use for the models of ``algorithm``. A collective.

    Raises UserError naming the key whose model cannot be loaded.
    """
    return _maker(config, device)(config.model.path, config=policy_training(config), head="policy")


def _maker(config: RunConfig, device: str) -> Callable[..., Backend]:
    """Return the class of the run's backend, with the arguments that all of its models share."""
    backend: Callable[..., Backend]
    match config.trainer.backend:
        case "fsdp2":
            backend = Fsdp2Backend
        case "megatron":
            # Megatron-Core warns at every import about Transformer Engine and Apex, which it does without.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")
                # Megatron is an optional installation.
                from rl_async.trainer.megatron.backend import MegatronBackend
            log.info("trainer.backend=megatron: prompts shared by several rows are computed for each of them")
            logging.getLogger("megatron").setLevel(logging.WARNING)
            backend = MegatronBackend
    return functools.partial(backend, dtype=compute_type(config.model), device=device)


class PolicyView:
    """A reference or teacher that takes no memory of its own: one of the policy's forward passes.

    The policy without its adapters is the reference for ``trainer.lora``; the whole one teaches itself with a hint.
    """

    def __init__(self, policy: Backend, forward: Callable[..., Outputs]) -> None:
        self.forward, self.row_cost = forward, policy.row_cost

    def sleep(self) -> None:
        """Do nothing: the policy's own call covers its weights."""

    def wake(self) -> None:
        """Do nothing: the policy's own call covers its weights."""


def policy_training(config: RunConfig) -> TrainerConfig:
    """Return the policy's optimizer settings; its schedule skips the steps that only train the critic."""
    waits = config.critic.warmup_steps if config.critic else 0
    return msgspec.structs.replace(config.trainer, steps=config.trainer.steps - waits)


def critic_training(trainer: TrainerConfig, critic: CriticConfig) -> TrainerConfig:
    """Return the optimizer settings of a critic with its own model, all of whose weights train."""
    return msgspec.structs.replace(
        trainer,
        learning_rate=critic.learning_rate,
        schedule=critic.schedule,
        warmup_steps=critic.lr_warmup_steps,
        grad_clip=critic.grad_clip,
        lora=None,
        # Engines record the policy's experts.
        router_replay="never",
    )


# The loss of a micro-batch by a critic's outputs.
CriticLoss = Callable[[MicroBatch, Outputs], Tensor]


@dataclass
class CriticUpdate:
    """The training of a model of values, or of a process reward model, on a batch.

    ``losses_of`` makes the loss of a mini-batch from its rows, those of all ranks; ``summary`` are metrics from before
    the step. ``losses`` are this rank's, by micro-batch, on the device; ``norms``, by mini-batch, stay empty for a
    shared critic.
    """

    ranks: DataParallel
    config: CriticConfig
    losses_of: Callable[[Sequence[int]], CriticLoss]
    summary: dict[str, float]
    losses: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    minibatches: int = 0

    def wrap_loss(
        self, critic: Backend | None, policy_loss: LossFn, parts: Sequence[MicroBatch], rows: Sequence[int]
    ) -> LossFn:
        """Train on this rank's ``parts`` of the mini-batch ``rows``; return the loss for the policy's model.

        A separate critic takes its optimizer step here; a shared one adds its loss to the policy's. Raises
        TrainingDiverged, before the critic's weights change.
        """
        loss_of = self.losses_of(rows)

        def loss_fn(number: int, outputs: Outputs) -> Tensor:
            loss = loss_of(parts[number], outputs)
            self.losses.append(loss.detach())
            return loss

        self.minibatches += 1
        if critic is None:
            coef = self.config.value_coef
            return lambda number, outputs: policy_loss(number, outputs) + coef * loss_fn(number, outputs)
        try:
            _, norm = critic.step([part.tensors for part in parts], loss_fn)
        except TrainingDiverged as error:
            raise TrainingDiverged(f"critic: {error}") from error
        self.norms.append(norm)
        return policy_loss

    def _total(self) -> float:
        return sum(torch.stack(self.losses).tolist()) if self.losses else 0.0

    def shared_loss(self) -> float:
        """Return the critic's part of this rank's policy losses, 0 for a separate critic."""
        return self.config.value_coef * self._total() if self.config.shared else 0.0

    def metrics(self) -> dict[str, float]:
        """Summarise the step, equally on all ranks. A collective.

        The gradient of a shared critic is part of loss/grad_norm.
        """
        losses = torch.tensor([self._total()], dtype=torch.float64)
        self.ranks.all_reduce(losses)
        metrics = {"critic/loss": losses.item() / self.minibatches} | self.summary
        return metrics | ({"critic/grad_norm": sum(self.norms) / len(self.norms)} if self.norms else {})


def critic_update(
    ranks: DataParallel, x: AdvantageInputs, config: CriticConfig | None, outcomes: Tensor
) -> CriticUpdate | None:
    """Return the training of the section `critic`'s model on the batch; None without that section.

    ``outcomes``, float64 [N], are rewards as scored. Raises UserError if a process reward model cannot learn from them.
    """
    if config is None:
        return None
    assert x.rows is not None
    mask = x.mask & on_tokens(x.scored, x.rows)
    if x.process is not None:
        return CriticUpdate(ranks, config, *_towards_outcomes(x, x.rows, mask, outcomes))
    return CriticUpdate(ranks, config, *_towards_returns(x, x.rows, mask, config))


def _towards_returns(
    x: AdvantageInputs, rows: Rows, mask: Tensor, config: CriticConfig
) -> tuple[Callable[[Sequence[int]], CriticLoss], dict[str, float]]:
    """Return the losses of a model of values, with the values from before the step, and how good these were.

    Every sampled token of a scored row has a target, even if the correction masks it for the policy.
    """
    assert x.values is not None
    lam = x.lam if config.lam is None else config.lam
    _, targets = gae(x.token_rewards, x.values, mask, x.options.gamma, lam, x.bootstrap, rows)
    values, returns = x.values.to(torch.float32), targets.to(torch.float32)

    def losses_of(numbers: Sequence[int]) -> CriticLoss:
        # A mean over the mini-batch's tokens of all ranks, regardless of the policy's aggregation.
        counts = count(mask[rows.positions(numbers)], torch.ones(len(numbers)), width=1)

        def loss(micro: MicroBatch, outputs: Outputs) -> Tensor:
            assert outputs.values is not None, "a critic gives values"
            per_token = value_loss(outputs.values, micro.cut(values), micro.cut(returns), config.clip)
            return token_mean(per_token, micro.cut(mask), outputs.values.new_ones(len(outputs.values)), counts)

        return loss

    tokens = max(int(mask.sum()), 1)
    return losses_of, {
        "critic/explained_variance": explained_variance(values, returns, mask),
        "critic/values_mean": torch.where(mask, values, 0.0).sum().item() / tokens,
        "critic/returns_mean": torch.where(mask, returns, 0.0).sum().item() / tokens,
    }


def _towards_outcomes(
    x: AdvantageInputs, rows: Rows, mask: Tensor, outcomes: Tensor
) -> tuple[Callable[[Sequence[int]], CriticLoss], dict[str, float]]:
    """Return the losses of a process reward model, and how often it told good rows from bad ones before the step.

    The loss is the mean over a mini-batch's scored rows of the cross-entropy between the outcome and the sigmoid of the
    row's sum of process rewards (PRIME, arXiv:2502.01456, equation 4).
    """
    assert x.reference is not None
    beta, reference, weights = x.options.prime_beta, x.reference.float(), x.weights
    told = outcomes[x.scored]
    if len(told) and not 0 <= told.min() <= told.max() <= 1:
        raise UserError(
            f"algorithm.advantage=prime learns from rewards from 0 to 1, and the batch has {told.min():g} to "
            f"{told.max():g}; change reward.functions, or use another advantage"
        )

    def losses_of(numbers: Sequence[int]) -> CriticLoss:
        total = max(float(weights[numbers].sum()), 1e-9)

        def loss(micro: MicroBatch, outputs: Outputs) -> Tensor:
            assert outputs.logprobs is not None
            ratios = torch.where(micro.cut(mask), outputs.logprobs - micro.cut(reference), 0.0)
            if not micro.rows:
                return ratios.sum()
            labels, share = (micro.cut_rows(part).to(ratios.dtype) for part in (outcomes, weights))
            entropies = binary_cross_entropy_with_logits(beta * ratios.sum(1), labels, reduction="none")
            return (torch.where(share > 0, share * entropies, 0.0)).sum() / total

        return loss

    guesses = row_sums(torch.where(mask, process_rewards(x), 0.0), rows)
    right = ((guesses > 0) == (outcomes > 0.5)) & x.scored
    return losses_of, {
        "critic/accuracy": right.sum().item() / max(int(x.scored.sum()), 1),
        "critic/process_reward_mean": guesses.sum().item() / max(int(mask.sum()), 1),
    }


# --- Model FLOPs and MFU

# Dense bfloat16 operations per second by a pattern in PyTorch's name of the device; the first match counts. The figures
# are from NVIDIA's data sheets, which give twice as much "with sparsity".
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
# A backward pass takes twice a forward pass: it computes the gradients of weights and those of inputs.
BACKWARD = 2


def peak_flops(device: str, dtype: str) -> float | None:
    """Return a device's peak by its name; None if it is unknown, as for CPUs and for float32."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in BFLOAT16_PEAKS if re.search(rf"\b{name}\b", device)), None)


def model_flops(
    models: Models, batch: Batch, shown: Shown, *, epochs: int, trains_policy: bool, recomputes: bool
) -> float:
    """Return the operations of the models' passes over the batch, on all ranks together.

    The policy takes a forward pass in each epoch and, if it is trained, a backward pass; it takes one more forward pass
    if it ``recomputes`` log-probabilities before the epochs. A separate critic takes a forward pass before the epochs
    and both passes in each. A reference takes one forward pass, and so do teachers together, which divide the rows.
    Padding, and layers recomputed for the backward pass, do not count (Chowdhery et al., arXiv:2204.02311, appendix B:
    MFU, not hardware utilisation); a prompt computed once for several rows counts once. ``RowCost`` has the formulas
    of a row and of a vision tower, to which the images ``shown`` go in every forward pass, and in backward passes
    unless it is frozen.
    """
    shares = models.row_cost.shares_prefixes

    def passes(model: Reference | None, forward: int, backward: int = 0) -> float:
        if model is None:
            return 0.0
        cost, tower = model.row_cost, model.row_cost.tower
        rows = forward_flops(batch.plan, batch.headers, replace(cost, shares_prefixes=shares))
        images = 0 if tower is None else tower.of(shown) * (forward + BACKWARD * backward * tower.trains)
        return float(rows * (forward + BACKWARD * backward) + images)

    policy = passes(models.policy, epochs + recomputes, epochs if trains_policy else 0)
    teachers = models.teachers.loaded if models.teachers is not None else []
    # They divide the rows among themselves.
    taught = sum(passes(teacher, 1) for teacher in teachers) / max(len(teachers), 1)
    return policy + passes(models.critic, 1 + epochs, epochs) + passes(models.reference, 1) + taught


def compute_rates(metrics: Mapping[str, float], ranks: int, device: str, dtype: str) -> dict[str, float]:
    """Return each rank's TFLOP/s during the update, and ``compute/mfu`` if the peak of the ``device`` is known."""
    each = metrics["compute/model_flops"] / ranks / max(metrics["time/update_s"], 1e-9)
    peak = peak_flops(device, dtype)
    return {"compute/tflops_per_s": each / 1e12} | ({} if peak is None else {"compute/mfu": each / peak})


def device_name(device: str) -> str:
    """Return the name of a PyTorch device for ``peak_flops``."""
    return device if device == "cpu" else torch.get_device_module(device).get_device_name(device)
