"""One kernel of AdamW does what its single operations do, and Muon what torch's own does."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.backend import ADAM_BETA1, learning_rate_factor
from rl_async.trainer.compute_type import TOKENS, TRIES, measure_rates
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import Headed, skeleton
from rl_async.trainer.optimizers import (
    BLOCK,
    CODES,
    MOMENTUM,
    SCALES,
    adamw_form,
    allocate_state,
    build_optimizer,
    parameter_groups,
    torchao,
)
from tests.support.families import config_of
from tests.support.torchao import add_torchao

STEPS = 5
RATE, DECAY = 0.01, 0.1
# Roundings of one step in either form: the decay, two moments of three each, a root, two corrections, a quotient.
ROUNDINGS = 16


def parameters() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in ((33, 17), (65,), (3, 5, 7))]


def train(optimizer: torch.optim.Optimizer, those: list[Tensor], steps: int = STEPS) -> None:
    """Take steps on gradients that do not depend on the weights, so that nothing amplifies a rounding."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in those:
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter)
        optimizer.step()
        optimizer.zero_grad()


def test_a_cpu_has_the_fused_kernel_and_an_unknown_device_has_not() -> None:
    assert adamw_form("cpu") == adamw_form("cuda:3") == {"fused": True}
    assert adamw_form("meta") == {"foreach": True}


def test_the_fused_kernel_differs_by_roundings() -> None:
    """From single operations by those of either, and from the same in float64."""
    fused, plain, exact = parameters(), parameters(), [p.detach().double().requires_grad_() for p in parameters()]
    train(build_optimizer([{"params": fused}], TrainerConfig(learning_rate=RATE, weight_decay=DECAY), "cpu"), fused)
    for those in (plain, exact):
        options = {"lr": RATE, "betas": (0.9, 0.95), "weight_decay": DECAY, "foreach": False}
        train(torch.optim.AdamW(those, **options), those)  # type: ignore[arg-type]
    for got, single, right in zip(fused, plain, exact, strict=True):
        # A step moves a weight by up to about the rate, and rounds the weight itself once or twice.
        bound = STEPS * torch.finfo(torch.float32).eps * (ROUNDINGS * RATE + 2 * right.abs())
        assert ((got - right).abs() <= bound).all() and ((got - single).abs() <= 2 * bound).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_allocated_state_is_that_of_no_step_and_changes_no_weight(device: str) -> None:
    """On ``meta``, whose AdamW is not fused, the weights are on the CPU all the same."""
    those = parameters()
    optimizer = build_optimizer([{"params": those, "lr": 0.5}], TrainerConfig(weight_decay=DECAY), device)
    allocate_state(optimizer)
    assert all(a.equal(b) for a, b in zip(those, parameters(), strict=True))
    assert all(p.grad is None for p in those) and [g["lr"] for g in optimizer.param_groups] == [0.5]
    for state in optimizer.state.values():
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()


def test_muon_is_torch_s_for_matrices_and_stacks_of_them_beside_adamw() -> None:
    """Bit by bit in twenty steps, since both do the same operations."""

    def drawn() -> list[Tensor]:
        draw = torch.Generator().manual_seed(2)
        shapes = ((6, 9), (9, 6), (4, 6, 9), (65,), (2, 12, 9), (2, 6, 18))
        return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]

    def apart(tensors: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that Muon orthogonalises: of the last two stacks each expert's gate and up projection."""
        halves = [half for expert in tensors[4] for half in (expert[:6], expert[6:])]
        return [*tensors[:2], *tensors[2], *halves, *(expert[:, i::2] for expert in tensors[5] for i in range(2))]

    ours, theirs = drawn(), drawn()
    config = TrainerConfig(optimizer="muon", learning_rate=RATE, weight_decay=DECAY)
    groups: list[dict[str, Any]] = [{"params": ours[3:4]}, {"params": ours[:3], "muon": True}]
    groups.append({"params": ours[4:5], "muon": True, "joined": "halves"})
    groups.append({"params": ours[5:], "muon": True, "joined": "alternate"})
    train(build_optimizer(groups, config, "cpu"), ours, 20)

    plain = [tensor.detach().clone().requires_grad_() for tensor in apart(theirs)]
    muon = torch.optim.Muon(plain, lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    adamw = build_optimizer([{"params": theirs[3:4]}], TrainerConfig(learning_rate=RATE, weight_decay=DECAY), "cpu")
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        gradients = [torch.randn(parameter.shape, generator=draw) for parameter in theirs]
        for parameter, gradient in zip(plain, apart(gradients), strict=True):
            parameter.grad = gradient.clone()
        theirs[3].grad = gradients[3]
        muon.step()
        adamw.step()
    assert all(got.equal(right) for got, right in zip(apart(ours), plain, strict=True)) and ours[3].equal(theirs[3])
    moved = [(got - first).abs().max() for got, first in zip(ours, drawn(), strict=True)]
    assert min(moved) > RATE


@pytest.mark.parametrize(("kind", "joined"), [("qwen3_moe", "halves"), ("gpt_oss", "alternate")])
def test_muon_takes_gate_and_up_of_experts_apart_and_leaves_biases_to_adamw(kind: str, joined: str) -> None:
    model = Headed(skeleton(AutoModelForCausalLM, config_of(kind)), "policy")
    names = {parameter: name for name, parameter in model.lm.named_parameters()}
    groups = parameter_groups(model, list(model.lm.named_parameters()), TrainerConfig(optimizer="muon"))
    of_group = {group.get("joined", group.get("muon")): {names[one] for one in group["params"]} for group in groups}
    assert of_group.keys() == {None, True, joined}
    assert of_group[joined] == {name for name in names.values() if name.endswith(".experts.gate_up_proj")}
    assert not any(name.endswith("bias") for name in of_group[True])
    assert any(name.endswith(".experts.down_proj") for name in of_group[True])


def test_moments_of_another_optimizer_are_refused(model_folder: Path, tmp_path: Path, one_rank: None) -> None:
    kinds = ("muon", "adamw")
    models = {
        kind: Fsdp2Backend(str(model_folder), "float32", "cpu", TrainerConfig(optimizer=kind, checkpoint_hf=False))
        for kind in kinds
    }
    for kind, model in models.items():
        assert model.optimizer is not None
        allocate_state(model.optimizer)
        (tmp_path / kind).mkdir()
        model.save(tmp_path / kind)
        model.load(tmp_path / kind)
    for one, other in (kinds, kinds[::-1]):
        with pytest.raises(UserError, match=r"trainer\.optimizer"):
            models[one].load(tmp_path / other)


# Importing Megatron-Core takes seconds.
@pytest.mark.slow
# It names the packages that it does without.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not here")
def test_megatron_refuses_muon_s_moments(tmp_path: Path) -> None:
    from rl_async.trainer.megatron.weights import restore

    (tmp_path / "shards").mkdir()
    save_file({"lm.layer.weight|momentum_buffer": torch.zeros(1)}, tmp_path / "shards" / "shard-00001.safetensors")
    with pytest.raises(UserError, match=r"trainer\.optimizer=muon"):
        restore(None, None, tmp_path)  # type: ignore[arg-type]


# Learning rates by optimizer step.


def test_linear_decay_ends_with_the_last_optimizer_step_of_all_epochs() -> None:
    factor = learning_rate_factor(TrainerConfig(steps=5, minibatches=2, epochs=3, schedule="linear"))
    assert [factor(0), factor(15), factor(30), factor(31)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_cosine_decay_is_half_way_in_the_middle_and_warm_up_rises_from_its_first_step() -> None:
    factor = learning_rate_factor(TrainerConfig(steps=5, minibatches=2, schedule="cosine", warmup_steps=4))
    assert [factor(0), factor(3), factor(7), factor(10)] == pytest.approx([0.25, 1.0, 0.5, 0.0])


# The measurement of a processor's rates, on a clock that the test sets.


HIDDEN, INNER = 8, 24
OPERATIONS = 3 * 2 * TOKENS * HIDDEN * INNER


def clock_of(durations: list[float]) -> Callable[[], float]:
    """A clock on which the products take these seconds, one after another; more of them than that fail."""

    def times() -> Iterator[float]:
        now = 0.0
        for seconds in durations:
            yield now
            now += seconds
            yield now

    return times().__next__


def test_types_alternate_and_count_with_their_fastest_try() -> None:
    float32, bfloat16 = [9.0, 3.0, 2.0, 4.0, 5.0, 6.0], [8.0, 7.0, 6.0, 1.0, 5.0, 4.0]
    durations = [seconds for pair in zip(float32, bfloat16, strict=True) for seconds in pair]
    assert len(float32) == 1 + TRIES
    rates = measure_rates(HIDDEN, INNER, clock_of(durations))
    assert rates == pytest.approx({"float32": OPERATIONS / 2e9, "bfloat16": OPERATIONS / 1e9})


def test_a_type_that_is_much_slower_is_tried_once() -> None:
    rates = measure_rates(HIDDEN, INNER, clock_of([1.0, 4.1, *[0.5] * TRIES]))
    assert rates == pytest.approx({"float32": OPERATIONS / 0.5e9, "bfloat16": OPERATIONS / 4.1e9})


def test_a_slow_first_try_of_a_few_milliseconds_is_no_verdict() -> None:
    durations = [0.001, 0.09, *[0.001, 0.0005] * TRIES]
    rates = measure_rates(HIDDEN, INNER, clock_of(durations))
    assert rates["bfloat16"] == pytest.approx(2 * rates["float32"])


# AdamW with moments in 8 bits steps as AdamW does, within what its blocks round, and keeps about a quarter.


ADAMW_8BIT_STEPS = 20
ADAMW_8BIT_RATE, ADAMW_8BIT_DECAY, BETA2 = 0.01, 0.1, 0.95
CONFIG = TrainerConfig(
    optimizer="adamw_8bit", learning_rate=ADAMW_8BIT_RATE, weight_decay=ADAMW_8BIT_DECAY, beta2=BETA2
)
# Codes stand for numbers from -1 or 0 to 1, and those from 0.1 on for the middles of 64 or 128 equal intervals; smaller
# ones are closer (arXiv:1511.04561, section 3.1). The signed code lacks -1, which is as far from the next number.
ROUNDING = {"exp_avg": 0.9 / 64 / 2, "exp_avg_sq": 0.9 / 128 / 2}


@pytest.fixture
def found() -> None:
    """torchao, whose import names the parts that it does without."""
    add_torchao()


def gradients(shape: torch.Size) -> Iterator[Tensor]:
    """Of one sign and about one size for each weight: small numbers of a block would be lost beside large ones."""
    draw = torch.Generator().manual_seed(1)
    signs = torch.randn(shape, generator=draw).sign()
    for _ in range(ADAMW_8BIT_STEPS):
        yield signs * (0.5 + 0.5 * torch.rand(shape, generator=draw))


def rounded(moment: Tensor, error: Tensor, name: str) -> Tensor:
    """Return how far the stored moment may be from an exact one, of which the computed one differs by ``error``."""
    largest = (moment.abs() + error).view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).reshape(moment.shape)
    return error + ROUNDING[name] * largest


@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_of_adamw_within_what_blocks_round(found: None) -> None:
    """Exact moments and the most that the codes' roundings add up to give an interval for every step."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(24, 512, generator=draw)
    got, exact = first.clone().requires_grad_(), first.double().requires_grad_()
    ours = build_optimizer([{"params": [got]}], CONFIG, "cpu")
    options = {"lr": ADAMW_8BIT_RATE, "betas": (ADAM_BETA1, BETA2), "weight_decay": ADAMW_8BIT_DECAY}
    theirs = torch.optim.AdamW([exact], **options)  # type: ignore[arg-type]
    mean, square, off_mean, off_square, bound = (torch.zeros(first.shape, dtype=torch.float64) for _ in range(5))
    for step, gradient in enumerate(gradients(first.shape), 1):
        got.grad, exact.grad = gradient, gradient.double()
        ours.step()
        theirs.step()
        mean, off_mean = mean.lerp(gradient.double(), 1 - ADAM_BETA1), ADAM_BETA1 * off_mean
        square, off_square = square.lerp(gradient.double().square(), 1 - BETA2), BETA2 * off_square
        corrected = (1 - BETA2**step) ** 0.5 / (1 - ADAM_BETA1**step)
        right = mean / square.sqrt()
        corners = [(mean + a * off_mean) / (square + b * off_square).sqrt() - right for a in (-1, 1) for b in (-1, 1)]
        bound += ADAMW_8BIT_RATE * corrected * torch.stack(corners).abs().amax(0)
        off_mean, off_square = rounded(mean, off_mean, "exp_avg"), rounded(square, off_square, "exp_avg_sq")
    # And what float32 rounds, as in test_optimizers.py.
    bound += ADAMW_8BIT_STEPS * torch.finfo(torch.float32).eps * (16 * ADAMW_8BIT_RATE + 2 * exact.detach().abs())
    off = (got.detach() - exact.detach()).abs()
    assert (off <= bound).all() and off.max() > ADAMW_8BIT_STEPS * torch.finfo(torch.float32).eps * 4
    assert (exact.detach() - first).abs().min() > 3 * bound.max(), "the bound tells a step from none"


@pytest.mark.filterwarnings("ignore")
def test_moments_of_matrices_take_a_quarter_and_those_of_vectors_stay(found: None) -> None:
    """The number that the plan of memory counts with (tests/unit/launcher/plan/test_memory.py)."""
    shapes = ((512, 64), (3, 64, 32), (8192,), (63, 64), (9, 7, 100))
    those = [torch.zeros(shape).requires_grad_() for shape in shapes]
    optimizer = build_optimizer([{"params": those}], CONFIG, "cpu")
    for parameter in those:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [{name: x.nbytes for name, x in optimizer.state[p].items() if name != "step"} for p in those]
    for state, parameter in zip(kept[:2], those[:2], strict=True):
        assert state.keys() == {name + part for name in ROUNDING for part in (CODES, SCALES)}
        assert sum(state.values()) == 2 * (parameter.numel() + 4 * parameter.numel() // 256)
    # A vector, one with fewer numbers than 4096, and one that is not whole blocks.
    for state, parameter in zip(kept[2:], those[2:], strict=True):
        assert state == dict.fromkeys(ROUNDING, 4 * parameter.numel())


def test_without_torchao_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    with pytest.raises(UserError, match=r"trainer\.optimizer=adamw_8bit.*rl-async\[torchao\]"):
        build_optimizer([{"params": [torch.zeros(1)]}], CONFIG, "cpu")
