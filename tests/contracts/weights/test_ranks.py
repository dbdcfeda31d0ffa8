"""Weights of several trainer ranks: published to engines in other processes, and resharded between real processes."""

import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.planned.clusters import BUCKET as CLUSTER_BUCKET
from benchmarks.planned.clusters import CAPACITY, CLUSTERS, check_layout, plan_cluster, qwen3_235b, shapes
from rl_async.errors import RanksLost
from rl_async.messages import Version
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.layout import TensorSpec, engine, fsdp2, megatron, single_layout, single_specs, volume, whole
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "billions", "largest"),
    [
        # 48 ranks hold 2 or 3 of 128 experts each.
        pytest.param("235B", 235.1, 1.125, id="235B on 64"),
        # Norms of a few thousand numbers are all that does not divide.
        pytest.param("671B", 671.0, 1.01, id="671B on 512", marks=pytest.mark.nightly),
    ],
)
def test_clusters_own_each_element_send_it_once_and_have_the_memory(name: str, billions: float, largest: float) -> None:
    """``plan`` refuses a GPU that lacks memory in some stage."""
    cluster = CLUSTERS[name]
    config, planned, found = plan_cluster(cluster)
    assert round(found["parameters"] / 1e9, 1) == billions
    assert found["estimated_parameters"] == pytest.approx(found["parameters"], rel=1e-5)
    assert found["ranks"] == config.trainer.ranks and found["largest_share"] <= largest
    devices = {gpu for spec in planned.processes for gpu in spec.gpus}
    assert devices == set(range(cluster.gpus)) and len(planned.memory.devices) == cluster.gpus
    assert 0 < max(peak for stages in found["peak_bytes"].values() for peak in stages.values()) <= CAPACITY
    assert found["kv_cache_bytes"] > 1 << 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_share_what_they_send() -> None:
    layout = single_layout(fsdp2(shapes(qwen3_235b()), 32, 2))
    rounds = check_layout(layout, 2)
    assert rounds.senders == list(range(64))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_megatron_send_each_element_once_and_workers_need_no_more_than_their_part() -> None:
    specs: Mapping[str, TensorSpec] = single_specs(shapes(qwen3_235b()))
    layout = megatron(specs, kv_heads=4, tp=4, pp=2, ep=8, dp=8, vocab_multiple=128)
    rounds = plan_rounds(layout, CLUSTER_BUCKET)
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
