"""KL estimators: values, gradients, expectations; and the adaptive coefficient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_async.configs.schema.algorithm import KlConfig
from rl_async.trainer.algorithms.losses import ESTIMATORS, KlController

PLAIN = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: min(math.exp(-d) - 1 + d, 10.0),
    "abs": abs,
}


@given(st.floats(-5, 0), st.floats(-5, 0))
def test_values_are_those_of_the_formulas_with_and_without_plus(a: float, b: float) -> None:
    p, q = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    for name, formula in PLAIN.items():
        for variant in (name, f"{name}+"):
            if variant in ESTIMATORS:
                assert ESTIMATORS[variant](p, q).item() == pytest.approx(formula(a - b), abs=1e-12)


def gradient(name: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    variable = logprobs.clone().requires_grad_()
    ESTIMATORS[name](variable, reference).sum().backward()
    assert variable.grad is not None
    return variable.grad


def test_plus_has_the_gradient_of_k2() -> None:
    p, q = -torch.rand(3, 4, dtype=torch.float64), -torch.rand(3, 4, dtype=torch.float64)
    for name in ("k1+", "k3+", "abs+"):
        torch.testing.assert_close(gradient(name, p, q), p - q)
    torch.testing.assert_close(gradient("k2", p, q), p - q)
    torch.testing.assert_close(gradient("k3", p, q), 1 - (q - p).exp())


def test_k3_is_limited_to_10_and_the_others_are_not() -> None:
    far, reference = torch.tensor([-2.0, -3.0, -30.0]).double(), torch.zeros(3).double()
    assert ESTIMATORS["k3"](far, reference).tolist() == pytest.approx([math.exp(2) - 3, 10.0, 10.0])
    assert gradient("k3", far, reference).tolist() == pytest.approx([1 - math.exp(2), 0.0, 0.0])
    assert gradient("k3+", far, reference).tolist() == far.tolist()
    for name in ("k1", "k2", "abs"):
        assert ESTIMATORS[name](far, reference).tolist() == pytest.approx([PLAIN[name](d) for d in far.tolist()])
    assert gradient("k2", far, reference).tolist() == far.tolist(), "the furthest token is pulled back the most"


def distributions() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, generator=draw, dtype=torch.float64)
    return logits[0].log_softmax(0), logits[1].log_softmax(0)


def test_full_is_the_divergence_and_k1_and_k3_estimate_it_without_bias() -> None:
    p, q = distributions()
    divergence = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert ESTIMATORS["full"](p[None, None], q[None, None]).item() == pytest.approx(divergence)
    for name in ("k1", "k3"):
        expected = (p.exp() * ESTIMATORS[name](p, q)).sum().item()
        assert expected == pytest.approx(divergence)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence() -> None:
    logits = distributions()[0].clone().requires_grad_()
    q = distributions()[1]
    p = logits.log_softmax(0)
    (true,) = torch.autograd.grad(ESTIMATORS["full"](p, q), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((p.exp().detach() * ESTIMATORS["k2"](p, q)).sum(), logits)
    torch.testing.assert_close(estimated, true)


def test_extreme_log_probabilities_stay_finite() -> None:
    for name, estimator in ESTIMATORS.items():
        if name != "full":
            assert estimator(torch.tensor(-900.0), torch.tensor(0.0)).isfinite()


def test_the_adaptive_coefficient_follows_the_target_within_its_limits() -> None:
    controller = KlController(KlConfig(coef=0.1, controller="adaptive", target=0.02, horizon=1000))
    assert controller.after_step(0.021, 100) == {"kl/coef": 0.1}
    assert controller.coef == pytest.approx(0.1 * (1 + 0.05 * 0.1))
    before = controller.coef
    controller.after_step(5.0, 100)
    assert controller.coef == pytest.approx(before * (1 + 0.2 * 0.1))
    before = controller.coef
    controller.after_step(0.0, 100)
    assert controller.coef == pytest.approx(before * (1 - 0.2 * 0.1))


def test_the_coefficient_never_turns() -> None:
    controller = KlController(KlConfig(coef=0.1, controller="adaptive", horizon=5))
    controller.after_step(0.0, 1000)
    assert controller.coef == 0.0


def test_a_fixed_coefficient_stays_and_none_is_not_reported() -> None:
    fixed = KlController(KlConfig(coef=0.1, target=0.02))
    fixed.after_step(5.0, 100)
    assert fixed.coef == 0.1
    assert KlController(KlConfig()).after_step(0.0, 100) == {}
