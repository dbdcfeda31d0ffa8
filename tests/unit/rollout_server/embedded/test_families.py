"""Each family that is served, on a tiny random model: log-probabilities are those of a plain forward pass."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from rl_async.configs.engines import most_static_steps
from rl_async.messages import Sampling
from rl_async.model_files import MIXERS
from rl_async.rollout_server.embedded.core import (
    ATTENTION,
    SERVED,
    Capture,
    EngineCore,
    Sequence,
    StaticSteps,
    Step,
    uncaptured,
)
from rl_async.rollout_server.embedded.engine_thread import EngineThread, checksums, quantize_layers
from rl_async.torch_shared import BLOCK, DTYPES, quantize
from rl_async.trainer.families import FAMILIES, logit_form
from rl_async.weight_sync.buckets import unpack
from rl_async.weight_sync.layout import single
from tests.support.rounding import allowance, assert_near, in_float64, to_float64
from tests.support.tiny_models import sparse_model
from tests.support.weights import make_buckets
from tests.unit.rollout_server.embedded.test_core import assert_as_plain, model, sequences

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


# Static decode steps compute what today's steps do, can be captured, and keep the engine's contract.


__all__ = ["model"]
REFUSED = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
CAPTURED = [
    pytest.param(kind, more, id=f"{kind}-{n}", marks=[pytest.mark.nightly] * ((kind, more) in ALIKE))
    for n, (kind, more) in enumerate(KINDS)
    if kind not in MIXERS and "num_experts" not in more
]


class Recording(TorchDispatchMode):
    """Stands in for a CUDA graph: records the operations of a step with the tensors they read and write.

    ``replay`` runs the same operations on the same memory, without any Python of the step. Operations whose sizes or
    results the host would have to know, and tensors made of host data, are refused, as capturing refuses them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self.replays = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        masks = any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:2]))
        # The shape of an index operation depends on data only if it selects by a mask.
        dynamic = masks if function in INDEXING else any(tag in function.tags for tag in REFUSED)
        if dynamic or function is torch.ops.aten.lift_fresh.default:
            raise AssertionError(f"a captured step cannot do {function}")
        found = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, tree_leaves(found)))
        return found

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, made in self.calls:
            for old, new in zip(made, tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape and old.stride() == new.stride()
                    old.copy_(new)


def recorded(made: list[Recording]) -> Capture:
    """Return a Capture that adds its recordings to ``made``. Recording runs the step, so its first replay does not."""

    def capture(step: Step) -> Step:
        recording = Recording()
        with recording:
            step()
        made.append(recording)
        ran = iter([True])

        def replay() -> None:
            if not next(ran, False):
                recording.replay()

        return replay

    return capture


def finish(core: EngineCore, todo: list[Sequence]) -> None:
    for sequence in todo:
        core.add(sequence)
    for _ in range(1000):
        core.step()
        if not core.unfinished:
            return
    raise AssertionError("sequences were left")


def seeded(count: int, seed: int) -> list[Sequence]:
    """Sequences of all kinds of samplers, each with a seed; there are alternatives to none, nor a grammar."""
    todo = sequences(count, seed)
    for n, sequence in enumerate(todo):
        sequence.seed = n
        if n % 3 == 0:
            sequence.sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01)
    return todo


def answers(todo: list[Sequence]) -> list[list[int]]:
    return [sequence.sampled for sequence in todo]


@pytest.mark.parametrize("kind", ["uncaptured", "recorded"])
def test_static_steps_sample_what_other_steps_do(model: Qwen3ForCausalLM, kind: str) -> None:
    made: list[Recording] = []
    capture = recorded(made) if kind == "recorded" else uncaptured
    cores = [EngineCore(model, max_batch=12, max_length=64, capture=given) for given in (None, capture)]
    found = []
    for core in cores:
        todo = seeded(40, seed=1)
        finish(core, todo)
        found.append(answers(todo))
        assert_as_plain(model, [s for s in todo if not s.sampling.truncating])
        assert {s.finish_reason for s in todo} == {"stop", "length"}
    assert found[0] == found[1]
    # Surplus tokens of rows that ended one step before are not counted.
    assert cores[1].sampled_tokens == cores[0].sampled_tokens == sum(map(len, found[0]))
    if kind == "recorded":
        assert sum(recording.replays for recording in made) > 5 * len(made) > 0


@pytest.mark.parametrize(("kind", "more"), CAPTURED)
def test_steps_of_each_family_can_be_captured(kind: str, more: dict[str, Any]) -> None:
    model, made = peaked(kind, more), list[Recording]()
    core = EngineCore(model, max_batch=4, max_length=64, capture=recorded(made))
    todo = sequences(6, seed=1)
    for sequence in todo:
        sequence.max_tokens, sequence.stop_token_ids = 12, frozenset()
    finish(core, todo)
    assert_as_plain(model, todo)
    assert sum(recording.replays for recording in made) > len(made) > 0


def test_quantised_layers_can_be_captured(model: Qwen3ForCausalLM) -> None:
    served, found = copy.deepcopy(model), list[list[list[int]]]()
    quantize_layers(served, "int8")
    made: list[Recording] = []
    for capture in (None, recorded(made)):
        todo = seeded(6, seed=2)
        finish(EngineCore(served, max_batch=8, max_length=64, capture=capture), todo)
        found.append(answers(todo))
    assert found[0] == found[1] and made


def test_rows_that_need_the_host_between_tokens_use_other_steps(model: Qwen3ForCausalLM) -> None:
    """Others follow them with static steps again, and random numbers go on where they were."""
    found = []
    for capture in (None, uncaptured):
        core = EngineCore(model, max_batch=12, max_length=64, capture=capture)
        todo = seeded(12, seed=3)
        for sequence in todo[4:6]:
            sequence.alternatives = 3
        for sequence in todo[:4]:
            core.add(sequence)
        for _ in range(4):
            core.step()
        finish(core, todo[4:])
        found.append((answers(todo), [len(sequence.likeliest) for sequence in todo[4:6]]))
        assert found[-1][1] == [len(sequence.sampled) for sequence in todo[4:6]]
    assert found[0] == found[1]


class Columnless:
    """A sampler of one kind of rows, which takes the first token."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def adopt(self, other: "Columnless") -> None:
        """Adopt no state: this sampler has none."""

    def draw_numbers(self, drawn: Tensor) -> None:
        """Draw no numbers: nothing is sampled here."""

    def distribution(self, logits: Tensor) -> Tensor:
        return logits

    def choose(self, logprobs: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(logprobs), dtype=torch.int64), logprobs[:, 0]


def test_captured_steps_are_few_and_those_unused_for_longest_are_dropped() -> None:
    """Of three rows and 100 tokens: 1, 2 and 3 rows, 64 and 100 keys, two kinds of samplers."""
    captured: list[tuple[int, int]] = []
    shapes: list[tuple[int, int]] = []

    def capture(step: Step) -> Step:
        step()
        captured.append(shapes[-1])
        return step

    def compute(last: Tensor, positions: Tensor, view: int) -> Tensor:
        shapes.append((len(last), view))
        return torch.zeros(len(last), 2)

    steps = StaticSteps(3, 100, torch.device("cpu"), capture)

    def run(kind: str) -> None:
        for count in (1, 2, 3):
            for longest in (1, 65):
                steps.place(torch.zeros(count, dtype=torch.int64), [0] * count)
                steps.launch(Columnless(kind), longest, 100, compute)()  # type: ignore[arg-type]

    for kind in ("sampled", "sampled", "greedy", "greedy", "sampled"):
        run(kind)
    each = [(rows, keys) for rows in (1, 2, 3) for keys in (64, 100)]
    assert captured == each * 2 and len(captured) == most_static_steps(3, 100)
    # A third kind takes the places of the greedy ones, which were not used for longest.
    run("both")
    run("both")
    assert captured == each * 3 and len(steps._captured) == most_static_steps(3, 100)
    run("sampled")
    assert captured == each * 3
    run("greedy")
    assert captured == each * 4


def test_preempted_and_aborted_sequences_keep_each_token_that_was_sampled(model: Qwen3ForCausalLM) -> None:
    found = []
    for capture in (None, uncaptured):
        core = EngineCore(model, max_batch=12, max_length=64, cache_bytes=120 * 256 * 4, capture=capture)
        todo = seeded(20, seed=4)
        for sequence in todo:
            core.add(sequence)
        for iteration in range(1000):
            core.step()
            if iteration == 3:
                core.settle()
                core.preempt()
            if iteration == 5:
                core.settle()
                core.free_cache()
            if not core.unfinished:
                break
        assert core.preemptions > 0
        found.append(answers(todo))
    assert found[0] == found[1]
    core = EngineCore(model, max_batch=4, max_length=64, capture=uncaptured)
    todo = seeded(4, seed=5)
    for sequence in todo:
        sequence.max_tokens, sequence.stop_token_ids = 30, frozenset()
        core.add(sequence)
    for _ in range(6):
        core.step()
    core.settle()
    core.abort("2")
    assert todo[2].finish_reason == "abort" and len(todo[2].sampled) == 7
    finish(core, [])
    assert [len(sequence.sampled) for sequence in todo] == [30, 30, 7, 30]


def test_captured_steps_read_new_weights_and_tokens_carry_their_version(model: Qwen3ForCausalLM) -> None:
    served, made = copy.deepcopy(model), list[Recording]()
    core = EngineCore(served, max_batch=4, max_length=64, capture=recorded(made))
    core.version = "0.0"
    [sequence] = sequences(1, seed=1)
    sequence.tokens, sequence.prompt_length = sequence.tokens[:4], 4
    sequence.sampling, sequence.max_tokens, sequence.stop_token_ids = Sampling(), 30, frozenset()
    core.add(sequence)
    for _ in range(12):
        core.step()
    core.settle()
    before, captured = len(sequence.sampled), len(made)
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.mul_(1.1)
    core.weights_changed()
    core.preempt()
    core.version = "0.1"
    finish(core, [])
    assert sequence.runs == [("0.0", 0), ("0.1", before)]
    assert len(made) == captured and made[0].replays > before
    old, new = copy.copy(sequence), copy.copy(sequence)
    old.tokens, old.logprobs = sequence.tokens[: 4 + before], sequence.logprobs[:before]
    new.prompt_length, new.logprobs = 4 + before, sequence.logprobs[before:]
    assert_as_plain(model, [old])
    assert_as_plain(served, [new])
