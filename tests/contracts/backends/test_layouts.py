"""A checkpoint goes from layout to layout, and to the other backend and back: every number of it stays the same, and a
step from it leads to the weights to which the run that wrote it goes on."""

import ast
import functools
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_async.trainer.backend import Backend
from rl_async.trainer.checkpoints import MOMENT, SHARDING, StoredShards, write_tensors, write_whole
from rl_async.trainer.checkpoints import STEPS as SAVED_STEPS
from rl_async.trainer.export import SHARDS
from rl_async.trainer.fsdp2 import Fsdp2Backend
from tests.contracts.backends.models import LAYERS, ROUNDED, STEPS, TERMS, TRAINING, assert_alike, make_model
from tests.contracts.backends.worker import make as make_backend
from tests.contracts.backends.worker import step
from tests.contracts.trainer.test_ranks import train as critic_train
from tests.contracts.trainer.test_training import train
from tests.support.forked import joined, run_ranks
from tests.support.rounding import assert_trained_alike
from tests.support.weights import whole_weights

# Ranks that train two steps, or continue from a checkpoint, save, and take a step.


def make(options: dict[str, object], dtype: str, model: str) -> Backend:
    config = msgspec.structs.replace(TRAINING, **options)
    if config.backend == "fsdp2":
        return Fsdp2Backend(model, dtype, "cpu", config)
    from rl_async.trainer.megatron.backend import MegatronBackend

    return MegatronBackend(model, dtype, "cpu", config)


@joined()
def layouts_rank(options: str, dtype: str, model: str, out: str, checkpoint: str = "") -> None:
    """Leave the checkpoint in ``out``/saved, and the weights after the step."""
    backend = make(json.loads(options), dtype, model)
    if checkpoint:
        backend.load(Path(checkpoint))
    else:
        for _ in range(STEPS):
            step(backend)
    saved = Path(out) / "saved"
    saved.mkdir(parents=True, exist_ok=True)
    backend.save(saved)
    step(backend)
    weights = whole_weights(backend)
    if dist.get_rank() == 0:
        save_file(weights, Path(out) / "after.safetensors")


# Two ranks on which each backend continues from the other's checkpoint.


def saved(backend: Backend, folder: Path) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)
    dist.barrier()
    return folder


def compare(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.equal(two[name]), name


@joined()
def interchanging_rank(sizes: str, folder: str, results: str) -> None:
    model, out = Path(folder), Path(results)
    config = msgspec.structs.replace(TRAINING, backend="megatron", **json.loads(sizes))
    fsdp2 = Fsdp2Backend(str(model), "float32", "cpu", TRAINING)
    untouched = make_backend(config, model)
    untouched.load(saved(fsdp2, out / "first"))  # has no moments yet
    compare(whole_weights(untouched), whole_weights(fsdp2))
    for _ in range(2):
        step(fsdp2)
    megatron = make_backend(config, model)
    megatron.load(saved(fsdp2, out / "fsdp2"))
    compare(whole_weights(megatron), whole_weights(fsdp2))
    norm, other = step(megatron)[1], step(fsdp2)[1]
    assert abs(norm - other) <= ROUNDED * other
    assert_alike(whole_weights(megatron), whole_weights(fsdp2), steps=1)

    again = Fsdp2Backend(str(model), "float32", "cpu", TRAINING)
    again.load(saved(megatron, out / "megatron"))
    compare(whole_weights(again), whole_weights(megatron))
    before = whole_weights(again)
    step(again)
    step(megatron)
    assert_alike(whole_weights(again), whole_weights(megatron), steps=1)
    moved = max((tensor - before[name]).abs().max().item() for name, tensor in whole_weights(again).items())
    assert moved > 1e-4, "a step moves weights further than the backends are apart"


Layout = tuple[int, dict[str, Any]]  # ranks, and the trainer's options


def megatron(ranks: int, **sizes: int) -> Layout:
    return ranks, {"backend": "megatron", **sizes}


FSDP2: Layout = (2, {"backend": "fsdp2"})
TP2_DP2, PP2, TP2 = megatron(4, tensor_parallel=2), megatron(2, pipeline_parallel=2), megatron(2, tensor_parallel=2)
CHAINS: dict[str, list[Layout]] = {
    "qwen2-tied": [TP2_DP2, PP2, megatron(3), FSDP2, TP2],
    "qwen3": [FSDP2, megatron(4, sequence_parallel=2), megatron(1)],
    "qwen3-moe": [
        megatron(4, tensor_parallel=2, expert_parallel=4),
        FSDP2,
        megatron(2, expert_parallel=2),
        megatron(4, pipeline_parallel=2),
    ],
}


def run(layout: Layout, dtype: str, model: Path, out: Path, checkpoint: Path | None = None) -> Path:
    """Continue on these ranks; the checkpoint that they left, in which each of them wrote."""
    ranks, options = layout
    arguments = [json.dumps(options), dtype, str(model), str(out), *([] if checkpoint is None else [str(checkpoint)])]
    run_ranks("tests.contracts.backends.test_layouts:layouts_rank", *arguments, ranks=ranks)
    writers = {path.name.partition("-model-")[0] for path in (out / "saved" / SHARDS).iterdir()}
    assert writers == {f"shard-{rank + 1:05d}" for rank in range(ranks)}
    return out / "saved"


def layouts_compare(one: Path, two: Path) -> None:
    """Weights and moments, experts by their own names; whatever else is in either is the number of steps."""
    stored, other = StoredShards(one / SHARDS), StoredShards(two / SHARDS)
    moments = [name for name in stored.sizes if name.endswith("|exp_avg")]
    assert 3 * len(moments) == len(stored.sizes) - 1 and any(stored.whole(name).any() for name in moments)
    for name, size in stored.sizes.items():
        if ".experts." in name and name.count(".weight") == 0:
            continue  # stacked: looked at from the other side
        found = torch.empty(size, dtype=stored.dtypes[name])
        other.read_into(found, name)
        assert found.equal(stored.whole(name)), name


def compare_after(one: Path, two: Path) -> None:
    """The weights after a step."""
    weights, others = (load_file(path.parent / "after.safetensors") for path in (one, two))
    assert_alike(others, weights, steps=1)


def difference(one: Tensor, two: Tensor) -> float:
    return (one - two).abs().max().item()


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", CHAINS)
def test_a_run_continues_with_any_layout(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(family, model)
    layout, *others = CHAINS[family]
    first = run(layout, "float32", model, tmp_path / "0")
    before = load_file(first / "model" / "model.safetensors")
    after = load_file(first.parent / "after.safetensors")
    assert max(difference(after[name], before[name]) for name in before) > 1e-4, "a step moves weights further"
    last = first
    for number, other in enumerate(others, start=1):
        last = run(other, "float32", model, tmp_path / str(number), last)
        layouts_compare(first, last)
        layouts_compare(last, first)
        compare_after(first, last)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bfloat16_weights_keep_their_float32_masters(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model("qwen3", model)
    first = last = run(TP2_DP2, "bfloat16", model, tmp_path / "0")
    for number, layout in enumerate([PP2, FSDP2, megatron(2)], start=1):
        last = run(layout, "bfloat16", model, tmp_path / str(number), last)
        layouts_compare(first, last)


def counts(folder: Path) -> dict[str, Tensor]:
    """What formats before 3 had besides: the number of steps once for each parameter, as AdamW keeps it."""
    stored = StoredShards(folder / SHARDS)
    steps = stored.whole(SAVED_STEPS).float()
    return {f"{name.partition(MOMENT)[0]}{MOMENT}step": steps.clone() for name in stored.sizes if MOMENT in name}


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2-tied", TP2), ("qwen2-tied", FSDP2), ("qwen3-moe", FSDP2)],
    ids=["TP2", "fsdp2", "fsdp2-experts"],
)
def test_whole_tensors_of_the_format_before_are_read(family: str, layout: Layout, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(family, model)
    first = run(PP2, "float32", model, tmp_path / "0")
    before = shutil.copytree(first, tmp_path / "before")
    optimizer = before / "optimizer.safetensors"
    write_whole(before / SHARDS, optimizer, lambda name: name if MOMENT in name else None)
    save_file(load_file(optimizer) | counts(before), optimizer)
    shutil.rmtree(before / SHARDS)
    last = run(layout, "float32", model, tmp_path / "1", before)
    layouts_compare(first, last)
    compare_after(first, last)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shards_of_the_format_before_are_read(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model("qwen2-tied", model)
    first = run(FSDP2, "float32", model, tmp_path / "0")
    before = shutil.copytree(first, tmp_path / "before")
    steps = counts(before)
    sizes = {name: ("F32", []) for name in steps}
    offsets = json.dumps({name: {"saved_offsets": []} for name in steps})
    more = before / SHARDS / "shard-00003-model-00001-of-00001.safetensors"
    write_tensors(more, sizes, iter(steps.values()), {SHARDING: offsets})
    last = run(FSDP2, "float32", model, tmp_path / "1", before)
    layouts_compare(first, last)
    compare_after(first, last)


# A run continues with the other backend: weights are equal bit by bit, AdamW's moments and the step come along.


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"tensor_parallel": 2}),
        pytest.param("qwen2-tied", {"pipeline_parallel": 2}, marks=pytest.mark.nightly),
        ("qwen3-moe", {"expert_parallel": 2}),
    ],
)
def test_each_backend_goes_on_from_the_others_checkpoint(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    make_model(family, tmp_path / "model")
    arguments = [json.dumps(sizes), str(tmp_path / "model"), str(tmp_path)]
    run_ranks("tests.contracts.backends.test_layouts:interchanging_rank", *arguments, ranks=2)


# Whole trainer steps on Megatron-Core's ranks: the same weights and metrics as FSDP2 on one, however they are laid
# out.


LAYOUTS = {
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "DP2": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 whose vocabulary does not divide."""
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen2-tied", folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], str]:
    """Weights and metrics of FSDP2 on one rank."""
    out = tmp_path_factory.mktemp("alone") / "weights.safetensors"
    metrics = train(model, out, 1, 60, "decoupled_seq_is")
    return load_file(out), metrics


def numbers(told: str) -> dict[str, float]:
    """The metrics that were printed, but for how equal the ranks' work is."""
    metrics: dict[str, float] = ast.literal_eval(told)
    return {name: value for name, value in metrics.items() if not name.endswith("_imbalance")}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_what_is_learned(
    model: Path, tmp_path: Path, alone: tuple[dict[str, Tensor], str], layout: str
) -> None:
    """With a reference, and micro-batches that the layout of ranks decides on."""
    sizes = json.dumps({"backend": "megatron", "ranks": 2} | LAYOUTS[layout])
    out = tmp_path / "weights.safetensors"
    metrics = numbers(train(model, out, 2, 60, "decoupled_seq_is", sizes))
    weights, (expected, told) = load_file(out), alone
    assert metrics == pytest.approx(numbers(told), rel=1e-3, abs=1e-4)
    before = load_file(model / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert max((weights[name] - before[name]).abs().max().item() for name in before) > 1e-4
    # AdamW divides by the root of the squared gradient, which magnifies the last bits of tiny gradients
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) < 2e-5


# Critics on Megatron-Core's ranks: both models learn what they learn with FSDP2 on one rank, however ranks are laid
# out, and either backend continues from the checkpoint.

UPDATE_FSDP2: dict[str, Any] = {}
MEGATRON = {"backend": "megatron", "ranks": 2}
SIZES = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel")
UPDATE_TP2, UPDATE_PP2, EP2, SHARING = ({key: 2} for key in SIZES)
CORRECTIONS = {"own": "bypass_ppo_clip", "shared": "decoupled_token_is"}
Trained = tuple[dict[str, Tensor], list[dict[str, float]]]


@pytest.fixture(scope="module")
def critic_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Trained]]:
    """A model by its family, and by the kind of critic the weights and metrics of FSDP2 on one rank."""
    folder = tmp_path_factory.mktemp("critic_alone")

    @functools.cache
    def trained(family: str, kind: str) -> tuple[Path, Trained]:
        make_model(family, folder / family)
        return folder / family, critic_train(
            folder / family, folder / f"{family}-{kind}", 1, "60", kind, CORRECTIONS[kind]
        )

    return trained


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)
@pytest.mark.parametrize(
    ("family", "kind", "sizes", "resumed"),
    [
        pytest.param("qwen2-tied", "own", MEGATRON | UPDATE_TP2, MEGATRON | UPDATE_TP2, id="own on TP2"),
        pytest.param("qwen2-tied", "shared", MEGATRON | UPDATE_TP2, UPDATE_FSDP2, id="shared on TP2, then FSDP2"),
        pytest.param("qwen2-tied", "own", MEGATRON | UPDATE_PP2, UPDATE_FSDP2, id="own on PP2, then FSDP2"),
        pytest.param("qwen2-tied", "shared", UPDATE_FSDP2, MEGATRON | UPDATE_PP2, id="shared on FSDP2, then PP2"),
        pytest.param("qwen2-tied", "own", UPDATE_FSDP2, MEGATRON, id="own on FSDP2, then DP2"),
        pytest.param("qwen2-tied", "own", MEGATRON | SHARING, MEGATRON, id="own on shared rows, then DP2"),
        pytest.param("qwen3-moe", "own", UPDATE_FSDP2, MEGATRON | UPDATE_TP2 | EP2, id="own on FSDP2, then TP2 EP2"),
        pytest.param(
            "qwen3-moe", "shared", MEGATRON | UPDATE_TP2 | EP2, MEGATRON | EP2, id="shared on TP2 EP2, then EP2"
        ),
    ],
)
def test_both_models_learn_the_same_as_with_fsdp2(
    critic_alone: Callable[[str, str], tuple[Path, Trained]],
    tmp_path: Path,
    family: str,
    kind: str,
    sizes: dict[str, Any],
    resumed: dict[str, Any],
) -> None:
    model, (expected, metrics) = critic_alone(family, kind)
    options = [json.dumps(sizes), json.dumps(resumed)]
    found, metrics_too = critic_train(model, tmp_path / "out", 2, "60", kind, CORRECTIONS[kind], *options)
    for one, two in zip(metrics, metrics_too, strict=True):
        told = {name: value for name, value in one.items() if not name.endswith("_imbalance")}
        assert {name: two[name] for name in told} == pytest.approx(told, rel=1e-3, abs=1e-4)
    # Four steps of two mini-batches each.
    assert_trained_alike(found, expected, rate=1e-3, steps=8, layers=LAYERS, terms=TERMS)
