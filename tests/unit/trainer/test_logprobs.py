"""Log-probabilities from hidden states, and the kernels of a model's layers."""

import sys

import pytest
import torch
from torch import Tensor

from rl_async.errors import UserError
from rl_async.trainer.families import LogitForm
from rl_async.trainer.model import LogitHead, apply_liger, head_logits, token_stats

ROWS, HIDDEN, VOCAB = 7, 5, 11
FORMS = [LogitForm(), LogitForm(scale=0.25), LogitForm(softcap=1.5), LogitForm(scale=3.0, softcap=2.0)]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, targets and temperatures."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    targets = torch.randint(0, VOCAB, (ROWS,), generator=draw)
    return hidden, weight, bias, targets, torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)


def dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm, temperature: Tensor) -> Tensor:
    """log softmax [N, V], written down once more."""
    z = hidden @ weight.T + (0.0 if bias is None else bias)
    z = z * form.scale
    if form.softcap is not None:
        z = form.softcap * torch.tanh(z / form.softcap)
    return (z / temperature[:, None]).log_softmax(-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("requested", [(), ("entropy",), ("sum_squares",), ("entropy", "sum_squares")])
@pytest.mark.parametrize("rows_at_once", [1, 3, ROWS, 100])
def test_values_and_gradients_equal_the_dense_ones(
    form: LogitForm, requested: tuple[str, ...], rows_at_once: int
) -> None:
    hidden, weight, bias, targets, temperature = inputs()
    weights = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = token_stats(
        hidden,
        LogitHead(weight, bias, form),
        targets,
        temperature,
        frozenset(requested),
        chunk_logits=rows_at_once * VOCAB,
    )
    logp = dense(hidden, weight, bias, form, temperature)
    expected = {
        "logprobs": logp.gather(1, targets[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "sum_squares": (2 * logp).exp().sum(-1),
    }
    found = {name: value for name, value in got._asdict().items() if value is not None}
    assert found.keys() == {"logprobs", *requested}
    for name, value in found.items():
        assert torch.allclose(value, expected[name], atol=1e-12), name
    gradients = [
        torch.autograd.grad(
            sum((w * values[name]).sum() for w, name in zip(weights, sorted(found), strict=False)),  # type: ignore[arg-type]
            (hidden, weight, bias),
        )
        for values in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("name", ["entropy", "sum_squares"])
def test_a_loss_of_one_statistic_alone_has_its_gradient(name: str) -> None:
    hidden, weight, bias, targets, temperature = inputs()
    got = token_stats(hidden, LogitHead(weight, bias, LogitForm()), targets, temperature, frozenset({name}))
    logp = dense(hidden, weight, bias, LogitForm(), temperature)
    expected = -(logp.exp() * logp).sum(-1) if name == "entropy" else (2 * logp).exp().sum(-1)
    one, other = (torch.autograd.grad(x.sum(), hidden)[0] for x in (getattr(got, name), expected))
    assert torch.allclose(one, other, atol=1e-12)


def test_only_what_trains_gets_a_gradient() -> None:
    hidden, weight, _, targets, temperature = inputs()
    weight = weight.detach()
    token_stats(hidden, LogitHead(weight, None, LogitForm()), targets, temperature).logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_bfloat16_gives_float32_numbers_and_sums_chunks_in_float32() -> None:
    hidden, weight, _, targets, temperature = inputs(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    got = token_stats(hidden, LogitHead(weight, None, LogitForm()), targets, temperature.float(), chunk_logits=VOCAB)
    assert got.logprobs.dtype == torch.float32
    got.logprobs.sum().backward()
    logp = dense(*exact, None, LogitForm(), temperature)  # type: ignore[arg-type]
    logp.gather(1, targets[:, None]).sum().backward()
    for one, other in zip((hidden, weight), exact, strict=True):
        assert one.grad is not None and other.grad is not None
        assert one.grad.dtype == torch.bfloat16
        assert (one.grad.double() - other.grad).norm() < 0.02 * other.grad.norm()


@pytest.mark.parametrize("form", FORMS)
def test_all_logits_at_once_carry_gradient_too(form: LogitForm) -> None:
    hidden, weight, bias, _, temperature = inputs()
    one = head_logits(hidden, LogitHead(weight, bias, form), temperature).log_softmax(-1)
    other = dense(hidden, weight, bias, form, temperature)
    assert torch.allclose(one, other, atol=1e-12)
    factor = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    gradients = [torch.autograd.grad((x * factor).sum(), (hidden, weight, bias)) for x in (one, other)]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*gradients, strict=True))


def test_liger_is_refused_on_a_cpu_and_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"trainer\.kernels=liger"):
        apply_liger(None, "cpu")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(UserError, match=r"trainer\.kernels=liger.*pip install 'rl-async\[liger\]'"):
        apply_liger(None, "cuda:0")
