"""Losses, KL estimators and aggregations against plain loops."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_async.configs.schema.algorithm import LOSSES as TRAITS
from rl_async.configs.schema.algorithm import (
    AdaptiveKl,
    AdvantageOptions,
    Aggregation,
    AlgorithmConfig,
    KlConfig,
    LossOptions,
    TeacherConfig,
)
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.trainer.algorithms.algorithm import build, load_advantage, load_correction, load_loss
from rl_async.trainer.algorithms.losses import (
    AGGREGATIONS,
    ESTIMATORS,
    LOSSES,
    Counts,
    KlController,
    LossInputs,
    SelectInputs,
    count,
    divergence_of,
    high_entropy,
    near_policy,
)
from rl_async.trainer.packing import PART, Rows, by_rows, on_tokens, row_sums

OPTIONS = AlgorithmConfig(
    clip_low=0.15,
    clip_high=0.3,
    loss_options=LossOptions(
        clip_dual=1.5,
        decoupled_cap=1.3,
        sapo_tau_positive=0.8,
        sapo_tau_negative=1.3,
        dro_beta=0.7,
        dppo_tv=0.06,
        dppo_kl=0.01,
        vespo_k_positive=2.5,
        sppo_eta=0.8,
        ipo=0.05,
        ipo_penalty=0.3,
        m2po=0.03,
        clip_cov_share=0.2,
        clip_cov_low=0.05,
        clip_cov_high=1.0,
        kl_cov_share=0.2,
        kl_cov_coef=0.9,
    ),
)
SELECTING = sorted(name for name, loss in LOSSES.items() if loss.select)


def make(seed: int, on_policy: bool = False, token_wise: bool = True) -> LossInputs:
    """Rows of unequal length with gaps; ratios on both sides of every bound."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(4, 7, generator=draw, dtype=torch.float64)

    behaviour = -0.1 - normal(1.0).abs()
    proximal = behaviour if on_policy else torch.minimum(behaviour + normal(0.25), torch.tensor(-1e-3))
    logprobs = proximal.clone() if on_policy else torch.minimum(proximal + normal(0.4), torch.tensor(-1e-3))
    mask = torch.rand(4, 7, generator=draw) < 0.7
    mask[:, 2] = True
    mask[3, 3:] = False
    inputs = LossInputs(
        logprobs=logprobs,
        proximal=proximal,
        behaviour=behaviour,
        advantages=normal(1.0) if token_wise else normal(1.0)[:, :1].expand(4, 7),
        weights=torch.ones(4, 7).double() if on_policy else 0.5 + torch.rand(4, 7, generator=draw, dtype=torch.float64),
        mask=mask,
        free=mask,
        options=OPTIONS,
    )
    return inputs


def selecting(x: LossInputs, seed: int = 5) -> SelectInputs:
    return SelectInputs(x.proximal, x.behaviour, x.advantages, x.mask, x.options, seed)


def prepared(name: str, x: LossInputs) -> LossInputs:
    select = LOSSES[name].select
    return x if select is None else replace(x, selected=select(selecting(x)))


class Token:
    """One token's numbers, for the formulas as their papers write them."""

    def __init__(self, x: LossInputs, i: int, t: int) -> None:
        self.logp, self.old, self.mu = (v[i, t].item() for v in (x.logprobs, x.proximal, x.behaviour))
        self.a, self.w = x.advantages[i, t].item(), x.weights[i, t].item()
        self.r = math.exp(self.logp - self.old)
        self.selected = bool(x.selected[i, t]) if x.selected is not None else False
        self.away = (self.r > 1 and self.a > 0) or (self.r < 1 and self.a < 0)


def clip(r: float) -> float:
    return min(max(r, 1 - 0.15), 1 + 0.3)


def ppo(k: Token) -> float:
    surrogate = min(k.r * k.a, clip(k.r) * k.a)
    if k.a < 0:
        surrogate = max(surrogate, 1.5 * k.a)
    return -k.w * surrogate


def decoupled_ppo(k: Token) -> float:
    b = math.exp(k.old - k.mu)
    return b * ppo(k) if b <= 1.3 else 0.0


def sapo(k: Token) -> float:
    tau = 0.8 if k.a > 0 else 1.3
    return -k.w * 4 / tau / (1 + math.exp(-tau * (k.r - 1))) * k.a


def dppo_kl(k: Token) -> float:
    q, p = math.exp(k.old), math.exp(k.logp)
    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return 0.0 if k.away and distance > 0.01 else -k.w * k.r * k.a


def dppo_tv(k: Token) -> float:
    return 0.0 if k.away and abs(math.exp(k.logp) - math.exp(k.old)) > 0.06 else -k.w * k.r * k.a


PER_TOKEN: dict[str, Callable[[Token], float]] = {
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "reinforce": lambda k: -k.w * k.a * k.logp,
    "gpg": lambda k: -k.w * k.a * k.logp,
    "cispo": lambda k: -k.w * clip(k.r) * k.a * k.logp,
    "sapo": sapo,
    "dro": lambda k: -k.w * (k.a * k.logp - 0.7 / 2 * math.log(k.r) ** 2),
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": lambda k: (
        k.w * 0.3 * math.log(k.r) ** 2 - (k.w * k.r * k.a if abs(math.exp(k.logp) - math.exp(k.old)) <= 0.05 else 0.0)
    ),
    "prime_rl": lambda k: dppo_tv(k) + k.w * 0.3 * math.log(k.r) ** 2,
    "m2po": lambda k: 0.0 if k.selected else -k.w * k.r * k.a,
    "clip_cov": lambda k: 0.0 if k.selected else ppo(k),
    "kl_cov": lambda k: -k.w * (k.r * k.a - (0.9 * abs(math.log(k.r)) if k.selected else 0.0)),
}


def gspo(row: list[Token]) -> list[float]:
    s = math.exp(sum(math.log(k.r) for k in row) / len(row))
    return [-k.w * min(s * k.a, clip(s) * k.a) for k in row]


def gmpo(row: list[Token]) -> list[float]:
    advantage = sum(k.a for k in row) / len(row)
    logs = []
    for k in row:
        log, limited = math.log(k.r), min(max(math.log(k.r), -0.15), 0.3)
        logs.append(min(log, limited) if k.a > 0 else max(log, limited))
    weight = math.exp(sum(math.log(k.w) for k in row) / len(row))
    return [-weight * math.exp(sum(logs) / len(row)) * advantage] * len(row)


def vespo(row: list[Token]) -> list[float]:
    weight = math.prod(k.r * k.w for k in row)

    def phi(k: float, decay: float) -> float:
        return math.exp(decay) * weight**k * math.exp(-decay * weight)

    return [-(phi(2.5, 3.0) if k.a >= 0 else phi(3.0, 2.0)) * k.a * k.logp for k in row]


def sppo(row: list[Token]) -> list[float]:
    gap = sum(math.log(k.r) for k in row) - 0.8 * sum(k.a for k in row) / len(row)
    return [k.w * gap**2 / (2 * 0.8) / len(row) for k in row]


PER_ROW = {"gspo": gspo, "gmpo": gmpo, "sppo": sppo, "vespo": vespo}


def test_names_registry_and_references_agree() -> None:
    assert TRAITS.keys() == LOSSES.keys() == PER_TOKEN.keys() | PER_ROW.keys()


@pytest.mark.parametrize("name", TRAITS)
def test_a_loss_reads_the_options_and_inputs_that_it_declares(name: str) -> None:
    read = set[str]()

    class Recording:
        def __getattr__(self, option: str) -> object:
            read.add(option)
            return getattr(x.options.loss_options, option)

    x = prepared(name, make(3))
    recording = SimpleNamespace(clip_low=x.options.clip_low, clip_high=x.options.clip_high, loss_options=Recording())
    traced = replace(x, options=recording)  # type: ignore[arg-type]
    LOSSES[name].per_token(traced)
    if (select := LOSSES[name].select) is not None:
        select(selecting(traced))
    assert read == set(TRAITS[name].options)
    moved = prepared(name, replace(x, behaviour=x.behaviour - 1.0))
    unchanged = torch.equal(LOSSES[name].per_token(moved), LOSSES[name].per_token(x))
    assert unchanged == (TRAITS[name].behaviour == "unused")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", TRAITS)
def test_losses_match_plain_loops(name: str, seed: int) -> None:
    x = prepared(name, make(seed, token_wise=name != "gmpo"))
    got = LOSSES[name].per_token(x)
    assert got.shape == x.mask.shape
    for i in range(4):
        there = torch.nonzero(x.mask[i]).flatten().tolist()
        row = [Token(x, i, t) for t in there]
        expected = PER_ROW[name](row) if name in PER_ROW else [PER_TOKEN[name](k) for k in row]
        assert got[i, there].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def surrogate_gradient(name: str, x: LossInputs) -> Tensor:
    logprobs = x.logprobs.clone().requires_grad_()
    loss = LOSSES[name].per_token(replace(x, logprobs=logprobs))
    torch.where(x.mask, loss, 0.0).sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad


# A part of their value carries no gradient, by definition.
STOPPED = ("cispo", "gspo", "sppo", "vespo")


@pytest.mark.parametrize("name", [name for name in TRAITS if name not in STOPPED])
def test_gradients_are_those_of_the_value(name: str) -> None:
    x = prepared(name, make(3))

    def total(logprobs: Tensor) -> Tensor:
        return torch.where(x.mask, LOSSES[name].per_token(replace(x, logprobs=logprobs)), 0.0).sum()

    assert torch.autograd.gradcheck(total, x.logprobs.clone().requires_grad_(), eps=1e-7, atol=1e-5)


def test_sppo_has_the_gradient_of_the_rows_squared_distance() -> None:
    x = make(4, token_wise=False)
    x = replace(x, weights=torch.ones_like(x.weights))
    logprobs = x.logprobs.clone().requires_grad_()
    sums = torch.where(x.mask, logprobs - x.proximal, 0.0).sum(1)
    ((sums - 0.8 * x.advantages[:, 0]) ** 2 / (2 * 0.8)).sum().backward()
    torch.testing.assert_close(surrogate_gradient("sppo", x), logprobs.grad)


def test_vespo_weighs_the_plain_gradient_by_its_value() -> None:
    x = make(4)
    value = LOSSES["vespo"].per_token(x)
    expected = torch.where(x.mask, value / x.logprobs, 0.0)
    torch.testing.assert_close(surrogate_gradient("vespo", x), expected)


def test_a_capped_ratio_keeps_the_gradient_of_the_cap() -> None:
    """verl's: A sg(min(r, c)) grad log pi, which leaves tokens below the cap as they are."""
    free = make(4)
    capped = replace(free, options=msgspec.structs.replace(OPTIONS, loss_options=LossOptions(dppo_tv=1.0, dppo_cap=1)))
    free = replace(free, options=msgspec.structs.replace(OPTIONS, loss_options=LossOptions(dppo_tv=1.0)))
    beyond = free.mask & (free.ratio > 1)
    assert beyond.any() and (free.mask & ~beyond).any()
    expected = torch.where(free.mask, -free.weights * free.ratio.clamp(max=1.0) * free.advantages, 0.0)
    torch.testing.assert_close(surrogate_gradient("dppo_tv", capped), expected)
    assert not torch.allclose(surrogate_gradient("dppo_tv", free)[beyond], expected[beyond])


def test_rows_far_from_the_policy_that_sampled_them_only_learn_what_was_good() -> None:
    x = make(4)
    distances = [(x.behaviour - x.logprobs)[i][x.mask[i]].mean().item() for i in range(4)]
    limit = sorted(distances)[1]
    kept = near_policy(x, limit)
    for i, distance in enumerate(distances):
        expected = torch.ones(7, dtype=torch.bool) if distance <= limit else x.advantages[i] >= 0
        assert torch.equal(kept[i], expected)
    assert not kept[x.mask].all()


def test_the_tokens_of_highest_entropy_are_those_above_the_quantile() -> None:
    entropy = torch.tensor([[0.0, 3.0, 1.0, 9.0], [2.0, 4.0, 0.5, 9.0]])
    mask = entropy < 9
    expected = torch.tensor([[False, True, False, False], [False, True, False, False]])
    assert torch.equal(high_entropy(entropy, mask, 1 / 3), expected)
    assert torch.equal(high_entropy(entropy, mask, 1.0), mask)
    assert not high_entropy(entropy, torch.zeros_like(mask), 0.5).any()


def test_cispo_weighs_the_plain_gradient_by_the_clipped_ratio() -> None:
    x = make(4)
    ratio = (x.logprobs - x.proximal).exp().clamp(0.85, 1.3)
    expected = torch.where(x.mask, -x.weights * ratio * x.advantages, 0.0)
    torch.testing.assert_close(surrogate_gradient("cispo", x), expected)


def test_gspo_gives_every_token_the_gradient_of_its_sequence_ratio() -> None:
    x = make(4)
    gradient = surrogate_gradient("gspo", x)
    for i in range(4):
        row = [Token(x, i, t) for t in torch.nonzero(x.mask[i]).flatten().tolist()]
        s = math.exp(sum(math.log(k.r) for k in row) / len(row))
        for k, got in zip(row, gradient[i][x.mask[i]].tolist(), strict=True):
            clipped = (k.a > 0 and s > 1.3) or (k.a < 0 and s < 0.85)
            assert got == pytest.approx(0.0 if clipped else -k.w * s * k.a)


@pytest.mark.parametrize("name", TRAITS)
def test_masked_tokens_change_neither_value_nor_gradient(name: str) -> None:
    x = prepared(name, make(6))
    spoiled = replace(
        x,
        logprobs=torch.where(x.mask, x.logprobs, -40.0),
        proximal=torch.where(x.mask, x.proximal, 30.0),
        behaviour=torch.where(x.mask, x.behaviour, 5.0),
        advantages=torch.where(x.mask, x.advantages, 1e3),
        weights=torch.where(x.mask, x.weights, 1e6),
    )
    spoiled = prepared(name, replace(spoiled, selected=None))
    before, after = LOSSES[name].per_token(x), LOSSES[name].per_token(spoiled)
    torch.testing.assert_close(after[x.mask], before[x.mask])
    torch.testing.assert_close(surrogate_gradient(name, spoiled), surrogate_gradient(name, x))
    assert (surrogate_gradient(name, x)[~x.mask] == 0).all()


@pytest.mark.parametrize("name", [name for name in TRAITS if name not in SELECTING])
def test_rows_do_not_see_one_another_and_padding_does_not_matter(name: str) -> None:
    x = make(7)
    whole = LOSSES[name].per_token(x)
    for i in range(4):
        fields = ("logprobs", "proximal", "behaviour", "advantages", "weights", "mask", "free")
        one = replace(x, **{f: torch.nn.functional.pad(getattr(x, f)[i : i + 1], (0, 2)) for f in fields})
        torch.testing.assert_close(LOSSES[name].per_token(one)[0, :7][x.mask[i]], whole[i][x.mask[i]])


@pytest.mark.parametrize("name", [n for n, traits in TRAITS.items() if traits.uses_ratio])
def test_on_policy_every_loss_has_the_plain_policy_gradient(name: str) -> None:
    """A / 1: nothing is clipped, masked or penalised where the policy has not moved; gmpo spreads it over its row."""
    x = make(8, on_policy=True, token_wise=False)
    x = replace(x, options=msgspec.structs.replace(OPTIONS, loss_options=LossOptions()))
    selected = torch.zeros_like(x.mask)
    plain = torch.where(x.mask, -x.advantages, 0.0)
    torch.testing.assert_close(surrogate_gradient(name, replace(x, selected=selected)), plain)


def test_m2po_drops_the_fewest_and_most_extreme_tokens_that_keep_the_budget() -> None:
    for seed in range(10):
        x = make(seed)
        selected = LOSSES["m2po"].select(selecting(x))  # type: ignore[misc]
        squares = ((x.proximal - x.behaviour) ** 2)[x.mask]
        dropped = selected[x.mask]
        kept = squares[~dropped]
        assert not (selected & ~x.mask).any()
        assert kept.numel() == 0 or kept.mean().item() <= 0.03
        if dropped.any():
            smallest = squares[dropped].min()
            assert (kept <= smallest).all()
            assert torch.cat([kept, smallest[None]]).mean().item() > 0.03, "one fewer would have done"


def test_m2po_keeps_no_token_that_is_beyond_the_budget_by_itself() -> None:
    x = make(0)
    x = replace(x, behaviour=x.proximal - 1.0)
    assert torch.equal(LOSSES["m2po"].select(selecting(x)), x.mask)  # type: ignore[misc]


@pytest.mark.parametrize("name", SELECTING)
def test_the_same_tokens_are_picked_without_padding(name: str) -> None:
    padded, select = selecting(make(7)), LOSSES[name].select
    assert select is not None
    rows = Rows(torch.tensor([7, 7, 7, 3]))
    proximal, behaviour = rows.pack(padded.proximal), rows.pack(padded.behaviour)
    advantages, mask = rows.pack(padded.advantages), rows.pack(padded.mask)
    packed = SelectInputs(proximal, behaviour, advantages, mask, OPTIONS, padded.seed, rows)
    assert torch.equal(select(packed), rows.pack(select(padded)))


def test_clip_cov_draws_its_share_from_the_band_and_the_draw_is_the_seeds() -> None:
    x = make(1)
    select = LOSSES["clip_cov"].select
    assert select is not None
    selected = select(selecting(x, seed=1))
    tokens = int(x.mask.sum())
    mean_a, mean_p = x.advantages[x.mask].mean(), x.proximal[x.mask].mean()
    cov = (x.advantages - mean_a) * (x.proximal - mean_p)
    band = x.mask & (cov > 0.05) & (cov < 1.0)
    assert int(selected.sum()) == min(int(0.2 * tokens), int(band.sum()))
    assert not (selected & ~band).any()
    assert torch.equal(select(selecting(x, seed=1)), selected)
    assert any(not torch.equal(select(selecting(x, seed=s)), selected) for s in range(2, 8))


def test_kl_cov_takes_the_largest_covariances() -> None:
    x = make(2)
    select = LOSSES["kl_cov"].select
    assert select is not None
    selected = select(selecting(x))
    mean_a, mean_p = x.advantages[x.mask].mean(), x.proximal[x.mask].mean()
    cov = (x.advantages - mean_a) * (x.proximal - mean_p)
    assert int(selected.sum()) == int(0.2 * int(x.mask.sum()))
    assert cov[selected].min() >= cov[x.mask & ~selected].max()


@pytest.mark.parametrize("name", SELECTING)
def test_a_mini_batch_without_tokens_selects_nothing(name: str) -> None:
    x = make(2)
    select = LOSSES[name].select
    assert select is not None
    assert not select(selecting(replace(x, mask=torch.zeros_like(x.mask)))).any()


def test_without_dual_clip_ppo_is_unbounded_for_bad_tokens() -> None:
    x = make(9)
    free = replace(x, options=AlgorithmConfig(clip_low=0.15, clip_high=0.3))
    got, limited = LOSSES["ppo"].per_token(free), LOSSES["ppo"].per_token(x)
    beyond = x.mask & (x.advantages < 0) & (x.ratio > 1.5)
    assert beyond.any()
    torch.testing.assert_close(got[beyond], (-x.weights * x.ratio * x.advantages)[beyond])
    torch.testing.assert_close(limited[beyond], (-x.weights * 1.5 * x.advantages)[beyond])


@pytest.mark.parametrize("shift", [-500.0, 500.0])
@pytest.mark.parametrize("name", TRAITS)
def test_wild_log_probabilities_stay_finite(name: str, shift: float) -> None:
    logprobs = (make(9).logprobs + shift).requires_grad_()
    loss = LOSSES[name].per_token(prepared(name, replace(make(9), logprobs=logprobs)))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("name", ["dro", "ipo", "prime_rl", "kl_cov"])
def test_a_penalty_draws_a_token_back_however_far_it_has_moved(name: str) -> None:
    x = make(9)
    x = replace(x, advantages=torch.zeros_like(x.advantages), selected=torch.ones_like(x.mask))
    gradient = surrogate_gradient(name, replace(x, logprobs=x.proximal - 25.0))
    assert (gradient[x.mask] < 0).all()


def test_gspo_limits_the_mean_of_log_r_and_no_token_of_it() -> None:
    x = make(9)
    x = replace(
        x,
        mask=torch.ones_like(x.mask),
        free=torch.ones_like(x.mask),
        weights=torch.ones_like(x.weights),
        advantages=-torch.ones(4, 7),
    )
    one_far = torch.where(torch.arange(7) == 0, 35.0, 0.0).expand(4, 7)
    got = LOSSES["gspo"].per_token(replace(x, logprobs=x.proximal + one_far))
    torch.testing.assert_close(got, torch.full_like(got, math.exp(35.0 / 7)))
    got = LOSSES["gspo"].per_token(replace(x, logprobs=x.proximal + 12.0))
    torch.testing.assert_close(got, torch.full_like(got, math.exp(10.0)))


@pytest.mark.parametrize("seed", range(4))
def test_clipped_tokens_are_those_whose_gradient_the_clip_takes(seed: int) -> None:
    x = replace(make(seed), options=AlgorithmConfig(clip_low=0.15, clip_high=0.3))
    without_gradient = (surrogate_gradient("ppo", x) == 0) & x.mask
    assert without_gradient.any() and torch.equal(x.clipped & x.mask, without_gradient)
    outside = (x.ratio < 0.85) | (x.ratio > 1.3)
    assert (outside & x.mask & ~x.clipped).any(), "r may be outside on the side where the clip does not act"


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "prime_rl"])
def test_a_trust_region_may_reach_further_where_the_advantage_is_positive(name: str) -> None:
    x = make(9)
    one = LOSSES[name].per_token(x)
    wider = msgspec.structs.replace(OPTIONS.loss_options, dppo_high=0.9)
    two = LOSSES[name].per_token(replace(x, options=msgspec.structs.replace(OPTIONS, loss_options=wider)))
    changed = (one != two) & x.mask
    assert changed.any() and (x.advantages[changed] > 0).all()
    everywhere = msgspec.structs.replace(OPTIONS.loss_options, dppo_tv=0.9, dppo_kl=0.9)
    free = LOSSES[name].per_token(replace(x, options=msgspec.structs.replace(OPTIONS, loss_options=everywhere)))
    assert torch.equal(two[x.advantages > 0], free[x.advantages > 0])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_certain_tokens_are_within_the_trust_region_of_each_other(name: str) -> None:
    certain = replace(make(9), logprobs=torch.zeros_like(make(9).logprobs), proximal=torch.zeros_like(make(9).logprobs))
    assert torch.equal(LOSSES[name].per_token(certain), -certain.weights * certain.advantages)


@pytest.mark.parametrize("complement", [0.3, 1e-4, 1e-7, 1e-9, 0.0])
@pytest.mark.parametrize("factor", [1 - 1e-6, 1 + 1e-6])
def test_the_kl_of_a_nearly_certain_token_is_verls(complement: float, factor: float) -> None:
    """old (log old - log new) + (1 - old) log((1 - old + 1e-8) / (1 - new + 1e-8)), no probability being clamped."""
    old, new = math.log1p(-complement), math.log(0.6)
    p, q = math.exp(old), math.exp(new)
    distance = p * (old - new) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    options = LossOptions(dppo_kl=distance * factor)
    one = torch.ones(1, 1, dtype=torch.float64)
    x = LossInputs(
        logprobs=new * one,
        proximal=old * one,
        behaviour=old * one,
        advantages=-one,
        weights=one,
        mask=one.bool(),
        free=one.bool(),
        options=AlgorithmConfig(loss_options=options),
    )
    kept = LOSSES["dppo_kl"].per_token(x).item() != 0.0
    assert kept == (factor > 1)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_share_of_nothing_picks_nothing(loss: str) -> None:
    options = AlgorithmConfig(loss_options=LossOptions(clip_cov_share=0.0, kl_cov_share=0.0, clip_cov_low=-9.0))
    x = make(9)
    select = LOSSES[loss].select
    assert select is not None
    assert not select(SelectInputs(x.proximal, x.behaviour, x.advantages, x.mask, options, seed=0)).any()


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


@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
def test_models_with_different_numbers_of_outputs_are_compared_over_those_that_both_have(divergence: str) -> None:
    p, q = (torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    function = divergence_of(TeacherConfig(divergence=divergence))  # type: ignore[arg-type]
    expected = function(p.log_softmax(-1), q.log_softmax(-1))
    more = torch.cat([q, torch.full((2, 3, 2), 1.5, dtype=torch.float64)], -1)
    torch.testing.assert_close(function(p.log_softmax(-1), more.log_softmax(-1)), expected)
    assert (expected > 0).all() and function(p.log_softmax(-1), p.log_softmax(-1)).abs().max() < 1e-12


@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
def test_a_certain_teacher_has_a_finite_divergence_and_gradient(divergence: str) -> None:
    function = divergence_of(TeacherConfig(divergence=divergence))  # type: ignore[arg-type]
    logits = torch.tensor([[[0.0, 900.0, -900.0]]]).requires_grad_()
    value = function(logits.log_softmax(-1), torch.tensor([[[900.0, 0.0, -900.0]]]).log_softmax(-1))
    value.sum().backward()
    assert value.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()


def test_the_adaptive_coefficient_follows_the_target_within_its_limits() -> None:
    controller = KlController(KlConfig(coef=0.1, adaptive=AdaptiveKl(target=0.02, horizon=1000)))
    assert controller.after_step(0.021, 100) == {"kl/coef": 0.1}
    assert controller.coef == pytest.approx(0.1 * (1 + 0.05 * 0.1))
    before = controller.coef
    controller.after_step(5.0, 100)
    assert controller.coef == pytest.approx(before * (1 + 0.2 * 0.1))
    before = controller.coef
    controller.after_step(0.0, 100)
    assert controller.coef == pytest.approx(before * (1 - 0.2 * 0.1))


def test_the_coefficient_never_turns() -> None:
    controller = KlController(KlConfig(coef=0.1, adaptive=AdaptiveKl(horizon=5)))
    controller.after_step(0.0, 1000)
    assert controller.coef == 0.0


def test_a_fixed_coefficient_stays_and_none_is_not_reported() -> None:
    fixed = KlController(KlConfig(coef=0.1))
    fixed.after_step(5.0, 100)
    assert fixed.coef == 0.1
    assert KlController(KlConfig()).after_step(0.0, 100) == {}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    values, mask = torch.randn(7, 5).double(), torch.rand(7, 5) > 0.4
    mask[2] = False  # a row that the correction rejected
    return values, mask, torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0]).double()


def reference(mode: str, width: int) -> float:
    values, mask, weights = batch()
    rows = [[v for v, m in zip(*row, strict=True) if m] for row in zip(values.tolist(), mask.tolist(), strict=True)]
    tokens = [v for row in rows for v in row]
    sequences = sum(weights.tolist())
    sums = sum(w * sum(row) for w, row in zip(weights.tolist(), rows, strict=True))
    means = sum(w * sum(row) / len(row) for w, row in zip(weights.tolist(), rows, strict=True) if row)
    return {
        "token-mean": sum(tokens) / len(tokens),
        "token-sum": sum(tokens),
        "seq-mean-token-sum": sums / sequences,
        "seq-mean-token-sum-norm": sums / sequences / width,
        "seq-mean-token-mean": means / sequences,
    }[mode]


def test_config_and_registry_agree() -> None:
    assert set(get_args(Aggregation)) == AGGREGATIONS.keys()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_definitions(mode: str) -> None:
    values, mask, weights = batch()
    assert AGGREGATIONS[mode](values, mask, weights, count(mask, weights, 9)).item() == pytest.approx(
        reference(mode, 9), rel=1e-12
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_no_split_changes_value_or_gradient_and_masked_garbage_does_not_enter(mode: str) -> None:
    values, mask, weights = batch()
    counts = count(mask, weights, 9)
    whole = values.clone().requires_grad_()
    AGGREGATIONS[mode](whole, mask, weights, counts).backward()
    spoiled = torch.where(mask, values, 1e30)
    for parts in (1, 2, 4, 7):
        split = spoiled.clone().requires_grad_()
        chunks = zip(split.chunk(parts), mask.chunk(parts), weights.chunk(parts), strict=True)
        total = sum(AGGREGATIONS[mode](v, m, w, counts) for v, m, w in chunks)
        assert isinstance(total, Tensor)
        total.backward()
        assert total.item() == pytest.approx(reference(mode, 9), rel=1e-12)
        assert whole.grad is not None and split.grad is not None
        torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=1e-12)


def test_a_row_of_one_token_counts_with_its_whole_loss() -> None:
    values, mask = torch.tensor([[3.0, 9.0], [1.0, 2.0]]), torch.tensor([[True, False], [True, True]])
    weights = torch.ones(2)
    mean = AGGREGATIONS["seq-mean-token-mean"](values, mask, weights, count(mask, weights, 2))
    assert mean.item() == pytest.approx((3.0 + 1.5) / 2)


def test_a_row_in_which_nothing_trains_counts_in_a_mean_over_rows_and_not_over_tokens() -> None:
    _, mask, weights = batch()
    assert count(mask, weights, 9) == Counts(tokens=int(mask.sum()), sequences=6.0, width=9)
    assert count(torch.zeros_like(mask), weights, 9) == Counts(tokens=1, sequences=6.0, width=9)


def test_counts_of_a_mini_batch_without_episodes_that_train_divide_by_one() -> None:
    _, mask, weights = batch()
    assert count(torch.zeros_like(mask), torch.zeros_like(weights), 9) == Counts(tokens=1, sequences=1.0, width=9)


# Rows without padding.


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12)


@given(LENGTHS, st.randoms(use_true_random=False))
def test_rows_are_found_padded_and_packed_again(lengths: list[int], draw) -> None:
    rows, values = Rows(torch.tensor(lengths)), torch.arange(1, sum(lengths) + 1)
    pieces = values.split(lengths)
    chosen = draw.sample(range(len(lengths)), draw.randint(1, len(lengths)))
    assert rows.positions(chosen).tolist() == [n - 1 for i in chosen for n in pieces[i].tolist()]
    width = max(max(lengths), 1)
    assert rows.pad(values, chosen, width + 2, fill=-1).tolist() == [
        pieces[i].tolist() + [-1] * (width + 2 - lengths[i]) for i in chosen
    ]
    assert rows.pad_all(values).shape == (len(lengths), width)
    assert torch.equal(rows.pack(rows.pad_all(values)), values)
    sums = row_sums(rows.pad_all(values), None)
    assert torch.equal(row_sums(values, rows), sums)
    assert torch.equal(on_tokens(sums, rows), rows.pack(on_tokens(sums, None).expand(-1, width)))


@given(LENGTHS)
def test_a_function_of_each_row_gives_the_same_in_parts(lengths: list[int]) -> None:
    rows, values = Rows(torch.tensor(lengths)), torch.arange(sum(lengths))

    def function(padded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return padded.cumsum(1), padded.sum(1, keepdim=True) > 5

    whole = [rows.pack(result.expand(len(lengths), max(max(lengths), 1))) for result in function(rows.pad_all(values))]
    for got, expected in zip(by_rows(function, rows, values), whole, strict=True):
        assert torch.equal(got, expected)


@given(st.lists(st.sampled_from([0, 1, 5, 1000, PART // 3, PART, 2 * PART]), min_size=1, max_size=30))
def test_a_part_is_small_and_hardly_padded(lengths: list[int]) -> None:
    parts = [part.tolist() for part in Rows(torch.tensor(lengths)).similar()]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        sizes = [lengths[i] for i in part]
        assert len(part) == 1 or len(part) * max(sizes) <= PART
        assert 2 * min(sizes) >= max(sizes) or max(sizes) == 1


# Users' own functions train like built-in ones, and what does not fit is named before training starts.


HEAD = """
import torch
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.losses import PolicyLoss
"""

GOOD = (
    HEAD
    + """
def advantage(x):
    return torch.where(x.mask & x.scored[:, None], (x.rewards + x.parts["format"])[:, None], 0.0)

def loss(x):
    return -x.weights * x.advantages * (x.logprobs - x.proximal).exp()

def sequence_loss(x):
    length = x.mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (torch.where(x.mask, x.logprobs - x.proximal, 0.0).sum(1, keepdim=True) / length).exp()
    return -ratio * x.advantages

def correction(target, behaviour, mask, age):
    ratio = torch.where(mask, target - behaviour, 0.0).exp()
    return Corrected(ratio.clamp(max=1.5), mask & (age < 2), torch.zeros_like(mask, dtype=torch.uint8))

picky_loss = PolicyLoss(lambda x: torch.where(x.selected, loss(x), 0.0), lambda x: x.mask & (x.advantages != 0))
"""
)


@pytest.fixture
def write(tmp_path: Path):
    """``write(code)`` makes a module of it and gives its path."""

    def make(code: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(code)
        return path

    return make


def test_all_three_take_the_places_of_built_in_ones(write) -> None:
    path = write(GOOD)
    algorithm = AlgorithmConfig(advantage=f"{path}:advantage", loss=f"{path}:loss", correction=f"{path}:correction")
    built = build(RunConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), algorithm=algorithm))
    assert built.decoupled
    target = torch.tensor([[0.0, 1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    corrected = built.correct(target, torch.zeros(1, 2), mask, torch.tensor([[0, 3]]), mask)
    assert corrected.weights.tolist() == [[1.0, 1.5]] and corrected.keep.tolist() == [[True, False]]
    ends, rows = torch.tensor([0, 3, 0]), Rows(torch.tensor([2, 1]))  # a batch comes to it whole and padded
    packed = torch.tensor([0.0, 1.0, 1.0])
    corrected = built.correct(packed, torch.zeros(3), torch.ones(3, dtype=torch.bool), ends, None, rows)
    assert corrected.weights.tolist() == [1.0, 1.5, 1.5] and corrected.keep.tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["loss", "sequence_loss", "picky_loss"])
def test_losses_that_use_the_mask_are_accepted(write, name: str) -> None:
    loss = load_loss(f"{write(GOOD)}:{name}", AlgorithmConfig())
    assert (loss.select is not None) == (name == "picky_loss")
    if loss.select is not None:
        numbers, mask = torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3, dtype=torch.bool)
        rows = Rows(torch.tensor([1, 2]))
        packed = SelectInputs(numbers, numbers, numbers, mask, AlgorithmConfig(), seed=0, rows=rows)
        assert torch.equal(loss.select(packed), rows.pack(loss.select(packed.padded())))


def test_an_advantage_sees_the_policy_and_the_critic_if_there_is_one(write) -> None:
    path = write(
        """import torch
def advantage(x):
    return torch.where(x.mask & x.scored[:, None], x.rewards[:, None] - x.values + 0 * x.logprobs, 0.0)
"""
    )
    load_advantage(f"{path}:advantage", AdvantageOptions(), critic=True)
    with pytest.raises(ConfigError, match=r"algorithm.advantage: .* raised TypeError"):
        load_advantage(f"{path}:advantage", AdvantageOptions())


def test_a_correction_that_names_an_unknown_rule_is_refused(write) -> None:
    path = write(
        HEAD + "def judge(target, behaviour, mask, age):\n"
        "    return Corrected(torch.ones_like(target), mask, mask.to(torch.uint8) * 200)\n"
    )
    with pytest.raises(ConfigError, match=r"algorithm\.correction.*200"):
        load_correction(f"{path}:judge")


def test_built_in_functions_keep_the_contract() -> None:
    load_advantage("rl_async.trainer.algorithms.advantages:grpo", AdvantageOptions())
    for name in ("ppo", "reinforce"):
        load_loss(f"rl_async.trainer.algorithms.losses:{name}", AlgorithmConfig())


BAD_LOSSES = [
    ("return x.logprobs.mean()", "gave shape [] for a batch of shape [2, 3]"),
    ("return 0.5", "gave a float, not a tensor"),
    ("return x.mask.long()", "gave torch.int64, not a floating type"),
    ("return -x.advantages", "has no gradient with respect to x.logprobs"),
    ("return -x.logprobs.detach() * x.advantages", "has no gradient with respect to x.logprobs"),
    ("return (x.logprobs * 0).log()", "not finite"),
    ("return -x.logprobs * x.advantages.mean()", "changes the loss of tokens with what stands at tokens whose mask"),
    ("return (-x.logprobs.square()).cumsum(1).flip(1)", "changes the loss of tokens"),
    ("return -x.logprobs * x.advantages.mul_(2.0)", "changes x.advantages in place"),
    ("x.mask[0] = False\n    return -x.logprobs * x.advantages * x.mask", "changes x.mask in place"),
    ("return x.logits", "raised AttributeError on a tiny batch"),
    ("return (x.logprobs - x.logprobs.detach()) * x.advantages.sum()", "changes the gradient of tokens"),
]


@pytest.mark.parametrize(("body", "message"), BAD_LOSSES)
def test_a_loss_that_does_not_fit_is_named(write, body: str, message: str) -> None:
    path = write(f"def loss(x):\n    {body}\n")
    with pytest.raises(ConfigError) as caught:
        load_loss(f"{path}:loss", AlgorithmConfig())
    assert f"algorithm.loss: {path}:loss " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return x.rewards", "gave shape [5] for a batch of shape [5, 3]; give one per token"),
        ("return x.token_rewards / 0", "not finite"),
        ("return x.scored[:, None] * x.token_rewards.cumsum(1).flip(1)", "changes the advantage of tokens"),
        ("return x.mask * (x.rewards - x.rewards.mean())[:, None]", "gave an advantage to a row without a reward"),
        (
            "import torch\n    best = torch.stack([x.rewards[(x.groups == g) & x.scored].mean() for g in x.groups])\n"
            "    return x.mask * (x.rewards - best)[:, None]",
            "not finite",
        ),
        ("return x.values", "gave a NoneType, not a tensor"),
        ("return x.token_rewards.mul_(x.mask)", "changes x.token_rewards in place"),
    ],
)
def test_an_advantage_that_does_not_fit_is_named(write, body: str, message: str) -> None:
    path = write(f"def advantage(x):\n    {body}\n")
    with pytest.raises(ConfigError) as caught:
        load_advantage(f"{path}:advantage", AdvantageOptions())
    assert f"algorithm.advantage: {path}:advantage " in str(caught.value) and message in str(caught.value)


RULE = "torch.zeros_like(m, dtype=torch.uint8)"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("(t - b).exp()", "gave a Tensor, not a Corrected"),
        (f"Corrected((t - b).exp(), m.float(), {RULE})", "gave keep as torch.float32, not torch.bool"),
        ("Corrected((t - b).exp(), m, m)", "gave rule as torch.bool, not torch.uint8"),
        (f"Corrected((t - b).exp(), m | True, {RULE})", "keeps tokens whose mask is false"),
        (f"Corrected((t - b).exp()[:, :1], m, {RULE})", "gave weights as shape [2, 1]"),
        (f"Corrected(-(t - b).exp(), m, {RULE})", "gave a negative weight"),
        (f"Corrected((t + b).sum(1, keepdim=True).exp().expand_as(t), m, {RULE})", "changes the weight of tokens"),
        (f"Corrected((t - b).exp(), m & (a.max() < 3), {RULE})", "changes the verdict of tokens"),
        (f"Corrected(t.sub_(b).exp(), m, {RULE})", "changes argument 1 in place"),
    ],
)
def test_a_correction_that_does_not_fit_is_named(write, result: str, message: str) -> None:
    path = write(f"{HEAD}\ndef correction(t, b, m, a):\n    return {result}\n")
    with pytest.raises(ConfigError) as caught:
        load_correction(f"{path}:correction")
    assert f"algorithm.correction: {path}:correction " in str(caught.value) and message in str(caught.value)


def test_what_is_not_there_is_named(write) -> None:
    path = write("LOSS = 3\n")
    for reference, message in [
        (f"{path}:loss", "has no 'loss'"),
        (f"{path}:LOSS", "is of type int, not a function"),
        ("nowhere.py:loss", "no file nowhere.py"),
        ("no_such_package.losses:loss", "cannot import 'no_such_package.losses'"),
    ]:
        with pytest.raises(ConfigError, match=r"algorithm\.loss") as caught:
            load_loss(reference, AlgorithmConfig())
        assert message in str(caught.value)
