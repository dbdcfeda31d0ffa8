"""Weights in 8 bits: their rounding, the products with them, and that an update ends in the bits of a fresh load."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.rollout_server.embedded.engine_thread import EngineThread, checksums
from rl_async.rollout_server.embedded.quantized import quantize_layers
from rl_async.torch_shared import DTYPES, quantize
from rl_async.weight_sync.buckets import unpack
from rl_async.weight_sync.experts import single
from tests.support.rounding import allowance, assert_near, in_float64, to_float64
from tests.support.tiny_models import sparse_model
from tests.support.weights import make_buckets
from tests.unit.rollout_server.embedded.test_families import PARAMETERS, peaked

STEP = {"int8": 0.5 / 127, "fp8": 2**-4}  # half a step of the format: of a row's largest weight, or of the weight


def dequantized(dense: Any, quantization: str) -> Any:
    """The model with its decoder's matrices as they are after rounding, in the model's own dtype and layers."""
    dense = copy.deepcopy(dense)
    with torch.no_grad():
        for name, weight in dense.model.layers.named_parameters():
            if weight.dim() > 1 and not name.endswith(("mlp.gate.weight", "conv.weight", "conv1d.weight")):
                numbers, scales = quantize(weight, DTYPES[quantization])
                weight.copy_(numbers.float() * scales)
    return dense


def quantized(dense: Any, quantization: str) -> Any:
    dense = copy.deepcopy(dense)
    quantize_layers(dense, quantization)
    return dense


@contextmanager
def serving(model: nn.Module) -> Iterator[EngineThread]:
    def fail(error: Exception) -> None:
        raise AssertionError("the engine's thread has failed") from error

    engine = EngineThread(EngineCore(model, max_batch=4, max_length=64), fail)
    try:
        yield engine
    finally:
        engine.stop()


def sampled(model: nn.Module) -> Sequence:
    """A greedy answer of an engine with this model."""
    core = EngineCore(model, max_batch=1, max_length=64)
    sequence = Sequence(
        request_id="a",
        tokens=[3, 10, 17, 24],
        sampling=Sampling(temperature=0.0),
        max_tokens=24,
        stop_token_ids=frozenset(),
        seed=None,
        deliver=lambda _: None,
    )
    core.add(sequence)
    while core.unfinished:
        core.step()
    return sequence


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(2, 22)[None]).logits
    return found


def update(engine: EngineThread, model: nn.Module, bucket_bytes: int) -> None:
    """What a trainer with ``model`` sends, in buckets of this size."""
    for bucket in make_buckets(list(single(model.named_parameters())), bucket_bytes):
        engine.load_weights(unpack(bucket.data, bucket.info))


def moved(model: Any) -> Any:
    """The model some steps later."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.abs().mean() * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("quantization", DTYPES)
def test_weights_are_rounded_to_the_nearest_number(quantization: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64) * torch.logspace(-6, 3, 16)[:, None]
    numbers, scales = quantize(weight, DTYPES[quantization])
    error, most = (numbers.float() * scales - weight).abs(), weight.abs().amax(-1, keepdim=True)
    assert numbers.dtype.itemsize == 1 and scales.shape == (16, 1)
    reference = most.expand_as(weight) if quantization == "int8" else weight.abs().clamp(min=most / 448 * 2**-6)
    assert (error <= 1.001 * STEP[quantization] * reference).all()
    assert error.max() > 0


@pytest.mark.parametrize("quantization", DTYPES)
def test_rows_of_zeros_stay_and_what_is_not_finite_is_seen(quantization: str) -> None:
    weight = torch.ones(4, 8)
    weight[0], weight[1, 3], weight[2, 5] = 0.0, torch.inf, torch.nan
    numbers, scales = quantize(weight, DTYPES[quantization])
    back = numbers.float() * scales
    assert (back[0] == 0).all() and (back[3] == 1).all()
    assert not back[1:3].isfinite().any()
    most = quantize(torch.ones(1, 8), DTYPES[quantization])[0][0, 0].item()
    row = torch.tensor([[2e-45 * most, -2e-45 * most, 0.0]])  # whose scale is too small a number to be exact
    assert quantize(row, DTYPES[quantization])[0].tolist() == [[most, -most, 0.0]]


@pytest.mark.parametrize("quantization", DTYPES)
@pytest.mark.parametrize(("kind", "more"), PARAMETERS)
def test_every_family_computes_with_the_rounded_weights(kind: str, more: dict[str, Any], quantization: str) -> None:
    model = peaked(kind, more)
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_()
    ours, plain = quantized(model, quantization), dequantized(model, quantization)
    exact = to_float64(copy.deepcopy(plain))
    with in_float64():
        expected = logits(exact)
    bound = allowance(logits(plain), expected, terms=90)
    assert_near(logits(ours), expected, bound, kind)
    assert (logits(plain) - logits(model)).abs().max() > 1e-3


def dense_model() -> nn.Module:
    return peaked("qwen3", {"head_dim": 16})


@pytest.mark.parametrize(
    ("make", "quantization", "dtype"),
    [
        (dense_model, "int8", torch.float32),
        (sparse_model, "fp8", torch.bfloat16),
        *(
            pytest.param(make, quantization, dtype, marks=pytest.mark.slow)
            for make, quantization, dtype in itertools.product(
                (dense_model, sparse_model), DTYPES, (torch.float32, torch.bfloat16)
            )
            if (make, quantization, dtype)
            not in ((dense_model, "int8", torch.float32), (sparse_model, "fp8", torch.bfloat16))
        ),
    ],
)
def test_an_update_ends_in_the_bits_of_a_fresh_load(
    make: Callable[[], nn.Module], quantization: str, dtype: torch.dtype
) -> None:
    old = make().to(dtype)
    new = moved(old)
    fresh = quantized(new, quantization)
    expected = checksums(fresh)
    assert any(name.endswith(".scales") for name in expected)
    for bucket_bytes in (1 << 20, 100):  # 100 bytes cut single rows
        with serving(quantized(old, quantization)) as engine:
            assert checksums(engine.core.model) != expected
            update(engine, new, bucket_bytes)
            assert checksums(engine.core.model) == expected
            update(engine, old, bucket_bytes)
            assert checksums(engine.core.model) == checksums(quantized(old, quantization))
            engine.sleep(2).result(20)
            assert sum(p.numel() for p in engine.core.model.parameters()) == 0
            engine.wake([]).result(20)
            update(engine, new, bucket_bytes)
            assert checksums(engine.core.model) == expected
        updated, loaded = sampled(engine.core.model), sampled(fresh)
        assert updated.tokens == loaded.tokens and updated.logprobs == loaded.logprobs


@pytest.mark.parametrize("quantization", DTYPES)
def test_layers_take_a_byte_for_each_weight(quantization: str) -> None:
    model, dense = quantized(sparse_model(), quantization), sparse_model()
    held = sum(tensor.nbytes for tensor in (*model.model.layers.parameters(), *model.model.layers.buffers()))
    matrices = sum(p.numel() for p in dense.model.layers.parameters() if p.dim() > 1)
    assert matrices < held < 1.3 * matrices < 0.4 * 4 * matrices
