"""A vLLM engine of several workers: every worker takes every update, and all of them together serve one model."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from rl_async.errors import EngineLost
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.layout import TensorSpec, volume
from rl_async.weight_sync.layout import engine as engine_layout
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.transports import SharedMemorySender
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import (
    Peer,
    copies_metric,
    errors,
    paused,
    publish,
    running,
    scaled,
    send,
    tensors,
)
from tests.support.weights import make_buckets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # vLLM takes minutes to start on a busy machine

V1, V2 = Version(0, 1), Version(0, 2)
WORKERS = 2


COPIES = ("--data-parallel-size", str(WORKERS))


@pytest.fixture(scope="module", params=["tensor_parallel", "pipeline_parallel", "data_parallel"])
def peer(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    """A running engine whose two workers divide each layer, or the layers, or the requests."""
    folder = tmp_path_factory.mktemp("run")
    # On a CPU vLLM's later stages fail without its warm-up.
    eager = request.param != "pipeline_parallel"
    ranks, flags = ({}, COPIES) if request.param == "data_parallel" else ({request.param: WORKERS}, ())
    with running("vllm", model_folder, folder, eager=eager, ranks=ranks, flags=flags) as started:
        yield started


async def test_its_weights_are_those_of_a_fresh_load_and_of_every_update(
    peer: Peer, connect: Connect, model_folder: Path, tmp_path: Path
) -> None:
    engine = connect()
    assert await engine.workers() == WORKERS
    fresh = await engine.checksums()
    assert len({name.partition("model")[0] for name in fresh}) == WORKERS, "a worker without checksums"
    for transport in ("gloo", "nearest", "disk", "whole"):
        for scale in (1.5, 1.0):
            named = dict(tensors(model_folder, scale))
            if transport == "whole":
                await send(engine, list(named.items()), V1)
            else:
                ranks = {"gloo": 4, "nearest": 2, "disk": 1}[transport]
                sent = await asyncio.to_thread(publish, peer, named, V1, ranks, transport, tmp_path)
                whole = WORKERS * sum(tensor.nbytes for tensor in named.values())
                least = await minimal_bytes(engine, named)
                assert sent <= 1.05 * least
                assert (least < whole) == bool(peer.ranks), "workers that divide the weights need parts of them"
            request = ask()
            got = await engine.generate(request)
            assert errors(scaled(model_folder, scale), request, got).max() <= 1
            sums = await engine.checksums()
            assert {name for name in fresh if sums[name] != fresh[name]} == {
                name for name in fresh if scale != 1.0 and "norm" not in name
            }


async def test_all_workers_take_an_update_between_tokens_and_sleep_and_wake_together(
    peer: Peer, connect: Connect, model_folder: Path
) -> None:
    engine, requests = connect(), [ask(700) for _ in range(4)]
    await send(engine, tensors(model_folder), V1)
    async with paused(engine, *requests) as tasks:
        await send(engine, tensors(model_folder, 1.5), V2)
    for request, task in zip(requests, tasks, strict=True):
        got = await task
        assert [run.version for run in got.versions] == [V1, V2]
        boundary = got.versions[1].start
        assert errors(scaled(model_folder), request, got)[:boundary].max() <= 1
        assert errors(scaled(model_folder, 1.5), request, got)[boundary:].max() <= 1
    sampled = await copies_metric(peer, "vllm:generation_tokens_total")
    assert len(sampled) == (1 if peer.ranks else WORKERS) and all(sampled), "a copy without requests"
    await engine.pause("keep")
    await engine.sleep(1)
    assert await engine.is_sleeping() and await engine.health()
    await engine.wake(["weights", "kv_cache"])
    await engine.resume()
    assert not await engine.is_sleeping()
    request = ask()
    assert errors(scaled(model_folder, 1.5), request, await engine.generate(request)).max() <= 1


async def test_what_workers_need_is_what_the_rules_for_vllm_say(
    peer: Peer, connect: Connect, model_folder: Path
) -> None:
    if peer.ranks != {"tensor_parallel": WORKERS}:
        pytest.skip("the rules are about tensor parallelism")
    engine, named = connect(), dict(tensors(model_folder))
    found = await engine.boxes({name: list(tensor.shape) for name, tensor in named.items()})
    specs = {name: TensorSpec(tuple(tensor.shape), "float32") for name, tensor in named.items()}
    rules = engine_layout(specs, tp=WORKERS, kv_heads=1)
    for worker, of_tensors in enumerate(found or ()):
        for name, boxes in zip(named, of_tensors, strict=True):
            expected = [shard.box for shard in rules.shards[name] if shard.rank == worker]
            assert [tuple(map(tuple, box)) for box in boxes] == expected, name
    assert found is not None
    await engine.start_update()
    await engine.init_transfer(InitInfo(backend="ipc"))
    sender = SharedMemorySender()
    await engine.pause("keep")
    fused = [(name, tensor) for name, tensor in named.items() if "q_proj" in name]  # without keys and values
    await engine.update(sender.stage(make_buckets(fused, 1 << 20)[0]))
    sender.close()
    assert await engine.boxes({"model.norm.weight": [32]}) is None, "loaders only collect in the middle of an update"
    await send(engine, list(named.items()), V1)


async def test_an_update_that_failed_on_every_worker_can_be_started_again(connect: Connect, model_folder: Path) -> None:
    engine, sender = connect(), SharedMemorySender()
    buckets = make_buckets(tensors(model_folder, 3.0), 1 << 12)
    await engine.init_transfer(sender.init_info(0))
    await engine.pause("keep")
    await engine.start_update()
    await engine.update(sender.stage(buckets[0]))
    with pytest.raises(EngineLost, match="checksum"):
        await engine.update(msgspec.structs.replace(sender.stage(buckets[1]), checksum="wrong"))
    sender.close()
    await send(engine, tensors(model_folder, 1.5), V1)
    request = ask()
    assert errors(scaled(model_folder, 1.5), request, await engine.generate(request)).max() <= 1


async def minimal_bytes(engine: VllmEngine, named: Mapping[str, Tensor]) -> int:
    """Bytes of float32 that the workers need together: any transfer has to move them."""
    found = await engine.boxes({name: list(tensor.shape) for name, tensor in named.items()})
    assert found is not None
    return 4 * sum(volume(tuple(box)) for worker in found for boxes in worker for box in boxes)


def ask(max_tokens: int = 24) -> GenerateRequest:
    return GenerateRequest(
        sampling=Sampling(),
        request_id=secrets.token_hex(4),
        token_ids=[3, 10, 17, 24],
        max_tokens=max_tokens,
        stop_token_ids=[],
        min_version=V1,
    )
