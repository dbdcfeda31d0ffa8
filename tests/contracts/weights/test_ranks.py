"""Weights of several trainer ranks: published to engines in other processes, and resharded between real processes."""

import json
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_async.errors import RanksLost
from rl_async.messages import Version
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.experts import single_layout, single_specs
from rl_async.weight_sync.layout import Layout, TensorSpec, engine, fsdp2, megatron, volume, whole
from rl_async.weight_sync.protocol import SyncReport, TransportName
from rl_async.weight_sync.sender import Outlet, RankShards, RemoteOutlet, plan_rounds
from tests.contracts.weights import test_transport
from tests.contracts.weights.outlet_rank import RANKS, ROWS, named, sync_of
from tests.contracts.weights.reshard_rank import BUCKET, SCENARIOS, WORLD
from tests.contracts.weights.test_transport import TRANSPORTS, Directory, Start, connect, states
from tests.support.forked import Forked, start_ranks
from tests.support.ports import free_port
from tests.support.weights import HOST, TOKEN, shards_of, specs_of

start = test_transport.start
NBYTES = sum(rows * 16 * 2 for rows in ROWS)


class Trainer:
    """Both ranks of one lineage, and the coordinator on the first."""

    def __init__(self, directory: Directory, transport: TransportName, folder: Path, lineage: int, fault: str) -> None:
        self._lineage, self._exits = lineage, ExitStack()
        arguments = [transport, str(folder), str(lineage), *fault.split()]
        self._other = Forked("tests.contracts.weights.outlet_rank", *arguments)
        self._exits.callback(self._other.wait, 10)
        self._exits.callback(self._other.kill)
        remote = RemoteOutlet(1, str(self._other.first_line()), TOKEN, 5, 30)
        sync = sync_of(transport, str(folder), 30)
        self._outlet = Outlet(0, sync, HOST, 30)
        self._layout = fsdp2(specs_of(named(0)), RANKS)
        self._shards = RankShards(self._outlet, {1: remote})
        self._exits.callback(self._shards.close)
        self.coordinator = self._exits.enter_context(WeightCoordinator(directory.open, connect, sync))

    def publish(self, step: int) -> SyncReport:
        version = Version(self._lineage, step)
        self._outlet.offer(shards_of(self._layout, 0, named(10.0 * step)))
        return self.coordinator.publish(version, self._shards)

    def close(self) -> None:
        self._exits.close()


@contextmanager
def trainer(
    directory: Directory, transport: TransportName, folder: Path, lineage: int = 0, fault: str = ""
) -> Iterator[Trainer]:
    running = Trainer(directory, transport, folder / "weights", lineage, fault)
    try:
        yield running
    finally:
        running.close()


def serves(value: float, version: str) -> dict[str, object]:
    sums = {f"layer.{i}": 16.0 * rows * (value + i) for i, rows in enumerate(ROWS)}
    return {"paused": False, "version": version, "sums": sums}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_killed_in_the_middle_is_cut_off_and_the_others_go_on(
    transport: TransportName, start: Start, tmp_path: Path
) -> None:
    directory, records = Directory(), start(a="", b="", dying="--fault kill --at 5")
    directory.add(*records)
    with trainer(directory, transport, tmp_path) as ranks:
        report = ranks.publish(0)
        assert (report.engines, report.failures, report.nbytes) == (["a", "b", "dying"], [], NBYTES)
        report = ranks.publish(1)
        assert report.engines == ["a", "b"] and report.failures[0].startswith("dying failed in update, bucket 2/3: ")
        assert states(records[:2]) == {"a": serves(10, "0.1"), "b": serves(10, "0.1")}
        assert ranks.publish(2).engines == ["a", "b"]
        assert states(records[:2]) == {"a": serves(20, "0.2"), "b": serves(20, "0.2")}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("transport", "how"), [*((t, "kill") for t in TRANSPORTS), pytest.param("gloo", "stop", marks=pytest.mark.slow)]
)
def test_engines_survive_a_rank_that_is_lost_in_the_middle_and_take_weights_from_the_next_ones(
    transport: TransportName, how: str, start: Start, tmp_path: Path
) -> None:
    directory, records = Directory(), start(a="", b="")
    directory.add(*records)
    with trainer(directory, transport, tmp_path, fault=f"--fault {how} --at 5") as ranks:
        assert ranks.publish(0).engines == ["a", "b"]
        with pytest.raises(RanksLost, match="rank 0 lost rank 1"):
            ranks.publish(1)
    assert directory.removed == {} and directory.published == Version(0, 0)
    with trainer(directory, transport, tmp_path, lineage=1) as ranks:
        assert (ranks.publish(0).engines, ranks.publish(1).engines) == (["a", "b"], ["a", "b"])
    assert states(records) == {"a": serves(10, "1.1"), "b": serves(10, "1.1")}


@contextmanager
def ranks(mode: str) -> Iterator[list[Forked]]:
    """The processes, killed at the end."""
    store = str(free_port())
    processes = start_ranks(
        "tests.contracts.weights.reshard_rank", mode, ranks=WORLD, environment={"STORE_PORT": store}
    )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, int]]]:
    """The counts that each rank printed, by scenario."""
    with ranks("all") as processes:
        outputs = [process.communicate(timeout=180) for process in processes]
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors[-3000:]
    found: dict[str, list[dict[str, int]]] = {}
    for out, _ in outputs:
        for line in out.splitlines():
            told = json.loads(line)
            found.setdefault(told.pop("scenario"), []).append(told)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_arrives_is_what_gathering_and_slicing_gives(results: dict[str, list[dict[str, int]]], name: str) -> None:
    told = results[name]
    holders = [rank for rank, one in enumerate(told) if one["parameters"]]
    first = SCENARIOS[name].first
    assert holders == list(range(first, first + SCENARIOS[name].tp))
    assert [one["wrong"] for one in told] == [0] * WORLD


@pytest.mark.parametrize("name", SCENARIOS)
def test_only_what_is_needed_moves_in_buffers_of_a_bucket(results: dict[str, list[dict[str, int]]], name: str) -> None:
    told = results[name]
    assert told[0]["buckets"] > 2
    assert sum(one["sent"] for one in told) == sum(one["received"] for one in told) == told[0]["minimal"]
    assert told[0]["minimal"] < told[0]["full_gather"] or SCENARIOS[name].tp == 1
    assert sum(one["copied"] for one in told) == told[0]["local"]
    assert all(one["buffers"] <= BUCKET for one in told)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("killed", "gloo"),
        pytest.param("stopped", "gloo", marks=pytest.mark.slow),
        pytest.param("killed", "shared", marks=pytest.mark.slow),
        ("stopped", "shared"),
    ],
)
def test_a_rank_that_is_lost_is_named_by_all_others(how: str, kind: str) -> None:
    with ranks(f"{how} {kind}") as processes:
        for rank in (0, 2, 3):
            out, errors = processes[rank].communicate(timeout=90)
            assert f"rank {rank} lost rank 1" in out, out + errors[-3000:]
        if how == "killed":
            assert processes[1].wait(10) == -signal.SIGKILL


# Publications of models that no machine here can hold, planned by their shapes: built on the meta device.

LARGE_BUCKET = 1 << 30


def qwen3_235b() -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "vocab_size": 151936}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 94}
    experts = {"num_experts": 128, "num_experts_per_tok": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=False))


def deepseek_671b() -> Any:
    return DeepseekV3ForCausalLM(DeepseekV3Config())


def shapes(build: Callable[[], Any]) -> dict[str, TensorSpec]:
    with torch.device("meta"):
        return {name: TensorSpec(tuple(p.shape)) for name, p in build().named_parameters()}


def held_bytes(layout: Layout) -> Counter[int]:
    held: Counter[int] = Counter()
    for name, shards in layout.shards.items():
        for shard in shards:
            held[shard.rank] += layout.nbytes(name, shard.box)
    return held


def check(layout: Layout, copies: int, bucket: int = LARGE_BUCKET) -> None:
    """Assert that every element has ``copies`` holders, and is sent once, by one of them, in rounds that fit."""
    for name, spec in layout.tensors.items():
        assert sum(volume(shard.box) for shard in layout.shards[name]) == copies * volume(whole(spec.shape)), name
    rounds = plan_rounds(layout, bucket)
    sent: dict[str, int] = defaultdict(int)
    holders = {name: set(shards) for name, shards in layout.shards.items()}
    for parts in rounds.parts:
        assert sum(layout.nbytes(part.name, part.box) for part in parts) <= bucket
        for part in parts:
            sent[part.name] += volume(part.box)
            assert part.held in holders[part.name]
    assert sent == {name: volume(whole(spec.shape)) for name, spec in layout.tensors.items()}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("build", "billions", "ranks", "replicas"),
    [
        pytest.param(qwen3_235b, 235.1, 64, 1, id="235B on 64"),
        # More ranks than experts would leave some without any.
        pytest.param(deepseek_671b, 671.0, 256, 2, id="671B on 512", marks=pytest.mark.nightly),
    ],
)
def test_ranks_of_fsdp2_hold_equal_parts_and_send_each_element_once(
    build: Callable[[], Any], billions: float, ranks: int, replicas: int
) -> None:
    specs = shapes(build)
    total = sum(volume(whole(spec.shape)) for spec in specs.values())
    assert round(total / 1e9, 1) == billions
    stacked = fsdp2(specs, ranks, replicas)
    held = held_bytes(stacked)
    assert len(held) == ranks * replicas
    # Norms of a few thousand numbers are all that does not divide.
    assert max(held.values()) < 1.01 * 2 * total / ranks
    check(single_layout(stacked), replicas)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_megatron_send_each_element_once_and_workers_need_no_more_than_their_part() -> None:
    specs: Mapping[str, TensorSpec] = single_specs(shapes(qwen3_235b))
    layout = megatron(specs, kv_heads=4, tp=4, pp=2, ep=8, dp=8, vocab_multiple=128)
    rounds = plan_rounds(layout, LARGE_BUCKET)
    sent: Counter[str] = Counter()
    for parts in rounds.parts:
        for part in parts:
            sent[part.name] += volume(part.box)
    assert sent == {name: volume(whole(spec.shape)) for name, spec in specs.items()}
    workers = engine(specs, tp=8, kv_heads=4, ep=8)
    needs = {name: tuple(s.box for s in shards if s.rank == 3) for name, shards in workers.shards.items()}
    wanted = sum(volume(box) for boxes in needs.values() for box in boxes)
    cuts = (cut for rank in rounds.senders for parts in rounds.cut(rank, needs) for cut in parts)
    assert sum(volume(box) for cut in cuts for box in cut.boxes) == wanted
