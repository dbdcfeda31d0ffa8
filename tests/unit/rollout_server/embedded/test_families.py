"""Each family that is served, on a tiny random model: log-probabilities are those of a plain forward pass."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.messages import Sampling
from rl_async.model_files import MIXERS
from rl_async.rollout_server.embedded.core import ATTENTION, SERVED, EngineCore, Sequence
from rl_async.rollout_server.embedded.engine_thread import EngineThread, checksums, quantize_layers
from rl_async.torch_shared import BLOCK, DTYPES, quantize
from rl_async.trainer.families import FAMILIES, logit_form
from rl_async.weight_sync.buckets import unpack
from rl_async.weight_sync.layout import single
from tests.support.rounding import allowance, assert_near, in_float64, to_float64
from tests.support.tiny_models import sparse_model
from tests.support.weights import make_buckets
from tests.unit.rollout_server.embedded.test_core import assert_as_plain, sequences

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
ALL_SLIDING: dict[str, Any] = {"head_dim": 16, "layer_types": ["sliding_attention"] * 4, **WINDOWS}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED = {"shared_expert_intermediate_size": 16}
# States go on where they were.
STATES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5_text", DELTA_NET),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8}),
    ("qwen3_5_moe_text", {**DELTA_NET, **EXPERTS, **SHARED}),
    ("qwen3_next", {**DELTA_NET, **EXPERTS, **SHARED}),
]
# Their layers have nothing that those of another family lack; `make test-nightly` tries them.
ALIKE: list[tuple[str, dict[str, Any]]] = [
    ("arcee", {}),
    ("exaone4", {"head_dim": 16, "sliding_window": 8, "layer_types": MIXED}),
    ("ministral", {"head_dim": 16, "sliding_window": 8, "layer_types": MIXED}),
    ("olmo2", {}),
    ("olmo3", {"sliding_window": 8, "layer_types": MIXED}),
    ("seed_oss", {"head_dim": 16}),
    *STATES[2:],
]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "layer_types": MIXED}),
    ("llama", {}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": 8}),
    ("phi3", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3_moe", {"head_dim": 16, **EXPERTS}),
    ("smollm3", {"no_rope_layer_interval": 2}),
    *STATES[:2],
    *ALIKE,
]
PARAMETERS = [
    pytest.param(*case, id=f"{case[0]}-{n}", marks=[pytest.mark.nightly] * (case in ALIKE))
    for n, case in enumerate(KINDS)
]


def peaked(kind: str, more: dict[str, Any]) -> Any:
    """A model away from the flat distribution of a fresh one."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() >= 2 else 1.0)
    return model


@pytest.mark.parametrize(("kind", "more"), PARAMETERS)
def test_logprobs_agree_with_a_plain_forward_pass(kind: str, more: dict[str, Any]) -> None:
    model = peaked(kind, more)
    core = EngineCore(model, max_batch=8, max_length=128)
    todo = sequences(12, seed=1)
    for sequence in todo:
        sequence.max_tokens, sequence.stop_token_ids = 30, frozenset()
        core.add(sequence)
    while core.unfinished:
        core.step()
    again = sequences(12, seed=1)
    for sequence, before in zip(again, todo, strict=True):  # the next turn, on prefixes of the first
        sequence.tokens = [*before.tokens, 7, 8, 9]
        sequence.tokens = again[0].tokens if sequence is again[1] else sequence.tokens
        sequence.tokens = list(sequence.tokens)
        sequence.prompt_length, sequence.max_tokens = len(sequence.tokens), 10
        core.add(sequence)
    while core.unfinished:
        core.step()
    # Equal prompts are computed once, but prefixes of other prompts are not kept where layers carry a state.
    assert core.cached_tokens > (0 if kind in MIXERS else 200)
    assert_as_plain(model, (*todo, *again))


@pytest.mark.parametrize(("kind", "more"), [KINDS[0], KINDS[7], ("qwen3", ALL_SLIDING)], ids=["gemma3", "qwen2", "all"])
def test_windows_in_blocks_over_long_prompts_agree_with_a_plain_forward_pass(kind: str, more: dict[str, Any]) -> None:
    model = peaked(kind, more)
    served = copy.deepcopy(model)
    served.set_attn_implementation(ATTENTION)
    core = EngineCore(served, max_batch=4, max_length=2048)
    first, shorter = sequences(2, seed=1)
    first.tokens = (first.tokens * 1300)[: 2 * BLOCK + 100]
    for sequence in (first, shorter):
        sequence.prompt_length = len(sequence.tokens)
        core.add(sequence)
    while core.unfinished:
        core.step()
    (again,) = sequences(1, seed=2)  # goes on from what is known of the first, by more than a block
    again.tokens = [*first.tokens[:300], *(again.tokens * 1300)[: 2 * BLOCK]]
    again.prompt_length = len(again.tokens)
    core.add(again)
    while core.unfinished:
        core.step()
    assert core.cached_tokens > 280
    assert_as_plain(model, (first, shorter, again))


def test_every_family_that_is_served_is_tested_and_trained() -> None:
    assert {kind for kind, _ in KINDS} == set(SERVED) <= set(FAMILIES)
    for kind, more in KINDS:
        form = logit_form(AutoConfig.for_model(kind, **{**SIZES, **more}))
        assert (form.scale, form.softcap) == (1.0, None), "the engine neither scales nor caps logits"


# Weights in 8 bits: their rounding, the products with them, and that an update ends in the bits of a fresh load.


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
        pytest.param(dense_model, "int8", torch.float32, marks=pytest.mark.slow),
        (sparse_model, "fp8", torch.bfloat16),
        *(
            pytest.param(make, quantization, dtype, marks=pytest.mark.nightly)
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
