"""Our coordinator and SGLang's own weight updater, on the CPU over gloo. SGLang on a GPU, and NCCL, are not run."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import xxhash

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineRejected
from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.pool import connect
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.protocol import UpdateInfo
from tests.contracts.sglang.wheel import load, wheel_folder
from tests.contracts.weights.test_transport import Directory
from tests.support.forked import Forked
from tests.support.weights import make_buckets

pytestmark = pytest.mark.slow

Start = Callable[..., list[EngineRecord]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start engines together, with the network settings of the launcher."""
    folder = str(wheel_folder())
    processes: list[Forked] = []

    def run(*names: str) -> list[EngineRecord]:
        env = {"GLOO_SOCKET_IFNAME": "lo"}
        new = [Forked("tests.contracts.sglang.engine", folder, environment=env) for _ in names]
        processes.extend(new)
        ports = [process.first_line() for process in new]
        return [EngineRecord(engine_id=n, url=f"http://127.0.0.1:{p}", kind="sglang") for n, p in zip(names, ports)]

    yield run
    for process in processes:
        process.kill()
        process.wait(10)


@contextmanager
def start_ours() -> Iterator[EngineRecord]:
    """An engine with our own receiver."""
    process = Forked("tests.contracts.weights.engine")
    try:
        yield EngineRecord(engine_id="ours", url=f"http://127.0.0.1:{process.first_line()}", kind="embedded")
    finally:
        process.kill()
        process.wait(10)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.arange(48, dtype=torch.bfloat16).view(3, 16) + value + i for i in range(3)}


def buckets(value: float) -> list[Bucket]:
    """Two buckets, of two tensors and of one."""
    return list(make_buckets(weights(value).items(), 200))


def expected(value: float) -> dict[str, str]:
    return {
        f"tp0:{name}": xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in weights(value).items()
    }


def coordinator(directory: Directory) -> WeightCoordinator:
    sync = WeightSyncConfig(transport="gloo", timeout_s=30)
    return WeightCoordinator(directory.open, lambda record: connect(record.kind, record.url), sync)


async def asked(url: str, ask: Callable[[SglangEngine], Any]) -> Any:
    client = SglangEngine(url)
    try:
        return await ask(client)
    finally:
        await client.close()


def state(record: EngineRecord) -> tuple[dict[str, str], Version | None]:
    async def both(client: SglangEngine) -> tuple[dict[str, str], Version | None]:
        return await client.checksums(), await client.version()

    return asyncio.run(asked(record.url, both))


def test_our_buckets_are_laid_out_as_sglangs() -> None:
    tensors = list(weights(1.0).items())
    theirs = load(wheel_folder(), "sglang.srt.weight_sync.tensor_bucket").FlattenedTensorBucket
    [ours] = make_buckets(tensors, 1 << 20)
    assert torch.equal(ours.data, theirs(named_tensors=tensors).get_flattened_tensor())
    empty = theirs.empty(ours.info.names, ours.info.dtype_names, ours.info.shapes, "cpu")
    empty.get_flattened_tensor().copy_(ours.data)
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(empty.reconstruct_tensors(), tensors, strict=True))


def test_two_engines_get_two_versions_from_one_trainer_and_one_from_the_next(start: Start) -> None:
    directory, records = Directory(), start("a", "b")
    directory.add(*records)
    with coordinator(directory) as first:
        for step in (0, 1):
            report = first.publish(Version(0, step), buckets(step * 10.0))
            assert (report.engines, report.failures) == (["a", "b"], [])
            assert [state(record) for record in records] == [(expected(step * 10.0), Version(0, step))] * 2
    with coordinator(directory) as second:  # it counts its groups from 0 again, so that their names are taken
        assert second.publish(Version(1, 1), buckets(20.0)).failures == []
    assert [state(record) for record in records] == [(expected(20.0), Version(1, 1))] * 2


def test_an_engine_of_ours_and_one_of_sglangs_are_one_group(start: Start) -> None:
    with start_ours() as ours:
        directory, records = Directory(), [*start("theirs"), ours]
        directory.add(*records)
        with coordinator(directory) as trainer:
            report = trainer.publish(Version(0, 0), buckets(7.0))
        assert (report.engines, report.failures) == (["theirs", "ours"], [])
        assert state(records[0]) == (expected(7.0), Version(0, 0))


def test_an_update_that_an_earlier_trainer_left_is_ended(start: Start) -> None:
    directory, [record] = Directory(), start("a")
    directory.add(record)
    asyncio.run(asked(record.url, SglangEngine.start_update))
    with coordinator(directory) as trainer:
        assert trainer.publish(Version(0, 0), buckets(5.0)).failures == []
    assert state(record) == (expected(5.0), Version(0, 0))


def test_an_engine_sleeps_and_takes_weights_while_its_cache_is_away(start: Start) -> None:
    [record] = start("a")

    async def sleep(engine: SglangEngine) -> None:
        await engine.pause("keep")
        await engine.sleep(2)
        await engine.sleep(1)

    asyncio.run(asked(record.url, sleep))
    assert asyncio.run(asked(record.url, SglangEngine.is_sleeping)), "another client asks"
    directory = Directory()
    directory.add(record)
    with coordinator(directory) as trainer:
        assert trainer.publish(Version(0, 0), buckets(5.0)).failures == []
    assert state(record) == (expected(5.0), Version(0, 0))
    assert not asyncio.run(asked(record.url, SglangEngine.is_sleeping))


def test_sglangs_refusals_keep_their_messages(start: Start) -> None:
    [record] = start("a")
    update = UpdateInfo(names=["w"], dtype_names=["float32"], shapes=[[1]], checksum="")

    async def fail(client: SglangEngine) -> None:
        with pytest.raises(EngineRejected, match="no weight-update session is open"):
            await client.finish_update(Version())
        with pytest.raises(EngineRejected, match="init_transfer"):
            await client.update(update)
        await client.start_update()
        with pytest.raises(EngineRejected, match="Flush cache failed"):  # it is not paused
            await client.finish_update(Version())

    asyncio.run(asked(record.url, fail))
