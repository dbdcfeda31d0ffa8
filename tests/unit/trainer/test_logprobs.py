"""Log-probabilities from hidden states, and the kernels of a model's layers."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rl_async.configs.schema.data import FLASH_ATTN, OverrideConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.launcher.sources import overridden_folder
from rl_async.trainer import attention, model, packing
from rl_async.trainer.attention import PACKAGES, VARLEN, package_kernel, packed_attention
from rl_async.trainer.backend import Outputs
from rl_async.trainer.families import LogitForm
from rl_async.trainer.fsdp2 import KEPT_OF_PACKAGES, Fsdp2Backend, keeping
from rl_async.trainer.model import LogitHead, _add_product, apply_liger, head_logits, token_stats
from rl_async.trainer.packing import Tensors, collate, row_calls
from tests.conftest import VOCAB as MODEL_VOCAB
from tests.conftest import make_rows
from tests.support.batches import by_borders
from tests.support.flash_attn import varlen_2, varlen_3
from tests.support.rounding import assert_near, pass_rounding, rounding

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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows_at_once", [2, ROWS])
def test_kept_tokens_are_a_distribution_of_their_own(form: LogitForm, rows_at_once: int) -> None:
    """Against autograd through the kept logits alone, in float64. The first row keeps all, the last only its target."""
    hidden, weight, bias, targets, temperature = inputs()
    kept = torch.full((ROWS, 4), -1)
    for row in range(1, ROWS):
        others = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(row))[: row % 4]
        chosen = torch.cat([targets[row, None], others]).unique() if row < ROWS - 1 else targets[row, None]
        kept[row, : len(chosen)] = chosen
    every = frozenset({"entropy", "sum_squares"})
    got = token_stats(
        hidden, LogitHead(weight, bias, form), targets, temperature, every, kept, chunk_logits=rows_at_once * VOCAB
    )
    whole, expected = dense(hidden, weight, bias, form, temperature), dict[str, list[Tensor]]()
    for row, target in enumerate(targets):
        places = kept[row][kept[row] >= 0] if row else torch.arange(VOCAB)
        logp = whole[row, places].log_softmax(-1)
        expected.setdefault("logprobs", []).append(logp[places == target][0])
        expected.setdefault("entropy", []).append(-(logp.exp() * logp).sum())
        expected.setdefault("sum_squares", []).append((2 * logp).exp().sum())
    for name, values in got._asdict().items():
        assert torch.allclose(values, torch.stack(expected[name]), atol=1e-12), name
        weights = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
        pairs = zip(
            torch.autograd.grad((weights * values).sum(), (hidden, weight, bias), retain_graph=True),
            torch.autograd.grad(
                (weights * torch.stack(expected[name])).sum(), (hidden, weight, bias), retain_graph=True
            ),
            strict=True,
        )
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in pairs), name
    assert got.logprobs[-1] == 0


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that operations under it made and that are still there: at most ``most``."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._now, self._alive = 0, 0, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                storage = tensor.untyped_storage()
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self._now)
        return found

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size


REAL_VOCAB, REAL_ROWS, CHUNK, BLOCK = 151_936, 100, 8, 24


@pytest.mark.parametrize("vocab", [11, 1000, pytest.param(REAL_VOCAB, marks=pytest.mark.slow)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_products_of_many_chunks_are_those_of_each_in_less_memory(vocab: int, softcap: float | None) -> None:
    """As on an accelerator: gradients of several chunks are kept for one product. Rows do not divide evenly."""
    draw, form = torch.Generator().manual_seed(0), LogitForm(softcap=softcap)
    hidden = torch.randn(REAL_ROWS, HIDDEN, generator=draw)
    weight = torch.randn(vocab, HIDDEN, generator=draw)
    targets = torch.randint(0, vocab, (REAL_ROWS,), generator=draw)
    temperature = torch.linspace(0.5, 2.0, REAL_ROWS)
    requested = frozenset({"entropy", "sum_squares"})

    def gradients(block: int) -> tuple[list[Tensor], int]:
        given = [x.clone().requires_grad_() for x in (hidden, weight)]
        stats = token_stats(
            given[0],
            LogitHead(given[1], None, form),
            targets,
            temperature,
            requested,
            chunk_logits=CHUNK * vocab,
            product_rows=block,
        )
        assert stats.entropy is not None and stats.sum_squares is not None
        with Held() as held:
            (stats.logprobs + stats.entropy + stats.sum_squares).mean().backward()
        return [x.grad for x in given if x.grad is not None], held.most

    (one, _), (other, most) = (gradients(block) for block in (0, BLOCK))
    for name, a, b in zip(("hidden", "weight"), one, other, strict=True):
        print(f"V={vocab} {name}: old - new {(a - b).abs().max():.1e} of {a.abs().max():.1e}")
        assert (a - b).abs().max() <= 1e-6
    # Beside the gradients of the weight and of a block: with entropy and squares five numbers for each logit of a
    # chunk, and one more with a cap.
    chunk = 4 * CHUNK * vocab
    assert most <= 4 * (BLOCK * vocab + 2 * weight.numel()) + (6 if softcap else 5) * chunk + 4 * 1024 * HIDDEN


def test_an_accelerator_adds_bfloat16_products_in_float32_without_a_copy() -> None:
    """Without elements, as a CPU has no such product: what this version of PyTorch checks of its arguments."""
    total = torch.empty(VOCAB, HIDDEN, device="meta")
    dz, hidden = (torch.empty(ROWS, n, dtype=torch.bfloat16, device="meta") for n in (VOCAB, HIDDEN))
    with Held() as held:
        _add_product(total, dz, hidden)
    # Its tensors, which are counted as they come by, and nothing more.
    assert held.most <= total.nbytes + dz.nbytes + hidden.nbytes


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


# Compiled layers: one graph each, for rows of any lengths, with the gradients of layers that are not.
# Tracing with symbolic sizes takes half a minute. Dynamo itself looks at gradients of tensors that have none.


DIFFERENT = 20


def batch_of(lengths: Sequence[int]) -> Tensors:
    draw, shape = np.random.default_rng(list(lengths)), (len(lengths), max(lengths))
    return Tensors(
        tokens=torch.from_numpy(draw.integers(0, MODEL_VOCAB, shape)),
        lengths=torch.tensor(lengths),
        mask=torch.arange(1, shape[1]) < torch.tensor(lengths)[:, None],
        temperature=torch.ones(len(lengths), 1, 1),
    )


def likelihood(batch: Tensors, _: int, outputs: Outputs) -> Tensor:
    assert outputs.logprobs is not None
    return -torch.where(batch.mask, outputs.logprobs, 0.0).sum()


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace and differentiate graphs as any compiler gets them, without the minutes of one."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch.compiler.reset()


def gradients(backend: Fsdp2Backend, batch: Tensors) -> dict[str, Tensor]:
    backend.add_gradients([batch], functools.partial(likelihood, batch))
    found = {n: p.grad.to_local().clone() for n, p in backend.model.named_parameters()}  # type: ignore[union-attr]
    backend.model.zero_grad()
    return found


def assert_one_graph_for_all_lengths(model_folder: Path, selective: bool = False) -> None:
    options = TrainerConfig(kernels="compile", activation_checkpointing="selective" if selective else False)
    compiled, plain = (
        Fsdp2Backend(str(model_folder), "float32", "cpu", config) for config in (options, TrainerConfig())
    )
    draw = np.random.default_rng(0)
    # One row and many, short and beyond the least length that kernels are told.
    rows = [[9, 7, 7], [5], [1500, 3], *(draw.integers(2, 60, draw.integers(1, 12)).tolist() for _ in range(DIFFERENT))]
    graphs = set()
    for lengths in rows:
        batch = batch_of(lengths)
        found, expected = gradients(compiled, batch), gradients(plain, batch)
        graphs.add(counters["stats"]["unique_graphs"])
        for name, gradient in expected.items():
            size = gradient.abs().max().item()
            assert_near(found[name], gradient, rounding(max(1.0, size), terms=sum(lengths)), name)
    assert not counters["graph_break"], counters["graph_break"]
    # Layers share a graph.
    assert graphs == {1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("selective", [False, True])
def test_layers_compile_once_on_a_cpu(model_folder: Path, one_rank: None, tracing: None, selective: bool) -> None:
    assert_one_graph_for_all_lengths(model_folder, selective)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_layers_compile_once_with_a_kernel_for_rows(
    model_folder: Path, one_rank: None, tracing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "has_flash_attention", lambda device: True)
    monkeypatch.setattr(attention, "_kernel_takes", lambda query, value: True)
    monkeypatch.setattr(attention, "_kernel", by_borders)
    assert_one_graph_for_all_lengths(model_folder)


# FlashAttention's packages are called as their sources document it (tests/support/flash_attn.py stands in).


NEEDS = r"model\.override\.attention=flash_attn"
LENGTHS = ((5, 2), (2, 1))


@functools.wraps(varlen_3)
def with_sums(*given: Any, **named: Any) -> tuple[Tensor, None]:
    """Return what some builds of version 3 do: the result, and behind it the sums of the softmax."""
    return varlen_3(*given, **named), None


def install(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Have these packages, by name, with this varlen function each, and of ``PACKAGES`` no other."""
    found = {name: ModuleType(name) for name in functions}
    for name, function in functions.items():
        setattr(found[name], VARLEN, function)
        monkeypatch.setitem(sys.modules, name, found[name])
    monkeypatch.setattr(attention, "find_spec", found.get)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("version", [varlen_2, varlen_3, with_sums])
def test_one_call_for_the_row_computes_what_one_for_each_sequence_does(
    version: Callable[..., Any], window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"flash_attn": varlen_2} | ({} if version is varlen_2 else {"flash_attn_interface": version})
    install(monkeypatch, **both)
    assert package_kernel() is version
    # The stand-in computes in any type, a kernel only in bfloat16.
    monkeypatch.setattr(attention, "_kernel_takes", lambda query, value: True)
    row, draw = row_calls(LENGTHS, torch.device("cpu")), torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = (torch.randn(1, heads, 12, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    seen = torch.randn(1, 12, 4, 8, generator=draw)
    calls: list[dict[str, Any]] = []

    def counted(*given: Tensor, **named: Any) -> Tensor:
        calls.append(named)
        return package_kernel()(*given, **named)

    def attend(has_kernel: bool) -> list[Tensor]:
        given = {"packed_row": replace(row, has_kernel=has_kernel), "sliding_window": window, "softcap": softcap}
        out, _ = packed_attention(module, q, k, v, None, scaling=0.3, by_package=counted, **given)  # type: ignore[arg-type]
        return [out, *torch.autograd.grad(out, (q, k, v), seen)]

    expected = attend(False)
    assert not calls
    found = attend(True)
    assert len(calls) == 1
    # Outputs are averages of values; the scores, sums of 8 products, change their weights. A gradient sums up to 12
    # tokens' parts, each a product of three such numbers.
    size = max(x.detach().abs().max().item() for x in (q, k, v, seen))
    scores = 0.3 * 8 * size**2
    assert_near(found[0], expected[0], 2 * rounding(size * max(1.0, 2 * scores), terms=8))
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert_near(one, other, 2 * rounding(size**3 * max(1.0, 2 * scores), terms=8 * 12))


@pytest.mark.parametrize("name", KEPT_OF_PACKAGES)
def test_selective_checkpointing_attends_once(name: str) -> None:
    """An operation of that name stands in for the package's, called as there from a function with its own gradient."""
    space, operation = name.split("::")
    calls: list[Tensor] = []

    def attend(q: Tensor) -> Tensor:
        calls.append(q)
        return 2 * q

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor) -> Tensor:
            out: Tensor = getattr(getattr(torch.ops, space), operation)(q)
            ctx.save_for_backward(q, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            q, out = ctx.saved_tensors
            return gradient * out / q

    def layer(x: Tensor) -> Tensor:
        kept: Tensor = Attention.apply((x + 1).exp()).log()  # type: ignore[no-untyped-call]
        return kept

    with torch.library._scoped_library(space, "FRAGMENT") as library:
        library.define(f"{operation}(Tensor q) -> Tensor")
        library.impl(operation, attend, "CPU")
        for options, times in (({"context_fn": keeping}, 1), ({}, 2)):
            calls.clear()
            x = torch.ones(3, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False, **options).sum().backward()
            assert len(calls) == times and x.grad is not None
            assert_near(x.grad, torch.ones(3), rounding(1.0, terms=8))


def test_a_package_that_is_missing_broken_or_of_another_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(UserError, match=rf"{NEEDS}.*rl-async\[flash-attn\]"):
        package_kernel()
    install(monkeypatch, flash_attn=varlen_2)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match=f"{NEEDS}.*flash_attn"):
        package_kernel()
    install(monkeypatch, flash_attn_interface=lambda q, k, v, cu_seqlens_q, causal: q)
    with pytest.raises(UserError, match=f"{NEEDS}.*{PACKAGES[0]}.*max_seqlen_q.*softcap"):
        package_kernel()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_gpu_it_is_refused(dtype: str, model_folder: Path, tmp_path: Path, one_rank: None) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(attention=FLASH_ATTN), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{NEEDS}.*bfloat16"):
        Fsdp2Backend(str(folder), dtype, "cpu", TrainerConfig())


def test_a_model_attends_by_the_package_and_its_rows_stay_packed(
    model_folder: Path, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 on a CPU that is taken for a GPU, where the stand-in has the row as a kernel would have it."""
    folder = overridden_folder(model_folder, OverrideConfig(attention=FLASH_ATTN), tmp_path)  # type: ignore[arg-type]
    calls: list[int] = []

    def counted(*given: Tensor, cu_seqlens_q: Tensor, **named: Any) -> Tensor:
        calls.append(len(cu_seqlens_q) - 1)
        return varlen_2(*given, cu_seqlens_q=cu_seqlens_q, **named)

    monkeypatch.setattr(model, "package_kernel", lambda: counted)
    tensors = collate(make_rows(0)[:3], device="cpu")
    plain = Fsdp2Backend(str(model_folder), "bfloat16", "cpu", TrainerConfig())
    expected = plain.forward(tensors).logprobs
    for module in (model, packing):
        monkeypatch.setattr(module, "has_flash_attention", lambda device: True)
    backend = Fsdp2Backend(str(folder), "bfloat16", "cpu", TrainerConfig())
    assert backend.model.packs
    found = backend.forward(tensors).logprobs
    layers, rows = 2, 3
    assert calls == [rows] * layers
    assert found is not None and expected is not None
    size = float(expected[tensors.mask].abs().max())
    bound = pass_rounding(size, layers, terms=64, dtype=torch.bfloat16)
    assert_near(found[tensors.mask], expected[tensors.mask], bound)
