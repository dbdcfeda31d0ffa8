"""The embedded engine as a process: its start, its end, its weights and its prefixes."""

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import ClientSession

from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import DebugConfig, RunConfig
from rl_async.messages import Sampling, Version
from rl_async.process.http_auth import bearer, make_tokens, run_token
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from tests.contracts.engines.engine_peers import Peer, errors, metric, running, scaled, send, tensors
from tests.support.forked import Forked
from tests.support.ports import free_port

START_S = 60.0


def run_folder(folder: Path, model: Path) -> Path:
    """A run folder whose engine serves ``model``."""
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        rollout=RolloutConfig(max_batch_size=4, max_model_len=4096),
        debug=DebugConfig(min_iteration_s=0.002),
    )
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    make_tokens(folder / "keys")
    return folder


def session_of(url: str, run: Path) -> ClientSession:
    """An HTTP session with the run's token."""
    return ClientSession(url, headers=bearer(run_token(run, "engines")))


def start(run: Path, port: int) -> Forked:
    """The engine's process."""
    return Forked("rl_async.rollout_server", "--run", str(run), "--index", "0", "--port", str(port))


def refusal(process: Forked) -> str:
    """The one line with which a process refused to start."""
    _, errors = process.communicate(timeout=START_S)
    assert process.returncode == 2, errors
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert errors.rstrip().endswith(line), "the message has more than one line"
    return line


async def until_healthy(url: str, process: Forked) -> None:
    deadline = time.monotonic() + START_S
    async with ClientSession() as session:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "the engine did not start"
            try:
                async with session.get(f"{url}/health") as response:
                    assert response.status == 200
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


async def until_load(session: ClientSession, requests: int) -> None:
    """Wait until the engine has so many requests."""
    async with asyncio.timeout(START_S):
        while True:
            async with session.get("/load") as response:
                if (await response.json())["server_load"] == requests:
                    return
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Where an engine runs, and its run folder."""
    port = free_port()
    run = run_folder(tmp_path_factory.mktemp("run"), model_folder)
    process = start(run, port)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_healthy(url, process))
        yield url, run
    finally:
        process.kill()
        process.communicate()


def test_a_taken_port_is_one_line(model_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(start(run_folder(tmp_path / "run", model_folder), port))
    assert f"127.0.0.1:{port}" in line


def test_sigterm_ends_it_with_requests_in_flight(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    run = run_folder(tmp_path / "run", model_folder)
    process = start(run, port)
    url = f"http://127.0.0.1:{port}"

    async def stop_while_it_serves() -> None:
        await until_healthy(url, process)
        async with session_of(url, run) as session:
            body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4000}}
            running = asyncio.create_task(session.post("/inference/v1/generate", json=body))
            await until_load(session, 1)
            process.send_signal(signal.SIGTERM)
            await asyncio.wait([running], timeout=10)
            if running.done() and running.exception() is None:
                running.result().close()

    try:
        asyncio.run(stop_while_it_serves())
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 0, errors
    finally:
        process.kill()


async def test_values_that_would_fail_in_the_sampler_are_refused_and_it_lives(engine: tuple[str, Path]) -> None:
    async with session_of(*engine) as session:
        for bad in ({"top_k": 2**70}, {"seed": 2**70}, {"n": 0}, {"n": 2**30}, {"bogus": 1}):
            body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, **bad}}
            async with session.post("/inference/v1/generate", json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"].keys() == {"message", "type", "code"}
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
        async with session.post("/inference/v1/generate", json=body) as response:
            assert len((await response.json())["choices"][0]["token_ids"]) == 2


async def test_weights_change_only_while_it_is_paused_and_completely(engine: tuple[str, Path]) -> None:
    async with session_of(*engine) as session:

        async def post(path: str, body: object = None) -> int:
            async with session.post(path, json=body) as response:
                await response.read()
                return response.status

        assert await post("/start_weight_update") == 400
        assert await post("/pause?mode=keep") == 200
        assert await post("/start_weight_update") == 200
        assert await post("/resume") == 409, "an unfinished update would be served"
        update = {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]], "checksum": "", "shm_name": "none"}
        assert await post("/update_weights", {"update_info": update}) == 409
        assert await post("/finish_weight_update", {"weight_version": "0.1"}) == 409, "a bucket has failed"
        assert await post("/start_weight_update") == 200
        assert await post("/finish_weight_update", {"weight_version": "0.1"}) == 200
        assert await post("/resume") == 200
        async with session.get("/weight_info") as response:
            assert await response.json() == {"weight_version": "0.1"}


async def test_a_stream_ends_when_its_client_disconnects(engine: tuple[str, Path]) -> None:
    body = {"token_ids": [1, 2], "stream": True, "sampling_params": {"max_tokens": 4000}}
    async with session_of(*engine) as session:
        async with session.post("/inference/v1/generate", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            response.close()
        await until_load(session, 0)


HITS = "vllm:prefix_cache_hits_total"


@pytest.fixture
def prefixes_peer(model_folder: Path, tmp_path: Path) -> Iterator[Peer]:
    """An embedded engine that has served nothing, so that its cache of prefixes is empty."""
    with running("embedded", model_folder, tmp_path, model_length=256) as started:
        yield started


async def test_a_second_turn_reuses_the_first_until_an_update(prefixes_peer: Peer, model_folder: Path) -> None:
    client = prefixes_peer.client()
    turns: list[tuple[GenerateRequest, GenerateResult, float]] = []
    tokens, hits = [(7 * i + 3) % 60 for i in range(60)], 0.0
    for number, scale in enumerate((1.0, 1.0, 1.5, 1.5)):
        version = Version(0, number // 2)
        if number % 2 == 0:
            await send(client, tensors(model_folder, scale), version)
        request = GenerateRequest(
            request_id=f"turn-{number}", token_ids=tokens, sampling=Sampling(), max_tokens=20, stop_token_ids=[]
        )
        got = await client.generate(request)
        reused = await metric(prefixes_peer, HITS) - hits
        hits += reused
        turns.append((request, got, reused))
        assert got.versions[0].version == version
        assert errors(scaled(model_folder, scale), request, got).max() <= 1
        tokens = [*tokens, *got.token_ids, 5, 6, 7]
    await client.close()
    assert [reused for _, _, reused in turns] == [0, 64, 0, 112]
    async with aiohttp.ClientSession(headers=bearer(prefixes_peer.token)) as session:
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": 2}}
        async with session.post(f"{prefixes_peer.url}/inference/v1/generate", json=body) as response:
            usage = (await response.json())["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 144}
