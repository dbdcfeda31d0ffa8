"""What every engine must do, over HTTP. Parametrised by a running engine; today the embedded one."""

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_async.configs.load import dump
from rl_async.configs.schema import DataConfig, ModelConfig, RolloutConfig, RunConfig
from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Sampling, Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm import VllmEngine
from rl_async.weight_sync.buckets import Bucket, make_buckets
from rl_async.weight_sync.ipc import SharedMemorySender
from rl_async.weight_sync.protocol import InitInfo

V0, V1 = Version(0, 0), Version(0, 1)


@pytest.fixture(scope="module")
def url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running embedded engine."""
    run = tmp_path_factory.mktemp("run")
    config = RunConfig(
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path="none"),
        rollout=RolloutConfig(max_batch_size=8, max_model_len=256),
    )
    (run / "config.yaml").write_text(dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rl_async.rollout_server", "--run", str(run), "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        asyncio.run(_until_healthy(f"http://127.0.0.1:{port}", process))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def _until_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    client, deadline = VllmEngine(url), time.monotonic() + 60
    while not await client.health():
        assert process.poll() is None and time.monotonic() < deadline, "the engine did not start"
        await asyncio.sleep(0.1)
    await client.close()


@pytest.fixture
async def engine(url: str, model_folder: Path) -> AsyncIterator[VllmEngine]:
    """A client; the engine serves the folder's weights as version 0.0."""
    client = VllmEngine(url)
    await send(client, tensors(model_folder), V0)
    yield client
    await client.close()


def tensors(folder: Path, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    """The model's parameters, matrices scaled."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [(n, p.detach() * (scale if p.dim() == 2 else 1.0)) for n, p in model.named_parameters()]


async def send(client: VllmEngine, weights: list[tuple[str, torch.Tensor]], version: Version) -> None:
    """A full update over shared memory, with requests in flight kept."""
    buckets: list[Bucket] = list(make_buckets(weights, 1 << 20))
    await client.init_transfer(InitInfo(backend="ipc"))
    await client.pause("keep")
    await client.start_update()
    sender = SharedMemorySender(1, "", 10.0)
    for bucket in buckets:
        await client.update(sender.stage(bucket))
    sender.close()
    await client.finish_update(version)
    await client.resume()


def ask(tokens: int = 8, max_tokens: int = 16, **more: Any) -> GenerateRequest:
    settings = {"sampling": Sampling(), "stop_token_ids": [], "min_version": V0} | more
    ids = [(7 * i + 3) % 60 for i in range(tokens)]
    return GenerateRequest(request_id=secrets.token_hex(4), token_ids=ids, max_tokens=max_tokens, **settings)


def reference(folder: Path, ids: list[int], scale: float = 1.0) -> torch.Tensor:
    """log-softmax [T, V] of a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in tensors(folder, scale):
            model.get_parameter(name).copy_(tensor)
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def difference(folder: Path, request: GenerateRequest, got: GenerateResult, scale: float = 1.0) -> torch.Tensor:
    """|engine - plain forward| per sampled token."""
    ids = request.token_ids + got.token_ids
    start = len(request.token_ids)
    expected = reference(folder, ids, scale)[range(start - 1, len(ids) - 1), ids[start:]]
    return (expected - torch.tensor(got.logprobs)).abs()


async def test_logprobs_agree_with_a_plain_forward_pass(engine: VllmEngine, model_folder: Path) -> None:
    requests = [ask(tokens=3 + i, max_tokens=5 + i) for i in range(20)]  # more than fit into a batch
    answers = await asyncio.gather(*(engine.generate(r) for r in requests))
    for request, got in zip(requests, answers, strict=True):
        assert len(got.token_ids) == len(got.logprobs) == request.max_tokens
        assert got.finish_reason == "length"
        assert got.versions == [VersionRun(V0, 0, request.max_tokens)]
        assert difference(model_folder, request, got).max() < 1e-5


async def test_greedy_and_stop_tokens(engine: VllmEngine, model_folder: Path) -> None:
    request = ask(sampling=Sampling(temperature=0.0))
    got = await engine.generate(request)
    logits = reference(model_folder, request.token_ids + got.token_ids)
    assert got.token_ids == logits[len(request.token_ids) - 1 : -1].argmax(-1).tolist()
    stop = got.token_ids[4]
    again = await engine.generate(ask(sampling=Sampling(temperature=0.0), stop_token_ids=[stop]))
    assert again.token_ids == got.token_ids[: got.token_ids.index(stop) + 1]
    assert again.finish_reason == "stop"


async def test_requests_in_flight_go_on_with_the_new_weights(engine: VllmEngine, model_folder: Path) -> None:
    requests = [ask(max_tokens=200) for _ in range(4)]
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    await asyncio.sleep(0.05)
    await send(engine, tensors(model_folder, 1.5), V1)
    for request, task in zip(requests, tasks, strict=True):
        got = await task
        assert [run.version for run in got.versions] == [V0, V1], "the update came too late or too early"
        boundary = got.versions[1].start
        assert len(got.token_ids) == 200
        assert difference(model_folder, request, got)[:boundary].max() < 1e-5
        assert difference(model_folder, request, got, 1.5)[boundary:].max() < 1e-5
        assert difference(model_folder, request, got)[boundary:].max() > 1e-3, "the weights did not change"


async def test_the_version_gate(engine: VllmEngine) -> None:
    with pytest.raises(EngineLost, match="409"):
        await engine.generate(ask(min_version=V1))
    assert await engine.version() == V0


async def test_checksums_follow_the_weights(engine: VllmEngine, model_folder: Path) -> None:
    before = await engine.checksums()
    await send(engine, tensors(model_folder, 1.5), V1)
    after = await engine.checksums()
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name, t in tensors(model_folder) if t.dim() == 2}


async def test_pause_keep_holds_requests_and_new_ones_wait(engine: VllmEngine) -> None:
    running = asyncio.create_task(engine.generate(ask(max_tokens=100)))
    await asyncio.sleep(0.02)
    await engine.pause("keep")
    waiting = asyncio.create_task(engine.generate(ask(max_tokens=2)))
    await asyncio.sleep(0.2)
    assert not running.done() and not waiting.done()
    assert await engine.health()
    await engine.resume()
    assert len((await running).token_ids) == 100
    assert len((await waiting).token_ids) == 2


async def test_pause_wait_lets_running_requests_finish(engine: VllmEngine) -> None:
    running = asyncio.create_task(engine.generate(ask(max_tokens=100)))
    await asyncio.sleep(0.02)
    await engine.pause("wait")
    assert (await asyncio.wait_for(running, 1)).finish_reason == "length"
    waiting = asyncio.create_task(engine.generate(ask(max_tokens=2)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await engine.resume()
    await waiting


async def test_abort_returns_what_was_sampled(engine: VllmEngine) -> None:
    request = ask(max_tokens=200)
    other = asyncio.create_task(engine.generate(ask(max_tokens=30)))
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.03)
    await engine.abort(request.request_id)
    got = await task
    assert got.finish_reason == "abort"
    assert len(got.token_ids) == len(got.logprobs) < 200
    assert (await other).finish_reason == "length"


async def test_pause_abort_ends_everything(engine: VllmEngine) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(max_tokens=200))) for _ in range(3)]
    await asyncio.sleep(0.03)
    await engine.pause("abort")
    assert {(await task).finish_reason for task in tasks} == {"abort"}
    await engine.resume()


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_keeps_requests(engine: VllmEngine, model_folder: Path, level: int) -> None:
    request = ask(max_tokens=150)
    task = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(0.03)
    await engine.pause("keep")
    await engine.sleep(level)
    await engine.wake(["weights"])
    if level == 2:
        await send(engine, tensors(model_folder), V0)
    await engine.wake(["kv_cache"])
    await engine.resume()
    got = await task
    assert len(got.token_ids) == 150
    assert difference(model_folder, request, got).max() < 1e-5


async def test_bad_requests_are_refused_and_harm_nobody(engine: VllmEngine) -> None:
    with pytest.raises(EngineRejected, match="at most 255"):
        await engine.generate(ask(tokens=300))
    with pytest.raises(EngineRejected, match="token_ids must lie"):
        await engine.generate(msgspec.structs.replace(ask(), token_ids=[99999]))
    async with aiohttp.ClientSession() as session:
        for body in (
            {"token_ids": [1], "sampling_params": {"bogus": 1}},
            {"token_ids": [1], "sampling_params": {"temperature": -1}},
            {"token_ids": "x"},
            {},
        ):
            async with session.post(f"{engine.url}/inference/v1/generate", json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"]
        async with session.post(f"{engine.url}/finish_weight_update", json={"weight_version": "0.9"}) as response:
            assert response.status == 500, "no update was started"
    assert len((await engine.generate(ask())).token_ids) == 16


async def test_streaming_sends_every_token_once(engine: VllmEngine) -> None:
    body = {
        "request_id": "s",
        "token_ids": [1, 2, 3],
        "stream": True,
        "sampling_params": {"max_tokens": 12, "temperature": 0.0},
    }
    chunks = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/inference/v1/generate", json=body) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                chunks.append(msgspec.json.decode(line.removeprefix(b"data: "))["choices"][0])
    streamed = [token for chunk in chunks for token in chunk["token_ids"]]
    whole = await engine.generate(
        msgspec.structs.replace(ask(), token_ids=[1, 2, 3], max_tokens=12, sampling=Sampling(temperature=0.0))
    )
    assert streamed == whole.token_ids
    assert chunks[-1]["weight_versions"] == [{"version": "0.0", "start": 0, "end": 12}]


async def test_a_client_that_hangs_up_frees_its_place(engine: VllmEngine) -> None:
    task = asyncio.create_task(engine.generate(ask(max_tokens=240)))
    await asyncio.sleep(0.03)
    task.cancel()
    async with aiohttp.ClientSession() as session:
        for _ in range(50):
            async with session.get(f"{engine.url}/load") as response:
                if (await response.json())["server_load"] == 0:
                    return
            await asyncio.sleep(0.02)
    pytest.fail("the request went on without its client")
