"""Training on real gloo ranks: results independent of ranks and micro-batches, precision, divergence, last steps."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import MISSING, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from rl_async.concurrency import in_daemon_thread
from rl_async.configs.schema.algorithm import AlgorithmConfig, CorrectionOptions, KlConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import TrainingDiverged
from rl_async.messages import Version
from rl_async.process.private_folder import RENDEZVOUS
from rl_async.trainer.actor_critic import Models, build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.checkpoints import host_copy, own_parts, read_shards, write_shards
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.ranks import ranks_joined
from rl_async.trainer.train import Run
from rl_async.trainer.update import update
from rl_async.weight_sync.process_groups import joined_store
from tests.conftest import make_rows
from tests.contracts.backends.models import ROWS, loss_of, make_model, micro_batches
from tests.support.forked import Forked, joined, run_ranks, start_ranks
from tests.support.ports import free_port, listeners
from tests.support.rounding import assert_near, assert_trained_alike, rounding
from tests.support.weights import whole_weights

# Ranks that train recorded rows for some steps and write the weights.


RATE, STEPS = 1e-3, 6  # three batches of two mini-batches


@joined()
def updating_rank(model: str, out: str, microbatch_tokens: str, correction: str, sizes: str) -> None:
    """Three steps with small micro-batches; rank 0 writes the weights, and all print the metrics."""
    config = RunConfig(
        model=ModelConfig(path=model, dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=AlgorithmConfig(
            correction=correction,
            correction_options=CorrectionOptions(normalise=correction.startswith("decoupled")),
            kl=KlConfig(coef=0.05),
        ),
        trainer=TrainerConfig(
            learning_rate=RATE, minibatches=2, max_tokens_per_microbatch=int(microbatch_tokens), **json.loads(sizes)
        ),
    )
    models = build_models(config, "cpu")
    metrics = {}
    for step in range(3):
        rows = make_rows(step)
        headers = [row.header() for row in rows]
        plan = plan_batch(headers, step, config, models.policy.data_parallel.size, models.row_cost)
        batch = Batch(step, headers, plan, {row.key: row for row in rows})
        metrics = update(models, batch, build(config), config).metrics
    weights = whole_weights(models.policy)
    if dist.get_rank() == 0:
        save_file(weights, out)
    print({k: round(v, 6) for k, v in metrics.items()})


# A rank that trains a batch with an infinite reward.


def diverging_rank(model: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = RunConfig(
        model=ModelConfig(path=model, dtype="float32"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(minibatches=1),
    )
    backend = Fsdp2Backend(model, "float32", "cpu", config.trainer)
    before = whole_weights(backend)
    rows = make_rows(7)
    rows[0].reward = math.inf
    headers = [row.header() for row in rows]
    batch = Batch(7, headers, plan_batch(headers, 7, config, 1, backend.row_cost), {row.key: row for row in rows})
    try:
        update(Models(backend), batch, build(config), config)
    except TrainingDiverged as error:
        assert all((tensor == before[name]).all() for name, tensor in whole_weights(backend).items()), "weights changed"
        print(error)
        sys.exit(3)


# Ranks that finish a run, whose final evaluation takes longer than the deadline of a collective.


JOIN_S = 60.0
COLLECTIVE_S = 3.0


class Idle:
    """A part of the run that has nothing to do."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class LongEvaluation:
    def finish(self, published: int, timeout_s: float, waiting: Callable[[], object]) -> list[Any]:
        for _ in range(6):
            waiting()
            time.sleep(COLLECTIVE_S / 4)
        return []


def finishing_rank(folder: str) -> None:
    config = RunConfig(
        model=ModelConfig(path="none"),
        data=DataConfig(path="none"),
        trainer=TrainerConfig(collective_timeout_s=JOIN_S),
    )
    with ranks_joined(config, Path(folder)):
        # Only now: a busy machine may need longer to start both ranks.
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_S))
        evaluations: Any = LongEvaluation() if dist.get_rank() == 0 else None
        tracking: Any = Idle() if dist.get_rank() == 0 else None
        names = [field.name for field in fields(Run) if field.default is MISSING]
        parts: dict[str, Any] = {name: Idle() for name in names} | {"config": config, "folder": Path(folder)}
        begun = time.monotonic()
        Run(**parts, evaluations=evaluations, tracking=tracking).finish(Version(0, 1))
        print(time.monotonic() - begun)


# Ranks that train in bfloat16 and check the precision of what is held and summed.


PRECISION_RATE = 1e-6  # far below the last bit of a bfloat16 weight of 0.1, which is 5e-4


def gradients(backend: Fsdp2Backend, numbers: list[int]) -> dict[str, Tensor]:
    """The sum over these micro-batches of every rank's batch, whole; all of them in one go, as ``step`` does."""
    batches = micro_batches(range(ROWS))
    loss_fn = loss_of(batches)
    backend.add_gradients(
        [batches[number] for number in numbers],
        lambda at, outputs: loss_fn(numbers[at], outputs) / dist.get_world_size(),
        frozenset({"entropy"}),
    )
    found = {}
    for name, parameter in backend.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        found[name] = parameter.grad.full_tensor().clone()
        parameter.grad = None
    return found


@joined()
def precise_rank(model: str) -> None:
    config = TrainerConfig(learning_rate=PRECISION_RATE, weight_decay=0.0, minibatches=1)
    backend = Fsdp2Backend(model, "bfloat16", "cpu", config)
    masters = {name: parameter.detach().full_tensor().clone() for name, parameter in backend.model.named_parameters()}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    seen: set[tuple[torch.dtype, bool]] = set()

    def look(layer: torch.nn.Module, inputs: object, output: Tensor) -> None:
        weight = layer.get_parameter("mlp.up_proj.weight").detach()
        hidden = output[0] if isinstance(output, tuple) else output
        name = next(name for name, part in backend.model.named_modules() if part is layer)
        expected = masters[f"{name}.mlp.up_proj.weight"].to(torch.bfloat16)
        seen.add((weight.dtype, weight.equal(expected)))
        assert hidden.dtype == torch.bfloat16

    # A module's own hooks run before FSDP's, which free the gathered weights.
    hooks = [layer.register_forward_hook(look, prepend=True) for layer in backend.model.lm.base_model.layers]
    each = [gradients(backend, [number]) for number in range(4)]
    for hook in hooks:
        hook.remove()
    assert seen == {(torch.bfloat16, True)}, "layers compute with the masters rounded to bfloat16"

    together = gradients(backend, [0, 1, 2, 3])
    for name, total in together.items():
        exact = torch.stack([part[name].double() for part in each]).sum(0)
        # Four gradients, each summed over two ranks.
        bound = rounding(torch.stack([part[name].double().abs() for part in each]).sum(0).max(), terms=8)
        assert_near(total, exact, bound, f"{name}, of which gradients are summed in float32")
        assert not total.equal(total.bfloat16().float()), f"{name}: and not rounded after"

    before = whole_weights(backend)
    batches = micro_batches(range(ROWS))
    backend.step(batches, loss_of(batches), frozenset({"entropy"}))
    assert backend.optimizer is not None
    moments = [t for state in backend.optimizer.state.values() for t in state.values()]
    assert len(moments) == 3 * len(masters) and {moment.dtype for moment in moments} == {torch.float32}
    after = whole_weights(backend)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    moved = unmoved = 0
    for name, parameter in backend.model.named_parameters():
        master = parameter.detach().full_tensor()
        sent = after[name.removeprefix("lm.")]
        assert sent.equal(master.to(torch.bfloat16)), f"{name}: engines get the masters rounded once"
        moved += int((master != masters[name]).sum())
        unmoved += int((sent == before[name.removeprefix("lm.")]).sum())
    total = sum(tensor.numel() for tensor in masters.values())
    assert moved > 0.5 * total, f"{moved} of {total} masters moved by a step that bfloat16 cannot hold"
    assert unmoved > 0.9 * total, f"{unmoved} of {total} rounded weights did not"


# Of the model of ``model_folder``, whose longest sums are those of gradients over all tokens of a batch.
LAYERS, TERMS = 2, sum(len(row.token_ids) for row in make_rows(0))


def train(model: Path, out: Path, ranks: int, tokens: int, correction: str, sizes: str = "{}") -> str:
    """Run ``update_worker`` on ``ranks`` processes; returns the metrics, which all of them must agree on."""
    arguments = [str(model), str(out), str(tokens), correction, sizes]
    told = run_ranks("tests.contracts.trainer.test_training:updating_rank", *arguments, ranks=ranks, timeout_s=120)
    assert len(set(told)) == 1, "ranks disagree about the metrics"
    return told[0]


@pytest.mark.parametrize("correction", ["decoupled_token_is", pytest.param("bypass_ppo_clip", marks=pytest.mark.slow)])
def test_ranks_and_micro_batches_do_not_change_what_is_learned(
    model_folder: Path, tmp_path: Path, correction: str
) -> None:
    metrics = {}
    for name, ranks, tokens in (("one", 1, 10_000), ("small", 1, 40), ("two", 2, 60)):
        metrics[name] = train(model_folder, tmp_path / f"{name}.safetensors", ranks, tokens, correction)
    if correction.startswith("decoupled"):
        assert all("'correction/weight_mean': 1.0," in told for told in metrics.values()), "not normalised"
    whole = load_file(tmp_path / "one.safetensors")
    before = load_file(model_folder / "model.safetensors")
    assert any((whole[k] - before[k]).abs().max() > 1e-4 for k in whole)
    for other in ("small", "two"):
        weights = load_file(tmp_path / f"{other}.safetensors")
        assert_trained_alike(weights, whole, rate=RATE, steps=STEPS, layers=LAYERS, terms=TERMS)


@pytest.mark.timeout(600)
def test_masters_gradients_and_moments_are_float32(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    run_ranks("tests.contracts.trainer.test_training:precise_rank", str(tmp_path), ranks=2)


def test_an_infinite_reward_names_step_and_groups(model_folder: Path) -> None:
    worker = Forked("tests.contracts.trainer.test_training:diverging_rank", str(model_folder))
    out, errors = worker.communicate(timeout=120)
    assert worker.returncode == 3, errors[-2000:]
    assert "step 7, mini-batch 0 of 1, groups [28, 29, 30, 31]" in out
    assert "must be finite" in out


@pytest.mark.timeout(180)
def test_ranks_wait_for_a_final_evaluation_longer_than_a_collective_takes(tmp_path: Path) -> None:
    waited = run_ranks("tests.contracts.trainer.test_training:finishing_rank", str(tmp_path), ranks=2, timeout_s=120)
    assert all(float(seconds) > COLLECTIVE_S for seconds in waited)


# How ranks meet: by a file that strangers cannot open, or on the address that they were given; they execute nothing
# that arrives.


# A rank of the trainer's group.


def refused(*arguments: Any) -> NoReturn:
    raise AssertionError("a pickled object came from another rank")


def tensors(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(15.0).reshape(5, 3) * value
    return {"sharded": distribute_tensor(rows, mesh, [Shard(0)]), "whole": torch.tensor(value)}


def joining_rank(run: str, timeout_s: str = "100") -> None:
    """Join the trainer's group and show where this rank listens.

    It saves and loads a sharded and a whole tensor, and would fail if that unpickled anything of another rank; then it
    waits for the file ``go on``, meets the others in a new group, and ends.
    """
    folder = Path(run)
    distributed_c10d._tensor_to_object = refused
    trainer = TrainerConfig(collective_timeout_s=float(timeout_s))
    config = RunConfig(model=ModelConfig(path="none"), data=DataConfig(path="none"), trainer=trainer)
    with ranks_joined(config, folder):
        write_shards(host_copy(own_parts(tensors(2.0))), folder / "shards", None)
        read = tensors(0.0)
        read_shards(read, folder / "shards")
        assert all(torch.equal(full(a), full(b)) for a, b in zip(read.values(), tensors(2.0).values(), strict=True))
        print(" ".join(listeners([os.getpid()])), flush=True)
        while not (folder / "go on").exists():
            time.sleep(0.05)
        dist.barrier(dist.new_group())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


WORKER = "tests.contracts.trainer.test_training:joining_rank"
BETWEEN_HOSTS = {RENDEZVOUS: ""}


@contextmanager
def ranks_at_work(folder: Path, **environment: str) -> Iterator[list[str]]:
    """Where two ranks listen, while they wait; afterwards they must train on and end well."""
    (folder / "shards").mkdir()
    ranks = start_ranks(WORKER, str(folder), ranks=2, environment=environment)
    try:
        yield " ".join(rank.first_line(120) for rank in ranks).split()
        (folder / "go on").touch()
        ends = [rank.communicate(60) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], ends
    finally:
        for rank in ranks:
            rank.kill()


def meddle(address: str, timeout_s: float) -> bool:
    """Be a stranger who reads and writes what ranks tell one another; whether there was a store."""
    host, _, port = address.rpartition(":")
    try:
        store = joined_store(host, int(port), timeout_s)
        store.set("default_pg/0//cpu//0", "read " + str(store.num_keys()))
        return True
    except RuntimeError:
        return False


def store_at_any(addresses: Sequence[str], timeout_s: float) -> bool:
    """Meddle with all addresses at once, until the first store answers; gloo's own listeners never do."""
    strangers = [in_daemon_thread(partial(meddle, address, timeout_s), "stranger") for address in addresses]
    return any(stranger.result() for stranger in as_completed(strangers))


@pytest.mark.timeout(180)
def test_a_stranger_finds_no_store_of_ranks_on_one_machine(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path) as found:
        assert {address.rpartition(":")[0] for address in found} == {"127.0.0.1"}
        assert len(found) >= 2, "gloo of both"
        assert not store_at_any(found, 1.0)


@pytest.mark.timeout(180)
def test_ranks_of_several_machines_listen_on_their_master_address_only(tmp_path: Path) -> None:
    with ranks_at_work(tmp_path, **BETWEEN_HOSTS) as found:
        assert {address.rpartition(":")[0] for address in found} == {"127.0.0.1"}
        assert len(found) >= 3, "the store of rank 0, and gloo of both"
        assert store_at_any(found, 30.0), "so meddle() would have found one"


@pytest.mark.timeout(180)
def test_a_rank_that_does_not_arrive_ends_the_other(tmp_path: Path) -> None:
    rank = Forked(
        WORKER,
        str(tmp_path),
        "1",
        environment={
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_PORT": str(free_port()),
            RENDEZVOUS: str(tmp_path / "meet"),
        },
    )
    errors = rank.communicate(120)[1]
    assert rank.returncode != 0 and "RanksLost" in errors
