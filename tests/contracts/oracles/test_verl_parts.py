"""Aggregations, KL estimators, the adaptive KL coefficient and the value loss, with their gradients.

No conversions.
"""

import random
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AdaptiveKl, Aggregation, KlConfig
from rl_async.trainer.algorithms.advantages import value_loss
from rl_async.trainer.algorithms.losses import AGGREGATIONS, ESTIMATORS, Counts, KlController
from tests.contracts.oracles.oracle import Case, Oracle, Tensors, assert_same, both_types

pytestmark = pytest.mark.slow
ROWS, WIDTH = 6, 12
KL_NAMES = {"k1": ["kl", "k1"], "k2": ["mse", "k2"], "k3": ["low_var_kl", "k3"], "abs": ["abs"]}
KL_PAIRS = [(ours, theirs) for ours, names in KL_NAMES.items() for theirs in names]
KL_PAIRS += [(f"{ours}+", f"{theirs}+") for ours, theirs in KL_PAIRS if ours != "k2"]


def draw_values(generator: torch.Generator, number: int) -> Tensors:
    """Three numbers a token, and rows with holes, of which one may train nothing."""

    def normal() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[0, 0] = True
    mask[1] = mask[1] & (number % 3 > 0)
    return {"values": normal(), "old_values": normal(), "returns": normal(), "mask": mask}


@pytest.mark.parametrize("name", get_args(Aggregation))
def test_an_aggregation_is_verls(verl: Oracle, name: Aggregation) -> None:
    cases = both_types(draw_values)
    for number, case in enumerate(cases):
        tokens, rows = 5 + number, int(case["mask"].any(1).sum()) + number % 3  # of a batch of several micro-batches
        counts = {"batch_num_tokens": tokens, "global_batch_size": rows, "loss_scale_factor": WIDTH + number}
        case.options = {"name": name, "counts": counts}
    for case, theirs in zip(cases, verl.ask("aggregation", cases), strict=True):
        values = case["values"].clone().requires_grad_()
        tokens, rows, width = case.options["counts"].values()
        ones = torch.ones(ROWS, dtype=case.dtype)
        loss = AGGREGATIONS[name](values, case["mask"], ones, Counts(tokens, rows, width))
        loss.backward()
        assert values.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(values.grad, theirs["gradient"], case)


def draw_logprobs(generator: torch.Generator, number: int) -> Tensors:
    """Log-probabilities of two models, from almost equal to far apart."""
    reference = -torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).abs()
    scale = (1e-7, 1e-3, 0.3, 1.0, 20.0)[number % 5]
    distance = scale * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return {"reference": reference, "logprobs": reference + distance}


@pytest.mark.parametrize(("name", "theirs"), KL_PAIRS)
def test_a_kl_estimator_and_its_gradient_are_verls(verl: Oracle, name: str, theirs: str) -> None:
    cases = both_types(draw_logprobs)
    for case in cases:
        case.options = {"name": theirs}
    for case, answer in zip(cases, verl.ask("kl", cases), strict=True):
        logprobs = case["logprobs"].clone().requires_grad_()
        values = ESTIMATORS[name](logprobs, case["reference"])
        values.sum().backward()
        assert logprobs.grad is not None
        assert_same(values.detach(), answer["values"], case)
        assert_same(logprobs.grad, answer["gradient"], case)


def test_every_kl_estimator_but_the_whole_distributions_is_compared() -> None:
    assert ESTIMATORS.keys() - {ours for ours, _ in KL_PAIRS} == {"full"}  # verl raises NotImplementedError


def test_the_adaptive_coefficient_is_verls(verl: Oracle) -> None:
    cases = both_types(lambda generator, number: {"kl": torch.rand(20, generator=generator, dtype=torch.float64)})
    for number, case in enumerate(cases):
        draw = random.Random(number)
        case.options = {
            "coef": draw.uniform(1e-4, 1.0),
            "target": draw.uniform(0.1, 0.9),
            "horizon": draw.randint(500, 10_000),
            "trajectories": draw.randint(1, 1024),
        }
    for case, theirs in zip(cases, verl.ask("kl_controller", cases), strict=True):
        given = SimpleNamespace(**case.options)
        controller = KlController(
            KlConfig(coef=given.coef, adaptive=AdaptiveKl(target=given.target, horizon=given.horizon))
        )
        coefs = []
        for value in case["kl"].tolist():
            controller.after_step(value, given.trajectories)
            coefs.append(controller.coef)
        assert_same(torch.tensor(coefs), theirs["coefs"], Case({}, torch.float64))


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_the_value_loss_and_its_gradient_are_verls(verl: Oracle, clip: float | None) -> None:
    cases = both_types(draw_values)
    for case in cases:
        case.options = {"clip": clip or 1e9, "aggregation": "token-mean"}
    for case, theirs in zip(cases, verl.ask("value_loss", cases), strict=True):
        values = case["values"].clone().requires_grad_()
        per_token = value_loss(values, case["old_values"], case["returns"], clip)
        loss = per_token[case["mask"]].mean()
        loss.backward()
        assert values.grad is not None
        assert_same(loss.detach(), theirs["loss"], case)
        assert_same(values.grad, theirs["gradient"], case)
