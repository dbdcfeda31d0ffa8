"""TRL's GRPO loss as a function of named tensors and options; runs in the oracles' environment (``worker.py``).

``GRPOTrainer._compute_loss`` is called with a stand-in for the trainer, which holds the settings, and whose forward
pass gives the log-probabilities of the case.
"""

import json
from collections import defaultdict
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

Tensors = dict[str, Tensor]


def policy_loss(x: Tensors, options: dict[str, Any]) -> Tensors:
    """The loss of one batch in one process, and its gradient."""
    logprobs = x["logprobs"].clone().requires_grad_()
    rows, width = logprobs.shape
    mask = x["mask"].to(logprobs.dtype)
    args = SimpleNamespace(
        delta=options["delta"],
        use_bias_correction_kl=options["unbiased"],
        **{f"vespo_{name}": value for name, value in options["vespo"].items()},
        sapo_temperature_pos=options["tau_positive"],
        sapo_temperature_neg=options["tau_negative"],
        steps_per_generation=1,
    )
    trainer = SimpleNamespace(
        args=args,
        beta=options["beta"],
        loss_type=options["loss_type"],
        importance_sampling_level=options["level"],
        epsilon_low=options["clip_low"],
        epsilon_high=options["clip_high"],
        max_completion_length=options["width"],
        use_vllm="weights" in x,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=options["top_entropy"],
        off_policy_mask_threshold=options["off_policy_mask"],
        get_high_entropy_mask=lambda *given: GRPOTrainer.get_high_entropy_mask(trainer, *given),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda t: t,
            pad_across_processes=lambda t, **_: t,
            reduce=lambda t, reduction: t,
            sync_gradients=True,
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, x["entropy"], None),
    )
    ids = torch.zeros(rows, width, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": x["advantages"],
        "old_per_token_logps": x["proximal"],
        "ref_per_token_logps": x["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if "weights" in x:
        inputs["importance_sampling_ratio"] = x["weights"]
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs.grad}


def settings(x: Tensors, options: dict[str, Any]) -> Tensors:
    """The fields of GRPOConfig and what it extends, with their defaults, as bytes of JSON."""
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(GRPOConfig)}
    return {"text": torch.tensor(list(json.dumps(defaults, default=str).encode()), dtype=torch.uint8)}


def distillation(x: Tensors, options: dict[str, Any]) -> Tensors:
    """The generalised divergence of GKD, summed over the vocabulary and averaged over tokens, and its gradient."""
    logits = x["logits"].clone().requires_grad_()
    labels = torch.where(x["mask"], 0, -100)
    loss = GKDTrainer.generalized_jsd_loss(logits, x["teacher"], labels=labels, beta=options["beta"])
    loss.backward()
    return {"loss": loss.detach(), "gradient": logits.grad}


def likeliest(x: Tensors, options: dict[str, Any]) -> Tensors:
    """The divergence over the policy's likeliest tokens, and all others as one, averaged over tokens; its gradient."""
    logits = x["logits"].clone().requires_grad_()
    tokens = compute_topk_self_distillation_loss(
        logits,
        x["teacher"],
        distillation_topk=options["top_k"],
        distillation_alpha=options["beta"],
        distillation_add_tail=True,
    )
    loss = tokens[x["mask"]].mean()
    loss.backward()
    return {"loss": loss.detach(), "gradient": logits.grad}


def preferences(x: Tensors, options: dict[str, Any]) -> Tensors:
    """The loss of one batch of pairs, and its gradient. The first token of a row is never part of an answer."""
    logprobs, mask = x["logprobs"].clone().requires_grad_(), x["mask"]
    rows, width = logprobs.shape
    nothing = torch.zeros(rows, width, dtype=logprobs.dtype)

    def model(**_: Any) -> SimpleNamespace:
        answers = torch.where(mask, logprobs, 0.0)
        return SimpleNamespace(log_probs=answers, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    better, worse = torch.where(mask, x["reference"], 0.0).sum(1).chunk(2)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=lambda t: t, gather_for_metrics=lambda t: t),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[options["loss"]],
        loss_weights=[1.0],
        beta=options["beta"],
        label_smoothing=options["label_smoothing"],
        use_weighting=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "input_ids": torch.zeros(rows, width + 1, dtype=torch.long),
        "attention_mask": torch.ones(rows, width + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(rows, 1, dtype=torch.long), mask.long()], 1),
        "ref_chosen_logps": better,
        "ref_rejected_logps": worse,
    }
    loss = DPOTrainer._compute_loss(trainer, model, inputs, False)
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs.grad}


FORMULAS = {
    "likeliest": likeliest,
    "preferences": preferences,
    "policy_loss": policy_loss,
    "settings": settings,
    "distillation": distillation,
}
