"""Both backends in bfloat16: float32 masters and gradients, and numbers as near to each other as bfloat16 allows."""

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl_async.trainer.backend import Backend
from rl_async.trainer.export import WHOLE
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import MODEL_FOLDER
from rl_async.trainer.packing import Tensors
from rl_async.trainer.pretrained import StoredWeights
from tests.contracts.backends.models import LAYERS as BFLOAT16_LAYERS
from tests.contracts.backends.models import (
    TERMS,
    TRAINING,
    assert_alike,
    cell_rows,
    loss_of,
    make_model,
    micro_batches,
    whole_batch,
)
from tests.contracts.backends.worker import ENTROPY, exported, step
from tests.contracts.backends.worker import make as make_backend
from tests.support.forked import joined, run_ranks, start_ranks
from tests.support.rounding import assert_near, pass_rounding
from tests.support.weights import whole_weights

# Ranks of a backend that compute in bfloat16.


RATE = 1e-6  # far below the last bit of a bfloat16 weight of 0.1, which is 5e-4
STEPS = 3


def make(sizes: dict[str, object], folder: str) -> Backend:
    config = msgspec.structs.replace(TRAINING, learning_rate=RATE, weight_decay=0.0, **sizes)
    if config.backend == "fsdp2":
        return Fsdp2Backend(folder, "bfloat16", "cpu", config)
    from rl_async.trainer.megatron.backend import MegatronBackend

    with reads_of_stored_weights() as reads:
        backend = MegatronBackend(folder, "bfloat16", "cpu", config)
    assert reads and set(reads.values()) == {1}, "weights and their masters are made of one reading"
    for chunk in backend._chunks:
        for parameter in chunk.parameters():
            assert (parameter.dtype, parameter.main_grad.dtype) == (torch.bfloat16, torch.float32)
    return backend


@contextmanager
def reads_of_stored_weights() -> Iterator[Counter[str]]:
    """Count how often each tensor of a model's folder is read meanwhile."""
    counts = Counter[str]()
    read = StoredWeights.read

    def counted(self: StoredWeights, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        counts[name] += 1
        return read(self, name, part)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoredWeights, "read", counted)
        yield counts


def sleep(backend: Backend) -> None:
    """Sleep and wake, with a look at what is released: all but the weights, of which engines may still ask."""
    weights = whole_weights(backend)
    backend.sleep()
    for chunk in getattr(backend, "_chunks", ()):
        for parameter in chunk.parameters():
            assert parameter.main_grad.untyped_storage().size() == 0 < parameter.untyped_storage().size()
    for name, tensor in whole_weights(backend).items():
        assert tensor.equal(weights[name]), name
    backend.wake()


class Elsewhere(TorchFunctionMode):
    """A second device, which this machine lacks: what is moved ``to`` it is copied, and listed."""

    def __init__(self) -> None:
        self.holds: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.to or tuple(args[1:]) != ("elsewhere",):
            return func(*args, **(kwargs or {}))
        self.holds.append(args[0].clone())
        return self.holds[-1]


def leave(backend: Backend) -> None:
    """Move the optimizer elsewhere: masters and moments all are there, and weights are not."""
    optimizer, weights = backend._optimizer, whole_weights(backend)  # type: ignore[attr-defined]
    with Elsewhere() as elsewhere:
        optimizer.move("elsewhere")
    there = {tensor.data_ptr() for tensor in elsewhere.holds}
    masters = [master for group in optimizer._optimizer.param_groups for master in group["params"]]
    states = [state for owner in optimizer._optimizer.chained_optimizers for state in owner.optimizer.state.values()]
    moments = [part for state in states for part in state.values() if part.dim()]
    assert len(moments) == 2 * len(masters) > 0
    assert {tensor.data_ptr() for tensor in (*masters, *moments)} == there
    assert all(tensor.dtype == torch.float32 for tensor in elsewhere.holds)
    for name, tensor in whole_weights(backend).items():
        assert tensor.equal(weights[name]), name


@joined()
def bfloat16_rank(options: str, folder: str, results: str) -> None:
    sizes, out = json.loads(options), Path(results)
    backend, rank = make(sizes, folder), dist.get_rank()
    found = exported(backend, "imported")
    logprobs = backend.forward(*whole_batch()).logprobs
    assert logprobs is not None
    told = [step(backend) for _ in range(STEPS)]
    saved = out / "checkpoint"
    saved.mkdir(exist_ok=True)
    dist.barrier()
    backend.save(saved)
    again = make(sizes, folder)
    again.load(saved)
    found |= exported(again, "loaded") | exported(backend, "trained")
    sleep(again)
    if sizes["backend"] == "megatron":
        leave(again)
    assert step(again) == step(backend)
    for name, tensor in whole_weights(backend).items():
        assert tensor.equal(whole_weights(again)[name]), name
    if rank == 0:
        masters = {f"masters.{name}": tensor for name, tensor in load_file(saved / MODEL_FOLDER / WHOLE).items()}
        save_file(found | masters | {"logprobs": logprobs.contiguous()}, out / "found.safetensors")
        (out / "steps.json").write_text(json.dumps(told))


# Ranks that train a step through recorded experts.


LAYERS, EXPERTS, CHOSEN = 4, 4, 2


def recorded(batches: Sequence[Tensors]) -> list[Tensors]:
    """The batches with experts that depend on the token and its place, so that a row has the same in any batch."""
    found = []
    for batch in batches:
        places = torch.arange(batch.tokens.shape[1])
        kind = batch.tokens + 3 * places
        one = (kind[..., None] + torch.arange(LAYERS)) % EXPERTS
        experts = torch.stack([one, (one + 1 + kind[..., None] % (EXPERTS - 1)) % EXPERTS], -1).to(torch.int16)
        experts[places >= batch.lengths[:, None] - 2] = -1
        found.append(msgspec.structs.replace(batch, experts=experts))
    return found


@joined()
def replaying_rank(options: str, folder: str, out: str) -> None:
    """Write log-probabilities with and without a record, and the trained weights."""
    backend = make_backend(msgspec.structs.replace(TRAINING, **json.loads(options)), Path(folder))
    assert backend.replays_routers
    plain = backend.forward(*whole_batch())
    outputs = backend.forward(*recorded(whole_batch()))
    assert plain.logprobs is not None and outputs.logprobs is not None
    found: dict[str, Tensor] = {"logprobs without": plain.logprobs, "logprobs": outputs.logprobs}
    if outputs.agreement is not None:
        found["agreement"] = outputs.agreement
    batches = recorded(micro_batches(cell_rows(backend.data_parallel.rank, backend.data_parallel.size)))
    backend.step(batches, loss_of(batches), ENTROPY)
    found |= whole_weights(backend)
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
MEGATRON = {"backend": "megatron"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"backend": "fsdp2"}),
    "megatron TP2": (2, MEGATRON | {"tensor_parallel": 2}),
    "megatron PP2": (2, MEGATRON | {"pipeline_parallel": 2}),
    "megatron DP2": (2, MEGATRON),
}
Ran = tuple[dict[str, Tensor], list[tuple[float, float]]]


def run(root: Path, model: Path, layout: str) -> Ran:
    ranks, sizes = LAYOUTS[layout]
    out = root / layout.replace(" ", "-")
    out.mkdir()
    run_ranks(
        "tests.contracts.backends.test_bfloat16:bfloat16_rank", json.dumps(sizes), str(model), str(out), ranks=ranks
    )
    return load_file(out / "found.safetensors"), json.loads((out / "steps.json").read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    root = tmp_path_factory.mktemp("bfloat16")
    make_model("qwen3", root / "model")
    return root / "model", run(root, root / "model", "fsdp2")


def stage(found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.partition(".")[2]: tensor for key, tensor in found.items() if key.startswith(f"{name}.")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_float32_masters(reference: tuple[Path, Ran], tmp_path: Path, layout: str) -> None:
    if layout.startswith("megatron") and not HAS_MEGATRON:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    model, other = reference
    found, steps = other if layout == "fsdp2" else run(tmp_path, model, layout)
    stored, masters = load_file(model / "model.safetensors"), stage(found, "masters")
    imported, trained = stage(found, "imported"), stage(found, "trained")
    assert imported.keys() == stored.keys() == masters.keys()
    for name, tensor in stored.items():
        assert imported[name].equal(tensor.to(torch.bfloat16)), f"{name} is read in float32 and rounded once"
        assert masters[name].dtype == torch.float32
        assert (masters[name] - tensor).abs().max() < 2 * STEPS * RATE, f"{name} begins unrounded"
        assert trained[name].equal(masters[name].to(torch.bfloat16)), name
        assert stage(found, "loaded")[name].equal(trained[name]), name
    moved = sum(int((masters[name] != stored[name]).sum()) for name in stored)
    same = sum(int((trained[name] == imported[name]).sum()) for name in stored)
    total = sum(tensor.numel() for tensor in stored.values())
    assert moved > 0.9 * total and same > 0.9 * total, f"{moved} masters moved, {same} rounded weights did not"

    (batch,) = whole_batch()
    real = torch.arange(batch.mask.shape[1]) < batch.lengths[:, None] - 1
    apart = (found["logprobs"] - other[0]["logprobs"])[real].abs()
    assert apart.mean() < 0.02, "the mean difference of log-probabilities that two orders of bfloat16 sums have"
    for (loss, norm), (loss_too, norm_too) in zip(steps, other[1], strict=True):
        assert loss == pytest.approx(loss_too, abs=0.02)
        assert norm == pytest.approx(norm_too, rel=0.03)


# Router replay on every backend and layout: the same numbers and gradients as FSDP2 on one rank.

REPLAY_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2 x2": (2, {"activation_checkpointing": True}),
    "megatron x1": (1, MEGATRON),
    "megatron EP2": (2, MEGATRON | {"expert_parallel": 2}),
    "megatron x2 that share rows": (2, MEGATRON | {"sequence_parallel": 2}),
    "megatron PP2": (2, MEGATRON | {"pipeline_parallel": 2}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", sorted(REPLAY_LAYOUTS))
def test_records_lead_to_the_same_numbers_and_weights(layout: str, tmp_path: Path) -> None:
    ranks, sizes = REPLAY_LAYOUTS[layout]
    if sizes.get("backend") == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    make_model("qwen3-moe", tmp_path / "model")
    told = []
    for number, (size, options) in enumerate([(1, {}), (ranks, sizes)]):
        out = tmp_path / f"{number}.safetensors"
        arguments = [json.dumps(options), str(tmp_path / "model"), str(out)]
        run_ranks("tests.contracts.backends.test_bfloat16:replaying_rank", *arguments, ranks=size, timeout_s=280)
        told.append(load_file(out))
    wanted, found = told
    assert (wanted["logprobs"] - wanted["logprobs without"]).abs().max() > 1e-2, "the record changes nothing"
    assert wanted.keys() - {"agreement"} == found.keys() - {"agreement"}
    outputs = {"logprobs", "logprobs without", "agreement"}
    for name in outputs & found.keys():
        size = wanted[name].abs().max().item()
        assert_near(found[name], wanted[name], pass_rounding(size, BFLOAT16_LAYERS, TERMS), name)
    of_step, expected = ({name: told[name] for name in told.keys() - outputs} for told in (found, wanted))
    assert_alike(of_step, expected, steps=1)
    assert ("agreement" in found) == ("pipeline_parallel" not in sizes)


def test_tensor_parallel_ranks_that_must_replay_do_not_start(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    make_model("qwen3-moe", tmp_path / "model")
    options = MEGATRON | {"tensor_parallel": 2, "expert_parallel": 2, "router_replay": "always"}
    arguments = [json.dumps(options), str(tmp_path / "model"), str(tmp_path / "out")]
    processes = start_ranks("tests.contracts.backends.test_bfloat16:replaying_rank", *arguments, ranks=2)
    errors = [process.communicate(280)[1] for process in processes]
    assert all("UserError: trainer.router_replay=always" in error for error in errors), errors
