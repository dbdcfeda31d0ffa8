"""How a model is spread, kept and computed, or its rows' prefixes shared, changes no gradient on real gloo ranks."""

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig
from rl_async.messages import Version
from rl_async.trainer import model as trainer_model
from rl_async.trainer.families import FAMILIES, why_not_shared
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors, pack
from rl_async.trainer.pretrained import StoredWeights
from rl_async.weight_sync.buckets import as_adapters, numbered
from rl_async.weight_sync.reshard import Gathering, PointToPoint
from tests.contracts.backends.models import ROWS, cell_rows, loss_of, make_model, micro_batches, outputs_of
from tests.contracts.trainer.test_training import LAYERS as TRAINED_LAYERS
from tests.contracts.trainer.test_training import RATE, STEPS, train
from tests.contracts.trainer.test_training import TERMS as TRAINED_TERMS
from tests.support.batches import loss_of as prefix_loss_of
from tests.support.batches import shared_rows
from tests.support.families import COMMON, DISTINCT, SPECIAL, config_of, saved
from tests.support.forked import joined, run_ranks
from tests.support.once import once
from tests.support.rounding import (
    assert_as_close,
    assert_near,
    assert_trained_alike,
    excess,
    in_float64,
    pass_rounding,
    to_float64,
)
from tests.support.weights import Received
from tests.unit.trainer.test_batches import padded

# Ranks that compute the gradients of a batch under several options.


BUCKET = 1 << 14


def gradients(backend: Fsdp2Backend) -> dict[str, Tensor]:
    """Of the test batch, summed over all ranks, by the names of the parameters."""
    batches = micro_batches(cell_rows(backend.data_parallel.rank, backend.data_parallel.size))
    backend.add_gradients(batches, loss_of(batches), frozenset({"entropy"}))
    named = backend.model.named_parameters()
    return {name: parameter.grad.full_tensor() for name, parameter in named if parameter.grad is not None}


def published(backend: Fsdp2Backend, lora: LoraConfig) -> dict[str, Tensor]:
    """After a step on the gradients: merged weights, and what an engine makes of adapters alone. On rank 0."""
    assert backend.optimizer is not None
    backend.optimizer.step()
    wire = PointToPoint(dist.HashStore(), device="cpu")
    gathering = Gathering(wire, dist.get_rank(), BUCKET, 60.0)
    merged, base, adapters = (
        gathering.buckets(backend.sharded_weights(what)) for what in ("merged", "base", "adapters")
    )
    if dist.get_rank() > 0:
        return {}
    ways = {"merged": merged, "alone": numbered([*base, *as_adapters(adapters, lora.scale)], Version(), "no")}
    return {f"{way}|{name}": t for way, sent in ways.items() for name, t in Received().take(sent).items()}


@joined()
def sharding_rank(model: str, out: str, options: str) -> None:
    """Write gradients, and of adapters also the weights that engines get after a step, ``merged`` and ``alone``.

    ``options`` are the trainer's, by case, as JSON.
    """
    found = {}
    for case, keys in json.loads(options).items():
        backend = Fsdp2Backend(model, "float32", "cpu", msgspec.convert(keys, TrainerConfig))
        found |= {f"{case}|{name}": gradient for name, gradient in gradients(backend).items()}
        if backend.config is not None and backend.config.lora is not None:
            sent = published(backend, backend.config.lora)
            found |= {f"{case}, {name}": tensor for name, tensor in sent.items()}
    if dist.get_rank() == 0:
        save_file(found, out)


# Two FSDP2 ranks that compute rows with and without shared prefixes.


def prefix_gradients(backend: Fsdp2Backend, batch: Tensors) -> dict[str, Tensor]:
    """Summed over the ranks, whose losses differ, by the names of the parameters."""
    loss = prefix_loss_of(backend.model.outputs(batch, frozenset({"entropy", "sum_squares"})), batch.lengths)
    (loss * (1 + dist.get_rank())).backward()
    named = backend.model.named_parameters()
    found = {name: parameter.grad.full_tensor() for name, parameter in named if parameter.grad is not None}
    backend.model.zero_grad()
    return found


@joined()
def prefixes_rank(model: str, out: str, options: str) -> None:
    """Write how far the gradients are from float64, as multiples of what rounding explains, and how large they are.

    ``options`` are the trainer's, by case, as JSON.
    """
    found = {}
    for case, keys in json.loads(options).items():
        backend = Fsdp2Backend(model, "float32", "cpu", msgspec.convert(keys, TrainerConfig))
        assert backend.row_cost.shares_prefixes
        batch = shared_rows(backend.hf_config.vocab_size)
        assert batch.tree is not None
        together, alone = (prefix_gradients(backend, x) for x in (batch, msgspec.structs.replace(batch, tree=None)))
        assert together.keys() == alone.keys()
        # Without checkpointing, which would compute again outside the mode.
        plainly = msgspec.convert(keys | {"activation_checkpointing": False}, TrainerConfig)
        exactly = Fsdp2Backend(model, "float32", "cpu", plainly)
        exactly.model.double()
        with in_float64():
            exact = prefix_gradients(exactly, msgspec.structs.replace(batch, tree=None))
        found[case] = {
            "excess": excess(together, alone, exact, int(batch.lengths.sum())),
            "size": max(gradient.abs().max().item() for gradient in alone.values()),
        }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


# Ranks that load models and compare them with Transformers' own loading.


READ: list[int] = []


# Their short convolutions are tensors of their own in files and parts of one here, and a rank reads whole ones.
STORED_APART = {"kimi_linear", "olmo_hybrid"}


class Counted(StoredWeights):
    """Counts the numbers that it reads."""

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        tensor = super().read(name, part)
        READ.append(tensor.numel())
        return tensor


def compare(folder: str, head: Any) -> None:
    READ.clear()
    got = Fsdp2Backend(folder, "float32", "cpu", None, head).model.lm
    kind: Any = AutoModel if head == "value" else AutoModelForCausalLM
    expected = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    parameters, plain = dict(got.named_parameters()), dict(expected.named_parameters())
    assert parameters.keys() == plain.keys() and not got.training
    for name, parameter in plain.items():
        whole = parameters[name].full_tensor()
        assert whole.dtype == torch.float32 and whole.equal(parameter), f"{folder}: {name}"
    buffers, computed = dict(got.named_buffers()), dict(expected.named_buffers())
    assert buffers.keys() == computed.keys()
    for name, buffer in computed.items():
        assert buffers[name].dtype == buffer.dtype and buffers[name].equal(buffer), f"{folder}: {name}"
    stored = set(got.state_dict()) & buffers.keys()
    sharded = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor)]
    held = sum(parameter.to_local().numel() for parameter in sharded)
    # Of an expert whose rows are divided a rank reads all, if files have it by itself.
    divided = [parameter for parameter in sharded if any(placement.is_shard(1) for placement in parameter.placements)]
    more = sum(parameter.numel() - parameter.to_local().numel() for parameter in divided)
    needed = held + sum(buffers[name].numel() for name in stored)
    if got.config.model_type in STORED_APART:
        assert needed <= sum(READ) < 1.1 * needed, f"{folder}: read {sum(READ)} of {held}"
    else:
        assert sum(READ) in (needed, needed + more), f"{folder}: read {sum(READ)} of {held}"


@joined()
def reading_rank(*folders_and_heads: str) -> None:
    """Compare the models in folders, each followed by its head."""
    trainer_model.StoredWeights = Counted  # type: ignore[misc]
    for folder, head in zip(folders_and_heads[::2], folders_and_heads[1::2], strict=True):
        compare(folder, head)


LORA: dict[str, Any] = {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}, "learning_rate": 1e-2}
HAS_PEFT = importlib.util.find_spec("peft") is not None
# Each option, and each pair of options that meet in the code. tests/contracts/backends/test_backend.py trains with the
# single ones on one and two ranks. Cases of one group are computed by the same processes.
OPTIONS: dict[tuple[int, str], dict[str, dict[str, Any]]] = {
    (1, "quick"): {"adapters": LORA, "plain": {}},
    (2, "quick"): {
        "adapters": LORA,
        "sharing rows, checkpointed": {"sequence_parallel": 2, "activation_checkpointing": True},
        "sharing rows, selective": {"sequence_parallel": 2, "activation_checkpointing": "selective"},
        "adapters, sharing rows": LORA | {"sequence_parallel": 2, "activation_checkpointing": True},
    },
    (4, "quick"): {"all": {"replicas": 2, "activation_checkpointing": True, "cpu_offload": True}},
    (4, "slow"): {
        "sharing rows": {"sequence_parallel": 2, "replicas": 2},
        "sharing rows, heads of keys twice": {"sequence_parallel": 4},
        "adapters": LORA | {"replicas": 2, "activation_checkpointing": True},
    },
}
# The longest sums are those of gradients over all tokens.
LAYERS, TERMS = 4, sum(int(batch.lengths.sum()) for batch in micro_batches(range(ROWS)))
SLOW = pytest.mark.slow
CASES = [
    pytest.param(ranks, case, marks=[SLOW] * (speed == "slow"))
    for (ranks, speed), options in OPTIONS.items()
    for case in options
    if "adapters" not in case
]
Found = Callable[..., dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of a plain Hugging Face model in this process, in float32 and in float64."""

    def gradients(model: Any) -> dict[str, Tensor]:
        batches = micro_batches(range(ROWS))
        for number, batch in enumerate(batches):
            loss_of(batches)(number, outputs_of(model, batch)).backward()
        return {f"lm.{name}": parameter.grad for name, parameter in model.named_parameters()}

    plain = gradients(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    exactly = to_float64(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with in_float64():
        return plain, gradients(exactly)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The gradients of a case, by number of ranks and name, or its ``weights``, "merged" or "alone"."""
    out = tmp_path_factory.mktemp("gradients")

    @once
    def computed(group: tuple[int, str]) -> dict[str, Tensor]:
        options = {case: keys for case, keys in OPTIONS[group].items() if HAS_PEFT or "lora" not in keys}
        file = out / f"{group[0]}-{group[1]}.safetensors"
        arguments = [str(folder), str(file), json.dumps(options)]
        run_ranks("tests.contracts.trainer.test_sharding:sharding_rank", *arguments, ranks=group[0])
        return load_file(file)

    def of_case(ranks: int, case: str, weights: str = "") -> dict[str, Tensor]:
        (group,) = (group for group, options in OPTIONS.items() if group[0] == ranks and case in options)
        prefix = f"{case}, {weights}|" if weights else f"{case}|"
        return {key.removeprefix(prefix): t for key, t in computed(group).items() if key.startswith(prefix)}

    return of_case


@pytest.mark.timeout(600)  # the first test of a group waits for its ranks
@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_gradients_are_those_of_a_plain_model(
    found: Found, expected: tuple[dict[str, Tensor], dict[str, Tensor]], ranks: int, case: str
) -> None:
    plain, exact = expected
    assert max(gradient.abs().max().item() for gradient in exact.values()) > 1e-2
    assert_as_close(found(ranks, case), plain, exact, TERMS)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_PEFT, reason="PEFT is not here; install it with pip install 'rl-async[lora]'")
@pytest.mark.parametrize(
    ("ranks", "case"), [(2, "adapters"), (2, "adapters, sharing rows"), pytest.param(4, "adapters", marks=SLOW)]
)
def test_adapters_have_the_same_gradients_on_any_ranks(found: Found, ranks: int, case: str) -> None:
    one, gradients = found(1, "adapters"), found(ranks, case)
    assert len(one) == 4 * 2 * 2, "A and B of two layers in each of four"
    assert max(gradient.abs().max().item() for gradient in one.values()) > 1e-2
    assert gradients.keys() == one.keys()
    for name, gradient in one.items():
        size = gradient.abs().max().item()
        assert_near(gradients[name], gradient, pass_rounding(size, LAYERS, TERMS, backward=True), name)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_PEFT, reason="PEFT is not here; install it with pip install 'rl-async[lora]'")
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (1, "adapters"),
        (2, "adapters"),
        (2, "adapters, sharing rows"),
        pytest.param(4, "adapters", marks=SLOW),
    ],
)
def test_adapters_alone_are_the_same_weights_as_merged_ones(found: Found, folder: Path, ranks: int, case: str) -> None:
    base = load_file(folder / "model.safetensors")
    merged, alone = (found(ranks, case, way) for way in ("merged", "alone"))
    assert merged.keys() == alone.keys() == base.keys()
    assert all(merged[name].equal(alone[name]) for name in base)
    changed = {name for name in base if not merged[name].equal(base[name])}
    assert changed == {name for name in base if name.endswith(("q_proj.weight", "down_proj.weight"))}


PREFIXES_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"activation_checkpointing": True},
    "replicas": {"replicas": 2},
    **({"adapters": {"lora": {"rank": 4}}} if HAS_PEFT else {}),
}


@pytest.mark.timeout(600)
def test_gradients_are_those_of_separate_rows(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    out = tmp_path / "found.json"
    arguments = [str(tmp_path / "model"), str(out), json.dumps(PREFIXES_OPTIONS)]
    run_ranks("tests.contracts.trainer.test_sharding:prefixes_rank", *arguments, ranks=2, timeout_s=500)
    found = json.loads(out.read_text())
    assert found.keys() == PREFIXES_OPTIONS.keys()
    for case, told in found.items():
        assert told["size"] > 1e-2, case
        assert told["excess"] <= 1, case


# Ranks that read only their own slices have, together, the weights that Transformers loads, bit by bit.


PRETRAINED_CASES: dict[str, dict[str, Any]] = {
    "tied": {"kind": "qwen3", "tie_word_embeddings": True},
    "in several files": {"kind": "qwen3_moe", "files": "60KB"},
    "in bfloat16": {"kind": "deepseek_v3", "stored": torch.bfloat16},
    "padded": {"kind": "stablelm"},
    "a critic's decoder": {"kind": "mixtral", "head": "value"},
}


def pretrained_saved(
    folder: Path, kind: str, files: str = "1GB", stored: torch.dtype = torch.float32, **options: Any
) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | SPECIAL.get(kind, {}) | options))
    model = AutoModelForCausalLM.from_config(config).to(stored)
    with torch.no_grad():  # the first values of some are all zeros or ones
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(folder, max_shard_size=files)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kinds", "cases"),
    [
        pytest.param(DISTINCT, PRETRAINED_CASES, id="distinct"),
        pytest.param(FAMILIES.keys() - DISTINCT, {}, id="others", marks=pytest.mark.nightly),
    ],
)
def test_each_rank_reads_its_part_of_what_transformers_loads(
    kinds: set[str], cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Of three ranks, since three divides none of the sizes."""
    arguments: list[str] = []
    for kind in sorted(kinds):
        arguments += [str(pretrained_saved(tmp_path / kind, kind)), "policy"]
    for number, (case, options) in enumerate(cases.items()):
        head = options.get("head", "policy")
        folder = pretrained_saved(
            tmp_path / f"{number} {case}", **{key: value for key, value in options.items() if key != "head"}
        )
        arguments += [str(folder), head]
        assert (len(list(folder.glob("*.safetensors"))) > 2) == ("files" in options), case
    run_ranks("tests.contracts.trainer.test_sharding:reading_rank", *arguments, ranks=3)


# Ranks that share packed rows: the same numbers and gradients as with rows of their own, for every kind of model.


# Two ranks cannot share out three heads of keys, nor the query heads that belong to them.
THREE_KEYS = {"num_attention_heads": 6, "num_key_value_heads": 3}
MODELS = {
    **{kind: (kind, {}) for kind in FAMILIES},
    "value of qwen3": ("qwen3", {}),
    "both of qwen3": ("qwen3", {}),
    "qwen3 of three heads of keys": ("qwen3", THREE_KEYS),
    "qwen3 of one head of keys": ("qwen3", {"num_key_value_heads": 1}),
}
GROUPS = {
    "distinct": [name for name, (kind, _) in MODELS.items() if kind in DISTINCT],
    "others": [name for name, (kind, _) in MODELS.items() if kind not in DISTINCT],
}


def shallow(kind: str) -> dict[str, Any]:
    """Options for two layers, one of each kind that the model has; SmolLM3's fourth is its first without positions."""
    types = SPECIAL.get(kind, {}).get("layer_types")
    return {} if kind == "smollm3" else {"num_hidden_layers": 2} | ({"layer_types": types[:2]} if types else {})


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, float]]]:
    """The ranks' findings on the models of a group, by model; a group is computed when its first is wanted."""

    @once
    def of_group(group: str) -> dict[str, dict[str, float]]:
        folder, names = tmp_path_factory.mktemp("models"), GROUPS[group]
        for name in names:
            kind, options = MODELS[name]
            saved(kind, folder / name, **shallow(kind), **options)
        out, module = folder / "differences.json", "tests.contracts.trainer.workers.ulysses"
        run_ranks(module, "cpu", str(folder), str(out), *names, ranks=2, timeout_s=500)
        found: dict[str, dict[str, float]] = json.loads(out.read_text())
        return found

    return of_group


# The first test of a group waits for all its models.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, id=name, marks=[pytest.mark.nightly] * (group == "others"))
        for group, names in GROUPS.items()
        for name in names
    ],
)
def test_shared_rows_are_computed_as_own_ones(
    differences: Callable[[str], dict[str, dict[str, float]]], group: str, name: str
) -> None:
    found = differences(group)[name]
    assert found["size"] > 1e-3
    assert found["excess"] <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(2, 5))
def test_every_token_is_one_ranks_and_has_its_position_and_target(lengths: list[int], ranks: int) -> None:
    batch = padded(lengths)
    whole = pack(batch)
    parts = [whole.share(rank, ranks) for rank in range(ranks)]
    assert len({part.tokens.shape for part in parts}) == 1, "ranks exchange parts of one size"
    total, groups = sum(lengths), {part.groups for part in parts}
    assert len(groups) == 1
    assert sum(length * sequences for length, sequences in groups.pop()) == ranks * parts[0].tokens.shape[1]
    for name, dim in (("tokens", 1), ("positions", 1), ("targets", 0), ("temperature", 0)):
        joined = torch.cat([getattr(part, name) for part in parts], dim)
        assert joined.narrow(dim, 0, total).equal(getattr(whole, name))
        assert not joined.narrow(dim, total, joined.shape[dim] - total).sub(float(name == "temperature")).any()
    assert total <= ranks * parts[0].tokens.shape[1] < total + ranks
    experts = torch.cat([part.experts for part in parts if part.experts is not None])
    assert experts[:total].equal(whole.experts) and (experts[total:] == -1).all()
    filled = torch.cat([part.tokens[0] for part in parts])
    assert whole.unpack(filled).equal(whole.unpack(whole.tokens[0]))


@pytest.mark.parametrize(
    ("kind", "options", "ranks", "reason"),
    [
        ("qwen3", {}, 3, "4 attention heads"),
        ("qwen3", {}, 8, "4 attention heads"),
        ("stablelm", {}, 2, "cannot be packed"),
        ("idefics3", {}, 2, "read images"),
    ],
)
def test_what_cannot_be_shared_is_told(kind: str, options: dict[str, object], ranks: int, reason: str) -> None:
    assert reason in (why_not_shared(config_of(kind, **options), ranks) or "")


def test_keys_of_few_heads_are_shared_by_more_ranks() -> None:
    assert why_not_shared(AutoConfig.for_model("qwen3", **COMMON), 4) is None


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_learn_and_report_what_one_rank_does(model_folder: Path, tmp_path: Path, ranks: int) -> None:
    one, shared = tmp_path / "one.safetensors", tmp_path / "shared.safetensors"
    expected = ast.literal_eval(train(model_folder, one, 1, 60, "decoupled_seq_is"))
    told = ast.literal_eval(train(model_folder, shared, ranks, 60, "decoupled_seq_is", '{"sequence_parallel": 2}'))
    of_ranks = {"batch/token_imbalance", "batch/work_imbalance"}
    assert told.keys() == expected.keys()
    rounded = pass_rounding(1.0, TRAINED_LAYERS, TRAINED_TERMS, backward=True)
    for name in told.keys() - of_ranks:
        assert told[name] == pytest.approx(expected[name], rel=rounded, abs=rounded), name
    assert_trained_alike(
        load_file(shared), load_file(one), rate=RATE, steps=STEPS, layers=TRAINED_LAYERS, terms=TRAINED_TERMS
    )
