"""A model with its heads: outputs, shared prefixes, and router replay."""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.router_replay import distance, perturbed, sampled
from rl_async.configs.schema.data import ATTENTION_KEY, OverrideConfig, RopeConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import DataError, UserError
from rl_async.launcher.plan.memory import size_of
from rl_async.launcher.sources import overridden_folder
from rl_async.messages import Sampling
from rl_async.model_files import INDEX, ONE_FILE, experts_of
from rl_async.rollout_server.embedded.core import EngineCore, Sequence, why_not_served
from rl_async.trainer.backend import OutputName, Outputs
from rl_async.trainer.batches import MicroBatch
from rl_async.trainer.export import copy_text_files
from rl_async.trainer.families import FAMILIES
from rl_async.trainer.fsdp2 import KEPT, Fsdp2Backend
from rl_async.trainer.model import REPLAYED, Head, build_headed, why_not_replayed, why_prefixes_apart
from rl_async.trainer.packing import Rows, Tensors, collate, prefix_tree
from rl_async.trainer.publishing import Canary, compare
from rl_async.trainer.ranks import pure_data_parallel
from rl_async.trainer.update import LossSums
from tests.conftest import VOCAB as MODEL_VOCAB
from tests.conftest import make_rows
from tests.support.batches import loss_of, shared_rows
from tests.support.families import COMMON, DISTINCT, SPECIAL, VOCAB, saved
from tests.support.rounding import (
    LARGEST,
    PlainPass,
    allowance,
    allowances,
    assert_as_close,
    assert_near,
    in_float64,
    pass_rounding,
    to_float64,
    unit_roundoff,
)
from tests.support.tiny_models import byte_tokenizer, pickled, sparse_model
from tests.support.weights import whole_weights

TRAINING = TrainerConfig(learning_rate=1e-2, minibatches=1)


def batch() -> Tensors:
    return collate(make_rows(0)[:3], device="cpu")


def towards_one(_: int, outputs: Outputs) -> Tensor:
    """A loss that only the values are in."""
    assert outputs.values is not None
    return ((outputs.values - 1.0) ** 2).mean()


def trained(folder: Path, head: Head, dtype: str = "float32") -> Fsdp2Backend:
    """A model of which two steps moved the values."""
    backend = Fsdp2Backend(str(folder), dtype, "cpu", TRAINING, head)
    requested = frozenset({"values"} if head == "both" else ())
    for _ in range(2):
        backend.step([batch()], towards_one, requested)  # type: ignore[arg-type]
    return backend


@pytest.mark.usefixtures("one_rank")
def test_a_critic_gives_values_alone_and_a_new_one_says_zero(model_folder: Path) -> None:
    x = batch()
    outputs = Fsdp2Backend(str(model_folder), "float32", "cpu", None, "value").forward(x)
    assert outputs.logprobs is None and outputs.entropy is None
    assert outputs.values is not None
    assert outputs.values.shape == x.mask.shape
    assert not outputs.values.any()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("head", ["value", "both"])
def test_values_are_a_linear_function_of_the_state_before_each_token(model_folder: Path, head: Head) -> None:
    backend, x = trained(model_folder, head), batch()
    values = backend.forward(x, frozenset({"values"})).values
    assert values is not None
    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    names = {n if head == "both" else f"model.{n}": t for n, t in whole_weights(backend).items()}
    lm.load_state_dict(names, strict=False)
    weight, bias = (p.full_tensor().detach() for p in backend.model.value_head.parameters())

    def by_model(lm: Any, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            hidden = lm.model(x.tokens, use_cache=False).last_hidden_state[:, :-1]
        return (hidden @ weight[0].to(dtype) + bias[0].to(dtype))[predicted]

    predicted = torch.arange(values.shape[1]) < x.lengths[:, None] - 1
    plain, exactly = by_model(lm, torch.float32), to_float64(lm)
    with in_float64():
        exact = by_model(exactly, torch.float64)
    assert_near(values[predicted], exact, allowance(plain, exact, terms=lm.config.intermediate_size), "values")
    assert not values[~predicted].any(), "there is no token"
    assert values.abs().max() > 0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_gathers_weights_and_reduces_gradients_once_a_step(model_folder: Path, dtype: str) -> None:
    backend, x = Fsdp2Backend(str(model_folder), dtype, "cpu", TRAINING), batch()
    masters = [parameter.detach() for parameter in backend.model.parameters()]
    seen: list[Tensor] = []

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        seen.append(outputs.logprobs.detach().clone())
        # Weights that were gathered anew would be zeros in the second micro-batch.
        for master in masters:
            master.zero_()
        return -outputs.logprobs.mean()

    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        backend.add_gradients([x, x], loss_fn)
    assert seen[0].any() and seen[0].equal(seen[1])
    parts = sum(isinstance(module, FSDPModule) for module in backend.model.modules())
    assert sum(event.name == "fsdp::chunk_cat" for event in recorded.events()) == parts


@pytest.mark.usefixtures("one_rank")
def test_gathering_once_a_step_gives_the_gradients_of_gathering_for_every_micro_batch(model_folder: Path) -> None:
    """With weights offloaded a rank still gathers and reduces for each micro-batch."""

    def found(config: TrainerConfig) -> dict[str, Tensor]:
        batches = [collate(make_rows(number)[:3], device="cpu") for number in range(3)]
        backend = Fsdp2Backend(str(model_folder), "float32", "cpu", config)

        def loss_fn(number: int, outputs: Outputs) -> Tensor:
            assert outputs.logprobs is not None
            return -torch.where(batches[number].mask, outputs.logprobs, 0.0).mean()

        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            backend.add_gradients(batches, loss_fn)
        reduced.append(sum(event.name == "fsdp::chunk_cat" for event in recorded.events()))
        named = backend.model.named_parameters()
        return {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}

    reduced: list[int] = []
    once, each = found(TRAINING), found(msgspec.structs.replace(TRAINING, cpu_offload=True))
    assert reduced[1] == 3 * reduced[0] > 0, "the other one is the old way"
    assert once.keys() == each.keys()
    largest = max(gradient.abs().max().item() for gradient in each.values())
    off = max((once[name] - gradient).abs().max().item() for name, gradient in each.items())
    print(f"gathering once: old - new {off:.1e} of {largest:.1e}")
    assert off <= 1e-6 and largest > 1e-2


@pytest.mark.usefixtures("one_rank")
def test_a_value_never_sees_the_token_it_precedes(model_folder: Path) -> None:
    backend, x = trained(model_folder, "value"), batch()
    before = backend.forward(x).values
    changed = batch()
    changed.tokens[:, 6:] = (x.tokens[:, 6:] + 1) % 64
    after = backend.forward(changed).values
    assert before is not None and after is not None
    assert before[:, :6].equal(after[:, :6])
    assert not before[:, 6:].equal(after[:, 6:])


@pytest.mark.usefixtures("one_rank")
def test_a_value_head_changes_neither_log_probabilities_nor_what_engines_get(model_folder: Path) -> None:
    x = batch()
    policy = Fsdp2Backend(str(model_folder), "float32", "cpu", TRAINING)
    both = Fsdp2Backend(str(model_folder), "float32", "cpu", TRAINING, "both")
    expected = policy.forward(x).logprobs
    for requested in (frozenset(), frozenset({"values"})):
        got = both.forward(x, requested)  # type: ignore[arg-type]
        assert got.logprobs is not None and expected is not None
        assert got.logprobs.equal(expected)
        assert (got.values is not None) == bool(requested)
    exported, plain = whole_weights(both), whole_weights(policy)
    assert exported.keys() == plain.keys() == load_file(model_folder / "model.safetensors").keys()
    for name, tensor in plain.items():
        assert exported[name].equal(tensor)


@pytest.mark.usefixtures("one_rank")
def test_values_are_regressed_in_float32_whatever_the_backbone_computes_in(model_folder: Path) -> None:
    backend = trained(model_folder, "both", "bfloat16")
    values = backend.forward(batch(), frozenset({"values"})).values
    assert values is not None and values.dtype == torch.float32
    assert not values.equal(values.bfloat16().float()), "rounded to bfloat16"


@pytest.mark.usefixtures("one_rank")
def test_a_critic_starts_from_a_saved_one_with_its_head(model_folder: Path, tmp_path: Path) -> None:
    first = trained(model_folder, "value")
    first.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "shards", "value_head.safetensors"]
    expected, got = (
        b.forward(batch()).values for b in (first, Fsdp2Backend(str(tmp_path), "float32", "cpu", None, "value"))
    )
    assert expected is not None and got is not None
    assert got.equal(expected)


@pytest.mark.usefixtures("one_rank")
def test_the_head_of_a_shared_critic_is_no_part_of_the_model_that_others_read(
    model_folder: Path, tmp_path: Path
) -> None:
    backend = trained(model_folder, "both")
    backend.save(tmp_path)
    assert not [p.name for p in (tmp_path / "model").glob("*value*")]
    assert not [n for n in load_file(tmp_path / "model" / "model.safetensors") if "value_head" in n]
    assert set(load_file(tmp_path / "value_head.safetensors")) == {"weight", "bias"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("head", "key"), [("value", "critic.path"), ("both", "model.path")])
def test_a_model_that_cannot_be_loaded_names_its_key(tmp_path: Path, head: Head, key: str) -> None:
    with pytest.raises(UserError, match=key):
        build_headed(str(tmp_path), head)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("head", "key"), [("value", "critic.path"), ("both", "model.path")])
def test_weights_that_are_pickles_are_not_read(tmp_path: Path, model_folder: Path, head: Head, key: str) -> None:
    with pytest.raises(UserError, match=key):
        build_headed(str(pickled(model_folder, tmp_path / "model")), head)


EVERYTHING: frozenset[OutputName] = frozenset({"entropy", "sum_squares", "distribution"})
HEADS: dict[Head, frozenset[OutputName]] = {
    "policy": EVERYTHING,
    "value": frozenset(),
    "both": EVERYTHING | {"values"},
}
# The longest sums: of all tokens, in the gradients, of which there are more than logits.
TERMS = int(shared_rows(VOCAB).lengths.sum())
CASES: list[tuple[str, Head, bool]] = [
    *((kind, "policy", kind in ("gemma2", "deepseek_v3")) for kind in sorted(FAMILIES)),
    ("qwen3", "value", False),
    ("llama", "both", True),
]


def built(folder: Path, dtype: str, head: Head, config: TrainerConfig) -> Fsdp2Backend:
    """A backend in this type, whose value head does not say zero."""
    backend = Fsdp2Backend(str(folder), "bfloat16" if dtype == "bfloat16" else "float32", "cpu", config, head)
    if backend.model.value_head is not None:
        torch.nn.init.constant_(backend.model.value_head.weight, 0.1)
    if dtype == "float64":
        to_float64(backend.model.lm)
        backend.model.double()
    return backend


def computed(backend: Fsdp2Backend, batch: Tensors, requested: frozenset[OutputName]) -> dict[str, Tensor]:
    """The loss, the outputs and the gradients, by name."""
    outputs = backend.model.outputs(batch, requested)
    loss = loss_of(outputs, batch.lengths)
    loss.backward()
    found = {name: part.detach() for name in outputs.__struct_fields__ if (part := getattr(outputs, name)) is not None}
    named = backend.model.named_parameters()
    found |= {f"gradient of {name}": p.grad.full_tensor() for name, p in named if p.grad is not None}
    backend.model.zero_grad()
    return {"loss": loss.detach(), **found}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "head", "checkpointed"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * (case[0] not in DISTINCT)) for case in CASES],
)
def test_shared_prefixes_change_neither_outputs_nor_gradients(
    kind: str, head: Head, checkpointed: bool, tmp_path: Path
) -> None:
    saved(kind, tmp_path)
    config = TrainerConfig(activation_checkpointing=checkpointed)
    batch = shared_rows(VOCAB)
    assert batch.tree is not None
    apart = msgspec.structs.replace(batch, tree=None)
    # Without checkpointing, which would compute again outside the mode.
    exactly = built(tmp_path, "float64", head, TrainerConfig())
    with in_float64():
        together_exact, exact = (computed(exactly, x, HEADS[head]) for x in (batch, apart))
    backend = built(tmp_path, "float32", head, config)
    seen: list[int] = []
    backend.model.lm.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    together, alone = (computed(backend, x, HEADS[head]) for x in (batch, apart))
    assert seen == [batch.computed, int(batch.lengths.sum())]
    assert batch.computed < 0.6 * int(batch.lengths.sum())
    assert_as_close(together, alone, exact, terms=TERMS)
    assert max(tensor.abs().max().item() for name, tensor in exact.items() if name.startswith("gradient")) > 1e-4
    # The same sums in float64 are as much closer as its roundings are smaller than those of float32.
    finer = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    for name, bound in allowances(alone, exact, TERMS).items():
        assert_near(together_exact[name], exact[name], finer * bound, name)


@pytest.mark.usefixtures("one_rank")
def test_shared_prefixes_in_bfloat16_differ_by_its_rounding(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    batch = shared_rows(VOCAB)
    apart = msgspec.structs.replace(batch, tree=None)
    exactly = built(tmp_path, "float64", "policy", TrainerConfig())
    with in_float64():
        exact = computed(exactly, apart, EVERYTHING)
    backend = built(tmp_path, "bfloat16", "policy", TrainerConfig())
    together, alone = (computed(backend, x, EVERYTHING) for x in (batch, apart))
    errors = [(found["logprobs"].double() - exact["logprobs"]) for found in (together, alone)]
    # Both round the same values to bfloat16 and sum in float32, so their errors are draws from one distribution.
    off, usual = (error.square().mean().sqrt().item() for error in errors)
    assert off <= 2 * usual, f"off by {off:.3g}, where separate rows are off by {usual:.3g}"
    assert errors[0].abs().max() <= LARGEST * errors[1].abs().max()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("stablelm", TrainerConfig(), "stablelm"),
        ("qwen3", TrainerConfig(), None),
    ],
)
def test_what_cannot_share_says_why(
    kind: str, options: TrainerConfig, reason: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(kind, tmp_path)
    with caplog.at_level(logging.INFO, "rl_async.trainer"):
        backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", options)
    told = [record.getMessage() for record in caplog.records if "begin with" in record.getMessage()]
    assert backend.row_cost.shares_prefixes == (reason is None)
    assert bool(told) == (reason is not None)
    assert reason is None or reason in told[0]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("device", "dtype", "options"),
    [
        ("xpu", torch.bfloat16, TrainerConfig()),
        ("cuda", torch.float32, TrainerConfig()),
        ("cpu", torch.float32, TrainerConfig(sequence_parallel=2)),
        ("cuda", torch.bfloat16, TrainerConfig(kernels="compile")),
    ],
)
def test_where_prefixes_stay_apart(
    device: str, dtype: torch.dtype, options: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_async.trainer.model.has_flash_attention", lambda device: device.type == "cuda")
    config = AutoConfig.for_model("qwen3", **COMMON)
    for shared in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        assert why_prefixes_apart(config, *shared, TrainerConfig()) is None
    assert why_prefixes_apart(config, device, dtype, options)


LAYERS, EXPERTS, CHOSEN = 4, 4, 2


def recorded(batch: Tensors) -> Tensors:
    """The batch with experts drawn at random, and none for the last tokens of each row."""
    rows, width = batch.tokens.shape
    draw = torch.rand(rows, width, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(2))
    experts = draw.argsort(-1)[..., :CHOSEN].to(torch.int16)
    experts[torch.arange(width) >= batch.lengths[:, None] - 2] = -1
    return msgspec.structs.replace(batch, experts=experts, tree=None)


class Forced:
    """Replaces the routers of a plain model: the softmax over the logits of the recorded experts, of one row."""

    def __init__(self, model: Any) -> None:
        self.experts: Tensor | None = None
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = self._router(number, layer.mlp.gate)

    def _router(self, number: int, gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert self.experts is not None
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            own = logits.topk(CHOSEN).indices
            record = self.experts[: len(logits), number].long()
            experts = torch.where(record < 0, own, record)
            inside = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
            of_all = logits.exp() / logits.exp().sum(-1, keepdim=True)
            weights = logits.masked_fill(~inside, -torch.inf).softmax(-1)
            weights = weights if getattr(gate, "norm_topk_prob", True) else of_all
            return logits, weights.gather(1, experts), experts

        return forward


def expected(model: Any, batch: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities [B, T-1] of rows one by one, and the gradients of ``loss_of``."""
    forced, assembled = Forced(model), torch.zeros(batch.tokens.shape[0], batch.tokens.shape[1] - 1)
    rows = []
    assert batch.experts is not None
    for row, length in enumerate(batch.lengths.tolist()):
        forced.experts = batch.experts[row]
        ids = batch.tokens[row : row + 1, :length]
        logits = model(ids).logits[0, :-1].float() / batch.temperature[row, 0]
        logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (0, assembled.shape[1] - length + 1)))
    logprobs = torch.stack(rows)
    loss_of(Outputs(logprobs), batch.lengths).backward()
    gradients = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    return logprobs.detach(), gradients


def replayed(backend: Fsdp2Backend, batch: Tensors) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    outputs = backend.model.outputs(batch, frozenset())
    assert outputs.logprobs is not None and outputs.agreement is not None
    loss_of(msgspec.structs.replace(outputs, agreement=None), batch.lengths).backward()
    named = backend.model.named_parameters()
    gradients = {n.removeprefix("lm."): p.grad.full_tensor() for n, p in named if p.grad is not None}  # type: ignore[attr-defined]
    backend.model.zero_grad()
    return outputs.logprobs.detach(), gradients, outputs.agreement


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("kind", "checkpointed"),
    [
        pytest.param(
            kind, kind != "mixtral", marks=[pytest.mark.nightly] * (kind not in ("mixtral", "qwen3_5_moe_text"))
        )
        for kind in REPLAYED
    ],
)
def test_experts_are_the_records_and_weights_and_gradients_the_routers(
    kind: str, checkpointed: bool, tmp_path: Path
) -> None:
    plain = saved(kind, tmp_path)
    batch = recorded(shared_rows(VOCAB))
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig(activation_checkpointing=checkpointed))
    logprobs, gradients, agreement = replayed(backend, batch)
    exactly = to_float64(copy.deepcopy(plain))
    wanted, wanted_gradients = expected(plain, batch)
    with in_float64():
        exact, exact_gradients = expected(exactly, batch)
    there = torch.arange(wanted.shape[1]) + 1 < batch.lengths[:, None]
    found, plainly, of_float64 = (
        {"logprobs": values[there], **of_weights}
        for values, of_weights in ((logprobs, gradients), (wanted, wanted_gradients), (exact, exact_gradients))
    )
    assert_as_close(found, plainly, of_float64, TERMS)
    for name in (f"model.layers.{n}.mlp.gate.weight" for n in range(LAYERS)):
        learnt = exact_gradients[name].abs().max()
        assert learnt > 1e-8, name
    free = msgspec.structs.replace(batch, experts=None)
    own = backend.model.outputs(free, frozenset()).logprobs
    assert own is not None and (own - wanted)[there].abs().max() > 1e-2, "the record changes nothing"
    assert 0.0 < agreement[there].mean() < 0.6, "two of four experts at random"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_passes_may_all_precede_the_backward_passes(checkpointed: bool, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig(activation_checkpointing=checkpointed))
    batch = recorded(shared_rows(VOCAB))
    other = msgspec.structs.replace(batch, experts=batch.experts.flip(0))  # type: ignore[union-attr]
    _, first, _ = replayed(backend, batch)
    _, second, _ = replayed(backend, other)
    outputs = [backend.model.outputs(x, frozenset()) for x in (batch, other)]
    for out in outputs:
        loss_of(msgspec.structs.replace(out, agreement=None), batch.lengths).backward()
    for name, part in backend.model.named_parameters():
        one, two = (gradients[name.removeprefix("lm.")] for gradients in (first, second))
        size = (one.abs() + two.abs()).max().item()
        bound = pass_rounding(size, LAYERS, TERMS, backward=True)
        assert_near(part.grad.full_tensor(), one + two, bound, name)  # type: ignore[union-attr]


@pytest.mark.usefixtures("one_rank")
def test_rows_share_what_they_begin_with_as_far_as_their_experts_are_the_same(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    batch = recorded(shared_rows(VOCAB))
    assert batch.experts is not None
    batch.experts[:] = batch.experts[:1]  # of the same places
    batch.experts[3:, 10:] = batch.experts[3:, 10:].flip(-2)
    rows = batch.tokens.numpy(), batch.lengths.tolist(), batch.temperature.flatten().tolist()
    batch.experts[torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None] - 2] = -1
    tree, blind = prefix_tree(*rows, experts=batch.experts.numpy()), prefix_tree(*rows)
    assert tree is not None and blind is not None
    assert len(blind.places) < len(tree.places) < int(batch.lengths.sum())
    together, shared, agreed = replayed(backend, msgspec.structs.replace(batch, tree=tree))
    alone, apart, agreed_alone = replayed(backend, batch)
    exactly = built(tmp_path, "float64", "policy", TrainerConfig())
    with in_float64():
        exact, exact_gradients, _ = replayed(exactly, batch)
    there = torch.arange(alone.shape[1]) + 1 < batch.lengths[:, None]
    assert agreed[there].equal(agreed_alone[there])
    found, plainly, of_float64 = (
        {"logprobs": values[there], **of_weights}
        for values, of_weights in ((together, shared), (alone, apart), (exact, exact_gradients))
    )
    assert_as_close(found, plainly, of_float64, TERMS)


@pytest.mark.usefixtures("one_rank")
def test_records_of_other_models_are_refused(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    batch = recorded(shared_rows(VOCAB))
    assert batch.experts is not None
    for wrong in (batch.experts + EXPERTS, batch.experts[:, :, :2], batch.experts[..., :1]):
        with pytest.raises(DataError, match=r"model\.path"):
            backend.forward(msgspec.structs.replace(batch, experts=wrong))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.thinned("kind", 2)
@pytest.mark.parametrize(
    ("kind", "options", "replays", "fails"),
    [
        ("qwen3_moe", {}, True, False),
        ("qwen3_moe", {"router_replay": "always"}, True, False),
        ("qwen3_moe", {"router_replay": "never"}, False, False),
        ("qwen3_moe", {"kernels": "compile"}, False, False),
        ("qwen3_moe", {"kernels": "compile", "router_replay": "always"}, False, True),
        ("deepseek_v3", {}, False, False),
        ("deepseek_v3", {"router_replay": "always"}, False, True),
        ("qwen3", {}, False, False),
        ("qwen3", {"router_replay": "always"}, False, True),
    ],
)
def test_what_cannot_replay_says_so(
    kind: str, options: dict[str, Any], replays: bool, fails: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(kind, tmp_path)
    config = TrainerConfig(**options)
    if fails:
        with pytest.raises(UserError, match=r"trainer\.router_replay=always"):
            Fsdp2Backend(str(tmp_path), "float32", "cpu", config)
        return
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", config)
    assert backend.replays_routers == replays
    told = any("not replayed" in record.getMessage() for record in caplog.records)
    assert told == (not replays and kind != "qwen3" and "router_replay" not in options)
    assert not Fsdp2Backend(str(tmp_path), "float32", "cpu", config, trains=False).replays_routers, "a reference"


@pytest.mark.usefixtures("one_rank")
def test_every_family_with_experts_is_known() -> None:
    sparse = {kind for kind in FAMILIES if experts_of(SimpleNamespace(**SPECIAL.get(kind, {})))}
    others = {"deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss"}
    others |= {
        "granitemoe",
        "granitemoehybrid",
        "hunyuan_v1_moe",
        "kimi_linear",
        "lfm2_moe",
        "minimax_m2",
        "nemotron_h",
    }
    assert sparse == {*REPLAYED, *others}
    config = SimpleNamespace(model_type="qwen3_moe")
    assert why_not_replayed(config, packs=False, compiled=False)
    assert why_not_replayed(config, packs=True, compiled=False) is None


def undecided(model: Any) -> Any:
    """The model with routers whose experts come in fours of almost one row: rounding decides among them.

    The experts of four are as different as any.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight
            for first in range(0, len(weight), 4):
                weight[first : first + 4] = weight[first] * (1 + 1e-4 * torch.arange(4)[:, None])
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("engine", ["bfloat16", "perturbed"])
def test_replay_brings_the_trainer_closer_to_an_engine_whose_routers_decide_otherwise(
    engine: str, tmp_path: Path
) -> None:
    model = undecided(sparse_model())
    model.save_pretrained(tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    rows = sampled(model.bfloat16() if engine == "bfloat16" else perturbed(model), model.config.vocab_size)
    without, with_replay = (distance(backend, rows, replay=replay) for replay in (False, True))
    assert with_replay.agreement is not None and with_replay.agreement < 0.9
    assert without.k3 > 1e-3, "routers that decide otherwise matter"
    assert with_replay.k3 < 0.2 * without.k3
    assert with_replay.mean < 0.5 * without.mean
    assert with_replay.ess > without.ess


@pytest.mark.usefixtures("one_rank")
def test_canaries_are_compared_through_the_experts_that_they_were_sampled_with(tmp_path: Path) -> None:
    model = undecided(sparse_model())
    model.save_pretrained(tmp_path)
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", TrainerConfig())
    (one, *_) = sampled(perturbed(model), model.config.vocab_size)
    told = Canary("engine-0", one.token_ids.tolist(), one.logprobs[one.loss_mask].tolist(), one.routed_experts)
    through, alone = (compare(backend, [canary], 1.0) for canary in (told, replace(told, experts=None)))
    assert through is not None and alone is not None
    assert through.kl < 0.2 * alone.kl and through.largest < alone.largest
    assert compare(backend, [told, replace(told, experts=None)], 1.0) is not None, "one engine records none"


@pytest.mark.usefixtures("one_rank")
def test_agreement_is_of_the_first_pass_over_trained_tokens_with_a_record() -> None:
    batch = recorded(shared_rows(VOCAB))
    assert batch.experts is not None
    batch.mask = torch.ones(batch.tokens.shape[0], batch.tokens.shape[1] - 1, dtype=torch.bool)
    batch.mask[0] = False
    there = batch.mask & (batch.experts[:, :-1, 0, 0] >= 0)
    first = torch.where(there, 0.25, 1.0)
    first[there.nonzero()[0][0], there.nonzero()[0][1]] = 0.75
    sums, micro = LossSums(pure_data_parallel()), MicroBatch([3, 1], batch, Rows(torch.zeros(4, dtype=torch.int64)))
    assert "router/agreement" not in sums.metrics()
    for agreement in (first, torch.ones_like(first)):
        sums.add_routes(micro, Outputs(agreement=agreement))
    assert sums.metrics()["router/agreement"] == pytest.approx(0.25 + 0.5 / int(there.sum()))


# Trainer and engine compute alike under ``model.override``, and exports record it.


@pytest.mark.usefixtures("one_rank")
def test_trainer_and_engine_agree_under_it_and_the_canary_would_see_another(model_folder: Path, tmp_path: Path) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(rope=RopeConfig(rope_type="linear", factor=16.0)), tmp_path)
    sequence = Sequence("0", [5, 9, 2, 7], Sampling(), 40, frozenset(), None, lambda _: None)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert why_not_served(served.config) is None
    core = EngineCore(served, max_batch=2, max_length=64)
    core.add(sequence)
    while not core.step():
        pass
    errors = PlainPass(served).errors(sequence.tokens, sequence.logprobs, 1.0)
    assert (errors <= 1).all()
    row = msgspec.structs.replace(
        make_rows(0)[0],
        token_ids=torch.tensor(sequence.tokens, dtype=torch.int32).numpy(),
        loss_mask=torch.tensor([False] * 4 + [True] * 40).numpy(),
    )
    tensors = collate([row], device="cpu")
    trained, plain = (
        Fsdp2Backend(str(path), "float32", "cpu", TrainerConfig()).forward(tensors).logprobs[0, 3:].double()
        for path in (folder, model_folder)
    )
    bound = PlainPass(served)
    assert (bound.errors(sequence.tokens, trained.tolist(), 1.0) <= 1).all()
    assert (bound.errors(sequence.tokens, plain.tolist(), 1.0) > 1).any()


@pytest.mark.usefixtures("one_rank")
def test_the_attention_of_transformers_pads_rows_and_gives_the_same(model_folder: Path, tmp_path: Path) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(attention="eager"), tmp_path)
    tensors = collate(make_rows(0)[:3], device="cpu")
    packed = Fsdp2Backend(str(model_folder), "float32", "cpu", TrainerConfig())
    padded = Fsdp2Backend(str(folder), "float32", "cpu", TrainerConfig())
    assert padded.model.lm.config._attn_implementation == "eager" and not padded.model.packs
    assert packed.model.packs
    a, b = (model.forward(tensors).logprobs[tensors.mask] for model in (packed, padded))
    assert (a - b).abs().max() <= pass_rounding(float(a.abs().max()), layers=2, terms=64)
    out = tmp_path / "step"
    (out / "shards").mkdir(parents=True)
    padded._describe(out)
    written = json.loads(next(out.rglob("config.json")).read_text())
    assert written[ATTENTION_KEY] == "eager"


@pytest.mark.usefixtures("one_rank")
def test_an_implementation_that_is_not_installed_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(attention="flash_attention_2"), tmp_path)
    with pytest.raises(UserError, match=r"model\.path"):
        Fsdp2Backend(str(folder), "float32", "cpu", TrainerConfig())


# Selective checkpointing multiplies nothing again, keeps what the memory plan counts, and changes no gradient.


def backends(folder: Path) -> list[Fsdp2Backend]:
    """One that keeps everything, one that checkpoints selectively, and one that keeps its layers' input alone."""
    return [
        Fsdp2Backend(str(folder), "float32", "cpu", TrainerConfig(activation_checkpointing=how))
        for how in (False, "selective", True)
    ]


def gradients(backend: Fsdp2Backend, batch: Tensors) -> dict[str, Tensor]:
    loss_of(backend.model.outputs(batch, frozenset()), batch.lengths).backward()
    named = backend.model.named_parameters()
    found = {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}  # type: ignore[operator]
    backend.model.zero_grad()
    return found


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    "kind",
    # Plain attention, products of experts, soft caps and windows, layers with a state.
    [
        "qwen3",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("qwen3_moe", "gemma2", "qwen3_next")),
    ],
)
def test_gradients_are_those_of_layers_that_keep_everything(kind: str, shares: bool, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    batch = shared_rows(MODEL_VOCAB)
    if not shares:
        batch = msgspec.structs.replace(batch, tree=None)
    everything, selective, _ = (gradients(backend, batch) for backend in backends(tmp_path))
    assert everything.keys() == selective.keys()
    assert max(gradient.abs().max().item() for gradient in everything.values()) > 1e-6
    for name, gradient in everything.items():
        assert gradient.equal(selective[name]), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["gpt_oss", "olmo"])
def test_a_model_that_changes_what_is_kept_is_refused(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    _, selective, whole = backends(tmp_path)
    gradients(whole, shared_rows(MODEL_VOCAB))
    with pytest.raises(UserError, match=r"trainer\.activation_checkpointing=selective"):
        gradients(selective, shared_rows(MODEL_VOCAB))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_product_is_computed_again(shares: bool, tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    batch = shared_rows(MODEL_VOCAB)
    if not shares:
        batch = msgspec.structs.replace(batch, tree=None)
    counts = []
    for backend in backends(tmp_path):
        with FlopCounterMode(display=False) as counter:
            gradients(backend, batch)
        counts.append(counter.get_total_flops())
    everything, selective, whole = counts
    assert selective == everything < whole


class Kept(TorchDispatchMode):
    """Adds up the numbers in what the kept operations return, without attention's sums."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.numbers += (out[0] if isinstance(out, tuple) else out).numel()
        return out


@pytest.mark.usefixtures("one_rank")
def test_the_plan_counts_what_layers_keep(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path)
    config = TrainerConfig(activation_checkpointing="selective")
    # A value head's product is not among them, logits would be.
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", config, "value")
    batch = msgspec.structs.replace(shared_rows(MODEL_VOCAB), tree=None)
    with Kept() as kept:
        backend.model.outputs(batch, frozenset())
    size = size_of(model.config.to_dict())
    assert size is not None
    assert (size.selected - size.checkpointed) * int(batch.lengths.sum()) == kept.numbers > 0


# Weights that do not fit the config are refused by name, before anything is allocated.


NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def with_experts_of(inner: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Make the experts of another inner size than config.json says."""

    def sized(name: str, tensor: Tensor) -> Tensor:
        if ".experts." not in name:
            return tensor
        rows, columns = tensor.shape
        return (
            torch.ones(rows, inner) if name.endswith(("down_proj.weight", "w2.weight")) else torch.ones(inner, columns)
        )

    return lambda tensors: {name: sized(name, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("qwen3", without(NORM), NORM),
        ("qwen3", lambda tensors: tensors | {NORM: torch.ones(63)}, NORM),
        ("qwen3_moe", without(EXPERT), "model.layers.2.mlp.experts.gate_up_proj"),
        ("qwen3_moe", with_experts_of(64), "model.layers.0.mlp.experts.down_proj"),
        ("qwen3_moe", with_experts_of(16), "model.layers.0.mlp.experts.down_proj"),
        ("mixtral", with_experts_of(200), "model.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3_moe", lambda tensors: tensors | {EXPERT: torch.ones(32, 63)}, "layers.2.mlp.experts.gate_up_proj"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    saved(kind, tmp_path)
    build_headed(str(tmp_path), "policy")
    save_file(change(load_file(tmp_path / ONE_FILE)), tmp_path / ONE_FILE, {"format": "pt"})
    with pytest.raises(UserError, match=rf"model\.path.*{named}"):
        build_headed(str(tmp_path), "policy")


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    file = tmp_path / "config.json"
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    with pytest.raises(UserError, match=r"model\.path.*quantization_config"):
        build_headed(str(tmp_path), "policy")


def test_experts_in_4_bits_are_read_as_the_format_says_and_trained_in_more(tmp_path: Path, one_rank: None) -> None:
    """MXFP4: a sign, two bits of exponent and one of mantissa, times a power of two for every 32 numbers of a row."""
    saved("gpt_oss", tmp_path)
    file, draw = tmp_path / "config.json", torch.Generator().manual_seed(3)
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantized}))
    tensors, expected = load_file(tmp_path / ONE_FILE), dict[str, Tensor]()
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        codes = torch.randint(16, (experts, rows, columns), generator=draw)
        scales = torch.randint(120, 128, (experts, rows, columns // 32), generator=draw)
        exact = values[codes] * torch.exp2(scales - 127.0).repeat_interleave(32, -1)
        expected[name] = exact.transpose(1, 2)
        low, high = codes[..., ::2], codes[..., 1::2]
        tensors[name + "_blocks"] = (low | high << 4).to(torch.uint8).unflatten(-1, (-1, 16))
        tensors[name + "_scales"] = scales.to(torch.uint8)
    save_file(tensors, tmp_path / ONE_FILE, {"format": "pt"})
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", None)
    found = dict(backend.model.lm.named_parameters())
    for name, exact in expected.items():
        assert found[name].full_tensor().equal(exact), name
    assert not hasattr(backend.hf_config, "quantization_config"), "a saved model is not quantized"


@pytest.mark.parametrize("index", ["{", '{"weight_map": {"x": "gone.safetensors"}}'])
def test_an_index_that_cannot_be_followed_names_its_file(tmp_path: Path, index: str) -> None:
    saved("qwen3", tmp_path)
    (tmp_path / ONE_FILE).unlink()
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(UserError, match=r"model\.path.*(index|gone)"):
        build_headed(str(tmp_path), "policy")


def test_no_parameter_has_memory_before_it_is_filled(tmp_path: Path) -> None:
    saved("gemma3_text", tmp_path)
    model, _ = build_headed(str(tmp_path), "policy")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    # Modules that are made later have data.
    torch.nn.Linear(2, 2).weight.sum().item()


# What an exported model has beside its weights.


TEMPLATE = "{% for message in messages %}{{ message.content + '<|im_end|>' }}{% endfor %}"


def test_an_export_has_the_tokenizer_and_the_end_tokens_of_its_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    byte_tokenizer(TEMPLATE).save_pretrained(base)
    copy_text_files(base, tmp_path / "without")
    (base / "preprocessor_config.json").write_text('{"patch_size": 14}')
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    copy_text_files(base, tmp_path / "with")
    for name in ("with", "without"):
        assert (tmp_path / name / "tokenizer.json").is_file()
    assert not (tmp_path / "without/generation_config.json").exists()
    assert (tmp_path / "with/generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert (tmp_path / "with/preprocessor_config.json").read_text() == '{"patch_size": 14}'
