"""AdamW with moments in 8 bits steps as AdamW does, within what its blocks round, and keeps about a quarter."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.backend import ADAM_BETA1
from rl_async.trainer.optimizers import BLOCK, CODES, SCALES, build_optimizer, torchao
from tests.support.torchao import add_torchao

STEPS = 20
RATE, DECAY, BETA2 = 0.01, 0.1, 0.95
CONFIG = TrainerConfig(optimizer="adamw_8bit", learning_rate=RATE, weight_decay=DECAY, beta2=BETA2)
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
    for _ in range(STEPS):
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
    options = {"lr": RATE, "betas": (ADAM_BETA1, BETA2), "weight_decay": DECAY}
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
        bound += RATE * corrected * torch.stack(corners).abs().amax(0)
        off_mean, off_square = rounded(mean, off_mean, "exp_avg"), rounded(square, off_square, "exp_avg_sq")
    # And what float32 rounds, as in test_optimizers.py.
    bound += STEPS * torch.finfo(torch.float32).eps * (16 * RATE + 2 * exact.detach().abs())
    off = (got.detach() - exact.detach()).abs()
    assert (off <= bound).all() and off.max() > STEPS * torch.finfo(torch.float32).eps * 4
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
