"""verl's formulas as functions of named tensors and options; runs in the oracles' environment (``worker.py``)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.trainer import config as config_package
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

Tensors = dict[str, Tensor]
CORRECTION = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")


def policy_loss(x: Tensors, options: dict[str, Any]) -> Tensors:
    """A loss of ``POLICY_LOSS_REGISTRY``, or `reinforce`, and its gradient."""
    if options["name"] == "reinforce":
        function, old = core_algos.compute_policy_loss_reinforce, "rollout_log_prob"
    else:
        function, old = core_algos.get_policy_loss_fn(options["name"]), "old_log_prob"
    numbers = options.get("policy_loss", {})
    if "preset" in options:
        numbers = numbers | {"rollout_correction": _preset(options["preset"])}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**numbers),
        global_batch_info=options.get("counts", {}),
        **options.get("actor", {}),
    )
    logprobs = x["logprobs"].clone().requires_grad_()
    loss, _ = function(
        **{old: x["proximal"]},
        log_prob=logprobs,
        advantages=x["advantages"],
        response_mask=x["mask"].long(),
        loss_agg_mode=options["aggregation"],
        config=config,
        rollout_is_weights=x.get("weights"),
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs.grad}


def advantage(x: Tensors, options: dict[str, Any]) -> Tensors:
    """An estimator of ``ADV_ESTIMATOR_REGISTRY``."""
    mask = x["mask"].long()
    parts = {name.removeprefix("part."): t.numpy() for name, t in x.items() if name.startswith("part.")}
    given: dict[str, Any] = {"token_level_rewards": x["rewards"].clone(), "response_mask": mask}
    wanted = set(options.get("arguments", []))
    everything = {
        "index": x["groups"].numpy(),
        "values": x["values"],
        "gamma": options.get("algorithm", {}).get("gamma"),
        "lam": options.get("lam"),
        "epsilon": options.get("epsilon"),
        "norm_adv_by_std_in_grpo": options.get("norm"),
        "config": AlgoConfig(**options.get("algorithm", {})),
        "reward_baselines": x["baselines"],
        "old_log_probs": x["logprobs"],
        "sum_pi_squared": x["sum_squares"],
        "rollout_is_weights": x["importance"],
        "non_tensor_batch": parts,
        "batch": {"prompts": mask[:, :1], "attention_mask": torch.cat([torch.ones_like(mask[:, :1]), mask], 1)},
    }
    given |= {name: everything[name] for name in wanted}
    advantages, returns = core_algos.get_adv_estimator_fn(options["name"])(**given)
    return {"advantages": advantages, "returns": returns.clone()}


def aggregation(x: Tensors, options: dict[str, Any]) -> Tensors:
    """``agg_loss`` and its gradient."""
    values = x["values"].clone().requires_grad_()
    loss = core_algos.agg_loss(values, x["mask"].long(), options["name"], **options["counts"])
    loss.backward()
    return {"loss": loss.detach(), "gradient": values.grad}


def kl(x: Tensors, options: dict[str, Any]) -> Tensors:
    """``kl_penalty`` and the gradient of its sum."""
    logprobs = x["logprobs"].clone().requires_grad_()
    values = core_algos.kl_penalty(logprobs, x["reference"], options["name"])
    values.sum().backward()
    return {"values": values.detach(), "gradient": logprobs.grad}


def kl_controller(x: Tensors, options: dict[str, Any]) -> Tensors:
    """The adaptive coefficient after each step."""
    controller = core_algos.AdaptiveKLController(options["coef"], options["target"], options["horizon"])
    coefs = []
    for value in x["kl"].tolist():
        controller.update(value, options["trajectories"])
        coefs.append(controller.value)
    return {"coefs": torch.tensor(coefs, dtype=torch.float64)}


def value_loss(x: Tensors, options: dict[str, Any]) -> Tensors:
    """``compute_value_loss`` and its gradient."""
    values = x["values"].clone().requires_grad_()
    loss, _ = core_algos.compute_value_loss(
        values, x["returns"], x["old_values"], x["mask"].long(), options["clip"], options["aggregation"]
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": values.grad}


def correction(x: Tensors, options: dict[str, Any]) -> Tensors:
    """Weights and mask of a preset, or of the options of ``rollout_correction``."""
    given = _preset(options["preset"]) if "preset" in options else options
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=x["target"],
        rollout_log_prob=x["behaviour"],
        response_mask=x["mask"].long(),
        **{name: given[name] for name in CORRECTION if name in given},
    )
    ones = torch.ones_like(x["target"])
    return {"weights": ones if weights is None else weights.batch["rollout_is_weights"].clone(), "mask": mask.bool()}


def _preset(name: str) -> dict[str, Any]:
    config = getattr(RolloutCorrectionConfig, name)()
    return {key: getattr(config, key) for key in (*CORRECTION, "bypass_mode", "loss_type")}


def names(x: Tensors, options: dict[str, Any]) -> Tensors:
    """Every name of a registry, as bytes; what is compared with nothing would otherwise go unnoticed."""
    registries = {
        "losses": sorted(core_algos.POLICY_LOSS_REGISTRY),
        "advantages": sorted(str(getattr(name, "value", name)) for name in core_algos.ADV_ESTIMATOR_REGISTRY),
        "presets": sorted(name for name, value in vars(RolloutCorrectionConfig).items() if type(value) is classmethod),
    }
    return {"names": torch.tensor(list("\n".join(registries[options["registry"]]).encode()), dtype=torch.uint8)}


def settings(x: Tensors, options: dict[str, Any]) -> Tensors:
    """The default config, as the bytes of its YAML."""
    file = Path(config_package.__file__).with_name("_generated_ppo_trainer.yaml")
    return {"text": torch.tensor(list(file.read_bytes()), dtype=torch.uint8)}


FORMULAS = {
    "policy_loss": policy_loss,
    "advantage": advantage,
    "aggregation": aggregation,
    "kl": kl,
    "kl_controller": kl_controller,
    "value_loss": value_loss,
    "correction": correction,
    "names": names,
    "settings": settings,
}
