"""Weights between real processes: all transports, engines that die, hang or come late."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineLost
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.process.private_folder import SEGMENT_PREFIX, SEGMENTS, prefix_for
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.buckets import Bucket, as_adapters
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.protocol import TransportName
from rl_async.weight_sync.transports import DiskSender
from tests.support.forked import Forked
from tests.support.weights import make_buckets

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
