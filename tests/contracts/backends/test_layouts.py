"""A checkpoint goes from layout to layout, and to the other backend and back: every number of it stays the same, and a
step from it leads to the weights to which the run that wrote it goes on."""

import importlib.util
import json
import shutil
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
from tests.contracts.backends.models import ROUNDED, STEPS, TRAINING, assert_alike, make_model
from tests.contracts.backends.worker import make as make_backend
from tests.contracts.backends.worker import step
from tests.support.forked import joined, run_ranks
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
