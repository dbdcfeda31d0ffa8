"""Weights between real processes: all transports, engines that die, hang or come late."""

import asyncio
import json
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.planned.clusters import BUCKET as CLUSTER_BUCKET
from benchmarks.planned.clusters import CAPACITY, CLUSTERS, check_layout, plan_cluster, qwen3_235b, shapes
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineLost, RanksLost
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.process.private_folder import SEGMENT_PREFIX, SEGMENTS, prefix_for
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.buckets import Bucket, as_adapters
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.layout import TensorSpec, engine, fsdp2, megatron, single_layout, single_specs, volume, whole
from rl_async.weight_sync.protocol import SyncReport, TransportName
from rl_async.weight_sync.sender import Outlet, RankShards, RemoteOutlet, plan_rounds
from rl_async.weight_sync.transports import DiskSender
from tests.contracts.weights.outlet_rank import RANKS, ROWS, named, sync_of
from tests.contracts.weights.reshard_rank import BUCKET, SCENARIOS, WORLD
from tests.support.forked import Forked, start_ranks
from tests.support.ports import free_port
from tests.support.weights import HOST, TOKEN, make_buckets, shards_of, specs_of

Start = Callable[..., list[EngineRecord]]
TRANSPORTS: list[TransportName] = ["nearest", "gloo", "ipc", "disk"]


class Directory:
    """A registry in this process; ``add`` may be called from any thread."""

    def __init__(self) -> None:
        self.records: dict[str, EngineRecord] = {}
        self.revision = 0
        self.removed: dict[str, str] = {}
        self.confirmed: list[str] = []
        self.published = Version()

    def add(self, *records: EngineRecord) -> None:
        for record in records:
            self.records[record.engine_id] = record
        self.revision += 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Directory"]:
        yield self

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        deadline = time.monotonic() + wait_s
        while self.revision <= after and time.monotonic() < deadline:  # noqa: ASYNC110  (add comes from a thread)
            await asyncio.sleep(0.01)
        return EngineList(revision=self.revision, engines=list(self.records.values()), published=self.published)

    async def publish(self, version: Version, engines: list[str]) -> None:
        self.published = version
        for engine_id in engines:
            await self._set(engine_id, version)

    async def confirm(self, engine_id: str, version: Version) -> None:
        await self._set(engine_id, version)
        self.confirmed.append(engine_id)

    async def remove_engine(self, engine_id: str, reason: str) -> None:
        self.records.pop(engine_id, None)
        self.removed[engine_id] = reason
        self.revision += 1

    async def _set(self, engine_id: str, version: Version) -> None:
        self.records[engine_id] = msgspec.structs.replace(self.records[engine_id], version=version)
        self.revision += 1


@pytest.fixture
def start() -> Iterator[Start]:
    """Start engine processes together; each argument is the command line of one."""
    processes: list[Forked] = []

    def run(**engines: str) -> list[EngineRecord]:
        new = [Forked("tests.contracts.weights.engine", *arguments.split()) for arguments in engines.values()]
        processes.extend(new)
        return [
            EngineRecord(engine_id=name, url=f"http://127.0.0.1:{process.first_line()}", kind="test")
            for name, process in zip(engines, new)
        ]

    yield run
    for process in processes:
        process.kill()
        process.wait(10)


def connect(record: EngineRecord) -> VllmEngine:
    return VllmEngine(record.url)


def buckets(value: float) -> list[Bucket]:
    """Three buckets; the first parameter needs two of them."""
    named = {
        f"layer.{i}": torch.full((rows, 16), value + i, dtype=torch.bfloat16) for i, rows in enumerate((96, 32, 64))
    }
    return list(make_buckets(named.items(), 64 * 16 * 2))


def expected(value: float) -> dict[str, float]:
    return {f"layer.{i}": 16.0 * rows * (value + i) for i, rows in enumerate((96, 32, 64))}


def states(records: list[EngineRecord]) -> dict[str, dict[str, Any]]:
    answers = {}
    for record in records:
        with urllib.request.urlopen(f"{record.url}/state", timeout=10) as response:
            answers[record.engine_id] = msgspec.json.decode(response.read())
    return answers


def serves(value: float, version: str) -> dict:
    return {"paused": False, "version": version, "sums": expected(value)}


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """The names of shared memory that this process has made and that is still there."""
    monkeypatch.setenv(SEGMENT_PREFIX, prefix_for(tmp_path))
    return lambda: {path.name for path in SEGMENTS.glob(f"{prefix_for(tmp_path)}*")}


@pytest.mark.parametrize(
    ("transport", "near"), [*((name, False) for name in TRANSPORTS), ("nearest", True), ("gloo", True)]
)
def test_two_engines_get_two_versions(
    transport: TransportName, near: bool, start: Start, tmp_path: Path, segments: Callable[[], set[str]]
) -> None:
    """``near``: they meet in a file."""
    directory, records = Directory(), start(a="", b="")
    directory.add(*records)
    sync = WeightSyncConfig(way=transport, timeout_s=30, folder=str(tmp_path / "weights"))
    stores = tmp_path if near else None
    with WeightCoordinator(directory.open, connect, sync, stores=stores) as coordinator:
        for step in (0, 1):
            report = coordinator.publish(Version(0, step), buckets(step * 10.0))
            assert (report.engines, report.failures, report.nbytes) == (["a", "b"], [], 3 * 2048)
            assert 0 < report.pause_seconds <= report.seconds
            assert states(records) == {"a": serves(step * 10.0, f"0.{step}"), "b": serves(step * 10.0, f"0.{step}")}
            assert directory.published == Version(0, step)
    assert not segments()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_their_base_adapters_travel_alone(transport: TransportName, start: Start, tmp_path: Path) -> None:
    directory, records = Directory(), start(a="", b="")
    directory.add(*records)
    sync = WeightSyncConfig(
        way=(transport, "staged") if transport == "gloo" else transport,
        timeout_s=30,
        folder=str(tmp_path / "weights"),
    )
    base = make_buckets([("layer.weight", torch.zeros(96, 16, dtype=torch.bfloat16))], 2048)
    with WeightCoordinator(directory.open, connect, sync) as coordinator:
        for step, nbytes in ((0, 3072 + 384 + 64), (1, 384 + 64), (2, 384 + 64)):
            pair = [
                ("layer.lora_A.weight", torch.ones(1, 16)),
                ("layer.lora_B.weight", torch.full((96, 1), step + 1.0)),
            ]
            report = coordinator.publish(Version(0, step), [*base, *as_adapters(make_buckets(pair, 256), 0.5)])
            assert (sorted(report.engines), report.failures, report.nbytes) == (["a", "b"], [], nbytes)
            expected = serves(0, f"0.{step}") | {"sums": {"layer.weight": 96 * 16 * 0.5 * (step + 1)}}
            assert states(records) == {"a": expected, "b": expected}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_killed_in_the_middle_is_named_and_replaced_and_the_others_go_on(
    transport: TransportName, start: Start, tmp_path: Path, segments: Callable[[], set[str]]
) -> None:
    directory = Directory()
    *good, replacement, _ = records = start(a="", b="", new="", dying="--fault kill --at 5")
    directory.add(*good, records[-1])
    sync = WeightSyncConfig(way=transport, timeout_s=30, folder=str(tmp_path / "weights"))
    with WeightCoordinator(directory.open, connect, sync, stores=tmp_path) as coordinator:
        assert coordinator.publish(Version(0, 0), buckets(0)).engines == ["a", "b", "dying"]
        report = coordinator.publish(Version(0, 1), buckets(10))
        assert report.engines == ["a", "b"]
        assert len(report.failures) == 1
        assert report.failures[0].startswith("dying failed in update, bucket 2/3: ")
        assert directory.removed == {"dying": report.failures[0]}
        assert states(good) == {"a": serves(10, "0.1"), "b": serves(10, "0.1")}

        directory.add(replacement)
        deadline = time.monotonic() + 20
        while directory.confirmed != ["new"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert states([replacement]) == {"new": serves(10, "0.1")}

        assert coordinator.publish(Version(0, 2), buckets(20)).engines == ["a", "b", "new"]
        assert list(states([*good, replacement]).values()) == [serves(20, "0.2")] * 3
    assert not segments()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_engine_that_hangs_is_cut_off_at_the_deadline(start: Start) -> None:
    directory, records = Directory(), start(a="", hanging="--fault stop --at 2")
    directory.add(*records)
    with WeightCoordinator(directory.open, connect, WeightSyncConfig(way="ipc", timeout_s=2)) as coordinator:
        report = coordinator.publish(Version(0, 0), buckets(0))
    assert report.engines == ["a"]
    (why,) = report.failures
    assert why.startswith("hanging ") and "bucket 2/3" in why and "2 s" in why
    assert states(records[:1]) == {"a": serves(0, "0.0")}


def test_an_engine_that_shares_no_folder_says_so(start: Start, tmp_path: Path) -> None:
    (record,) = start(a="")
    sender = DiskSender(tmp_path / "weights")
    info = sender.init_info(0)
    sender.close()

    async def join() -> None:
        engine = connect(record)
        try:
            await engine.init_transfer(info)
        finally:
            await engine.close()

    with pytest.raises(EngineLost, match=r"weight_sync\.folder"):
        asyncio.run(join())


# Weights of several trainer ranks: published to engines in other processes, and resharded between real processes.


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


def ranks_serve(value: float, version: str) -> dict[str, object]:
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
        assert states(records[:2]) == {"a": ranks_serve(10, "0.1"), "b": ranks_serve(10, "0.1")}
        assert ranks.publish(2).engines == ["a", "b"]
        assert states(records[:2]) == {"a": ranks_serve(20, "0.2"), "b": ranks_serve(20, "0.2")}
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
    assert states(records) == {"a": ranks_serve(10, "1.1"), "b": ranks_serve(10, "1.1")}


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
