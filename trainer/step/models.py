"""From the config to the models that take part in a step."""

import logging
import warnings

from rl_async.configs.schema.run import RunConfig
from rl_async.trainer.backends.fsdp2.backend import Fsdp2Backend
from rl_async.trainer.step.critic import critic_training, policy_training
from rl_async.trainer.step.update import Models


def build_models(config: RunConfig, device: str) -> Models:
    """Load the policy, and what the algorithm needs beside it, onto ``device``. A collective.

    Raises UserError naming the key whose model cannot be loaded.
    """
    return BACKENDS[config.trainer.backend](config, device)


def _fsdp2(config: RunConfig, device: str) -> Models:
    model, critic, kl = config.model, config.critic, config.algorithm.kl
    shared = critic is not None and critic.shared
    policy = Fsdp2Backend(model.path, model.dtype, device, policy_training(config), "both" if shared else "policy")
    reference = None
    if kl.coef > 0:
        path = kl.reference_path or model.path
        reference = Fsdp2Backend(path, model.dtype, device, config.trainer, trains=False)
    if critic is None or shared:
        return Models(policy, reference)
    training = critic_training(config.trainer, critic)
    return Models(policy, reference, Fsdp2Backend(critic.path or model.path, model.dtype, device, training, "value"))


def _megatron(config: RunConfig, device: str) -> Models:
    with warnings.catch_warnings():  # at every import: it could use them, and does without
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex)")
        from rl_async.trainer.backends.megatron.backend import MegatronBackend  # an optional installation
    logging.getLogger("megatron").setLevel(logging.WARNING)

    model, kl = config.model, config.algorithm.kl
    policy = MegatronBackend(model.path, model.dtype, device, config.trainer)
    reference = None
    if kl.coef > 0:
        path = kl.reference_path or model.path
        reference = MegatronBackend(path, model.dtype, device, config.trainer, trains=False)
    return Models(policy, reference)


BACKENDS = {"fsdp2": _fsdp2, "megatron": _megatron}
