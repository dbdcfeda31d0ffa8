"""The models that take part in a step, and how the config makes them."""

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rl_async.configs.derived.models import compute_type, reference_is_base
from rl_async.configs.schema.run import RunConfig
from rl_async.torch_shared import give_back
from rl_async.trainer.backends.fsdp2.backend import Fsdp2Backend
from rl_async.trainer.backends.interface import Backend, Reference
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.step.critic import critic_training, policy_training

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
        from rl_async.trainer.backends.megatron.backend import MegatronBackend  # an optional installation
    log.info("trainer.backend=megatron: what rows begin with is computed for each of them")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    return MegatronBackend


BACKENDS = {"fsdp2": _fsdp2, "megatron": _megatron}
