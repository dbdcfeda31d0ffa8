"""TRL's GRPO loss, whole: the policy loss, its aggregation, the weights of the engine's mismatch and the KL; and the
divergence of its GKDTrainer and the losses of its DPOTrainer.

What corresponds: `loss_type` grpo, bnpo, dapo and dr_grpo are `ppo` under an aggregation, luspo is `gspo` under one,
`delta` is `clip_dual`, `importance_sampling_level=sequence` is `gspo`; one advantage per row, as TRL has it. TRL
computes advantages inside the generation of completions, where they cannot be called.

Conversions, each at its place below:
- `delta` bounds r alone, `clip_dual` r A: the same while delta is above 1 + clip_high.
- `cispo`: epsilon_high is the bound of r itself, and there is no lower one, which is `clip_low=1`.
- `gspo`: TRL clips the row's ratio, ours each token's with the row's value; the same under seq-mean-token-mean if the
  weights of a row's tokens are equal. If not, TRL gives each token the gradient of their mean, ours (as verl) its own.
- `sapo`: TRL rounds temperatures to float32; these need no rounding.
- k3 has no cap in TRL: differences to the reference stay within 2.5.
- `vespo`: TRL multiplies the weights of tokens that do not train, too; they are 1 in these cases.
- `gspo`: the gradient of a row's ratio goes through tokens of low entropy in TRL; no case combines the two.
- The KL is unbiased with ratios of tokens; under `importance_sampling_level=sequence` TRL multiplies by the row's.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import Aggregation, AlgorithmConfig, LossOptions, TeacherConfig
from rl_async.configs.schema.data import PreferenceConfig
from rl_async.trainer.algorithms.losses import (
    AGGREGATIONS,
    ESTIMATORS,
    LOSSES,
    LossInputs,
    count,
    divergence_of,
    high_entropy,
    near_policy,
)
from rl_async.trainer.finetune.loop import preference_losses
from tests.contracts.oracles.oracle import Case, Oracle, Tensors, assert_same, both_types

pytestmark = pytest.mark.slow
ROWS, WIDTH = 6, 12
AGGREGATION: dict[str, Aggregation] = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
BY_ROW = [("grpo", "sequence"), ("luspo", "sequence")]
KINDS = [(loss_type, "token") for loss_type in AGGREGATION if loss_type != "luspo"] + BY_ROW


def draw_batch(generator: torch.Generator, number: int) -> Tensors:
    """Rows with holes and one advantage each, one of which may train nothing; half of the cases have weights."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    proximal = -0.05 - normal(ROWS, WIDTH).abs()
    scale = (0.0, 1e-7, 1e-3, 0.3)[number % 4]
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0, 0] = True
    mask[1] = mask[1] & (number % 3 > 0)
    logprobs = torch.minimum(proximal + scale * normal(ROWS, WIDTH), torch.tensor(-1e-3))
    batch = {
        "proximal": proximal,
        "logprobs": logprobs,
        "reference": logprobs + (scale * normal(ROWS, WIDTH)).clamp(-2.5, 2.5),
        "advantages": normal(ROWS),
        "mask": mask,
        "entropy": normal(ROWS, WIDTH).abs(),
    }
    if number % 2:
        batch["weights"] = 2 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return batch


def make_cases(loss_type: str, level: str) -> tuple[list[Case], list[AlgorithmConfig]]:
    """The cases with TRL's numbers, and ours."""
    cases, ours = both_types(draw_batch), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        low, high = draw.uniform(0.05, 0.5), draw.uniform(0.05, 0.5)
        delta = draw.choice([None, draw.uniform(1.6, 3.0)]) if loss_type not in ("cispo", "sapo", "vespo") else None
        if level == "sequence":
            delta = None  # ours has no dual clip of a row's ratio
            if "weights" in case.tensors:
                case.tensors["weights"] = case["weights"][:, :1].expand(ROWS, WIDTH)
        if loss_type == "vespo" and "weights" in case.tensors:
            case.tensors["weights"] = torch.where(case["mask"], case["weights"], 1.0)
        vespo = {name: draw.randint(4, 16) / 4 for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}
        numbers: dict[str, Any] = {
            "vespo": vespo,
            "unbiased": level == "token" and draw.random() < 0.5,
            "top_entropy": draw.choice([1.0, draw.uniform(0.1, 0.9)]) if level == "token" else 1.0,
            "off_policy_mask": draw.choice([None, 10 ** draw.uniform(-5, -1)]),
            "delta": delta,
            "beta": draw.choice([0.0, draw.uniform(0.01, 1.0)]),
            "tau_positive": draw.randint(4, 16) / 8,
            "tau_negative": draw.randint(4, 16) / 8,
            "clip_low": low,
            "clip_high": 1 + high if loss_type == "cispo" else high,
        }
        case.options = numbers | {"loss_type": loss_type, "level": level, "width": WIDTH + number}
        options = LossOptions(
            clip_dual=delta,
            sapo_tau_positive=numbers["tau_positive"],
            sapo_tau_negative=numbers["tau_negative"],
            vespo_k_positive=vespo["k_pos"],
            vespo_lambda_positive=vespo["lambda_pos"],
            vespo_k_negative=vespo["k_neg"],
            vespo_lambda_negative=vespo["lambda_neg"],
        )
        low = 1.0 if loss_type == "cispo" else low
        aggregation = AGGREGATION[loss_type]
        ours.append(AlgorithmConfig(clip_low=low, clip_high=high, loss_options=options, aggregation=aggregation))
    return cases, ours


@pytest.mark.parametrize(("loss_type", "level"), KINDS)
def test_the_grpo_loss_and_its_gradient_are_trls(trl: Oracle, loss_type: str, level: str) -> None:
    name = {"cispo": "cispo", "sapo": "sapo", "vespo": "vespo"}.get(loss_type, "ppo" if level == "token" else "gspo")
    cases, configs = make_cases(loss_type, level)
    for case, config, theirs in zip(cases, configs, trl.ask("policy_loss", cases), strict=True):
        logprobs, mask = case["logprobs"].clone().requires_grad_(), case["mask"]
        ones = torch.ones(ROWS, WIDTH, dtype=case.dtype)
        inputs = LossInputs(
            logprobs=logprobs,
            proximal=case["proximal"],
            behaviour=case["proximal"],
            advantages=case["advantages"][:, None] * ones,
            weights=case.tensors.get("weights", ones),
            mask=mask,
            free=mask,
            options=config,
        )
        per_token = LOSSES[name].per_token(inputs)
        if (limit := case.options["off_policy_mask"]) is not None:
            per_token = torch.where(near_policy(inputs, limit), per_token, 0.0)
        if case.options["top_entropy"] < 1:
            per_token = torch.where(high_entropy(case["entropy"], mask, case.options["top_entropy"]), per_token, 0.0)
        if case.options["beta"]:
            kl = ESTIMATORS["k3"](logprobs, case["reference"]) * (inputs.ratio if case.options["unbiased"] else 1.0)
            per_token = per_token + case.options["beta"] * kl
        counts = count(mask, ones[:, 0], case.options["width"])
        loss = AGGREGATIONS[config.aggregation](per_token, mask, ones[:, 0], counts)
        loss.backward()
        assert logprobs.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(logprobs.grad, theirs["gradient"], case)


VOCABULARY = 9


def draw_distributions(generator: torch.Generator, number: int) -> Tensors:
    """Logits of a policy and a teacher, from equal to far apart."""
    shape = (ROWS, WIDTH, VOCABULARY)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0, 0] = True
    far = (0.0, 1e-3, 1.0, 6.0)[number % 4]
    teacher = logits + far * torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"logits": logits, "teacher": teacher, "mask": mask}


def test_a_teachers_divergences_and_their_gradients_are_gkds(trl: Oracle) -> None:
    cases, configs = both_types(draw_distributions), []
    for number, case in enumerate(cases):
        beta = random.Random(number).choice([0.0, 0.1, 0.5, 0.8, 1.0])
        case.options = {"beta": beta}
        configs.append(
            TeacherConfig(divergence="forward")
            if beta == 0
            else TeacherConfig(divergence="reverse")
            if beta == 1
            else TeacherConfig(divergence="jsd", beta=beta)
        )
    for case, config, theirs in zip(cases, configs, trl.ask("distillation", cases), strict=True):
        logits = case["logits"].clone().requires_grad_()
        tokens = divergence_of(config)(logits.log_softmax(-1), case["teacher"].log_softmax(-1))
        loss = tokens[case["mask"]].mean()
        loss.backward()
        assert logits.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(logits.grad, theirs["gradient"], case)


def test_divergences_over_the_likeliest_tokens_and_their_gradients_are_sdpos(trl: Oracle) -> None:
    """TRL takes the tokens that the policy finds likeliest, ours are the teacher's: both models have one order.

    In float64 alone, since rounding of a mass near 1 changes the logarithm of the rest.
    """
    cases = [case for case in both_types(draw_distributions) if case.dtype == torch.float64]
    configs = list[TeacherConfig]()
    for number, case in enumerate(cases):
        draw = random.Random(number)
        beta, top_k = draw.choice([0.0, 0.3, 1.0]), draw.randrange(1, VOCABULARY)
        order = case["logits"].argsort(-1)
        ranked = {name: torch.zeros_like(case[name]) for name in ("logits", "teacher")}
        for name, values in ranked.items():
            values.scatter_(-1, order, case[name].sort(-1).values)
        case.tensors |= ranked
        case.options = {"beta": beta, "top_k": top_k}
        kind: Any = {0.0: "forward", 0.3: "jsd", 1.0: "reverse"}[beta]
        configs.append(TeacherConfig(divergence=kind, beta=0.3, top_k=top_k))
    for case, config, theirs in zip(cases, configs, trl.ask("likeliest", cases), strict=True):
        logits = case["logits"].clone().requires_grad_()
        tokens = divergence_of(config)(logits.log_softmax(-1), case["teacher"].log_softmax(-1))
        loss = tokens[case["mask"]].mean()
        loss.backward()
        assert logits.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(logits.grad, theirs["gradient"], case)


def draw_pairs(generator: torch.Generator, number: int) -> Tensors:
    """Three pairs, the better rows first, from equal to far from the reference."""
    reference = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    far = (0.0, 0.01, 0.5, 5.0)[number % 4]
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.6
    mask[:, 0] = True
    noise = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {"logprobs": reference + far * noise, "reference": reference, "mask": mask}


@pytest.mark.parametrize("loss", ["sigmoid", "robust", "hinge", "ipo"])
def test_the_losses_of_pairs_and_their_gradients_are_trls(trl: Oracle, loss: str) -> None:
    cases, configs = both_types(draw_pairs), []
    for number, case in enumerate(cases):
        draw = random.Random(number)
        beta, wrong = draw.uniform(0.05, 0.8), draw.uniform(0.01, 0.4) if loss == "robust" else 0.0
        case.options = {"loss": loss, "beta": beta, "label_smoothing": wrong}
        name: Any = "sigmoid" if loss == "robust" else loss
        configs.append(PreferenceConfig(beta=beta, loss=name, label_smoothing=wrong))
    order = torch.arange(ROWS).reshape(2, -1).T.flatten()
    for case, config, theirs in zip(cases, configs, trl.ask("preferences", cases), strict=True):
        logprobs, mask = case["logprobs"].clone().requires_grad_(), case["mask"]
        policy, reference = (torch.where(mask, x, 0.0).sum(-1)[order] for x in (logprobs, case["reference"]))
        ours = preference_losses(config, policy, reference, mask.sum(-1)[order]).losses.mean()
        ours.backward()
        assert logprobs.grad is not None
        assert_same(ours.detach(), theirs["loss"], case)
        assert_same(logprobs.grad, theirs["gradient"], case)
