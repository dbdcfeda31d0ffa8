"""Adapters by name: our middleware between our client and a server with SGLang's routes, bodies and reader of files."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Sampling, Version
from rl_async.model_files import weights_name
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.sglang.adapters import NAME, PublishedAdapters
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.weight_sync.buckets import Bucket, as_adapters, numbered
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.transports.ipc import SharedMemorySender
from tests.contracts.sglang.wheel import load, refusal, routes, wheel_folder
from tests.support.weights import make_buckets

LAYER = "model.layers.0.self_attn.q_proj"
RANK = 2
REQUEST = GenerateRequest(request_id="r", token_ids=[1], sampling=Sampling(), max_tokens=1, stop_token_ids=[])


class Server:
    """Keeps adapters by their names as SGLang's registry does, and what it was asked."""

    def __init__(self) -> None:
        self.folder = wheel_folder()
        self.loaded: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.version = "default"
        # Each loading tells that it waits, and for what.
        self.loads: asyncio.Queue[asyncio.Event] | None = None

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route(path, self._answer, methods=[*route.methods]) for path, route in routes(self.folder).items()]
        )

    async def _answer(self, request: Request) -> Response:
        path, raw = request.url.path, await request.body()
        body = msgspec.json.decode(raw) if raw else None
        if why := refusal(self.folder, routes(self.folder)[path], path, body):
            return JSONResponse({"error": why}, 400)
        self.asked.append((path, body))
        known = path.endswith("lora_adapter") and body["lora_name"] in self.loaded
        match path:
            case "/load_lora_adapter":
                if self.loads is not None:
                    await self.loads.put(goes_on := asyncio.Event())
                    await goes_on.wait()
                if known:
                    return JSONResponse({"error_message": "already loaded"}, 400)
                config = load(self.folder, "sglang.srt.lora.lora_config").LoRAConfig(body["lora_path"])
                self.loaded[NAME] = config, load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
            case "/unload_lora_adapter":
                if not known:
                    return JSONResponse({"error_message": "not loaded"}, 400)
                del self.loaded[NAME]
            case "/server_info":
                return JSONResponse({"tp_size": 2, "enable_lora": True})
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/generate":
                meta = {"completion_tokens": 1, "weight_version": self.version, "finish_reason": {"type": "length"}}
                spans = [{"version": self.version, "start": 0, "end": 1}]
                meta |= {"output_token_logprobs": [[-1.0, 5, None]], "weight_versions": spans}
                event = msgspec.json.encode({"output_ids": [5], "meta_info": meta})
                return Response(b"data: " + event + b"\n\ndata: [DONE]\n\n", media_type="text/event-stream")
        return JSONResponse({"success": True})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def engine(server: Server, model_folder: Path) -> AsyncIterator[SglangEngine]:
    """A client that has asked the server what it is."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(PublishedAdapters(server.app(), model_folder), log_level="warning", lifespan="off")
    running = uvicorn.Server(config)
    serving = asyncio.create_task(running.serve([listener]))
    client = SglangEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", read_version=lambda name: Version(0, 0))
    try:
        assert await client.workers() == 1, "the server alone receives"
        yield client
    finally:
        await client.close()
        running.should_exit = True
        await serving


def adapters(step: int) -> dict[str, torch.Tensor]:
    low, high = torch.full((RANK, 8), float(step)), torch.full((4, RANK), 10.0 * step)
    return {f"{LAYER}.lora_A.weight": low, f"{LAYER}.lora_B.weight": high}


def buckets(step: int, base: str) -> list[Bucket]:
    sent = as_adapters(make_buckets(adapters(step).items(), 1 << 12), 0.5, base)
    return list(numbered(sent, Version(0, step), "no"))


async def publish(engine: SglangEngine, sent: list[Bucket], version: Version) -> None:
    """As the coordinator does, over shared memory."""
    sender = SharedMemorySender()
    try:
        await engine.pause("keep")
        await engine.init_transfer(InitInfo(backend="ipc"))
        await engine.start_update()
        for bucket in sent:
            await engine.update(sender.stage(bucket))
            sender.unstage()
        await engine.finish_update(version)
    finally:
        sender.close()
        await engine.resume()


async def test_requests_name_the_adapters_that_were_published_last(
    engine: SglangEngine, server: Server, model_folder: Path
) -> None:
    await engine.generate(REQUEST)
    for step in (1, 2):
        await publish(engine, buckets(step, weights_name(model_folder)), Version(0, step))
        config, found = server.loaded[NAME]
        assert (config.r, config.lora_alpha, config.target_modules) == (RANK, RANK, ["q_proj"])
        sent = adapters(step)
        assert torch.equal(found[f"base_model.model.{LAYER}.lora_A.weight"], sent[f"{LAYER}.lora_A.weight"])
        assert torch.equal(found[f"base_model.model.{LAYER}.lora_B.weight"], 0.5 * sent[f"{LAYER}.lora_B.weight"])
        await engine.generate(REQUEST)
    assert [body.get("lora_path") for path, body in server.asked if path == "/generate"] == [None, NAME, NAME]
    assert [body["mode"] for path, body in server.asked if path == "/pause_generation"] == ["abort", "abort"]
    folders = [Path(body["lora_path"]) for path, body in server.asked if path == "/load_lora_adapter"]
    assert [folder.exists() for folder in folders] == [False, True]
    assert server.version == "0.2"


async def test_what_does_not_fit_is_refused_and_the_earlier_adapters_stay(
    engine: SglangEngine, server: Server, model_folder: Path
) -> None:
    base = weights_name(model_folder)
    await publish(engine, buckets(1, base), Version(0, 1))
    whole = list(make_buckets([("w", torch.ones(2))], 1 << 12))
    for wrong, why in ((buckets(2, "files-other"), "files-other"), (whole, "no other weights")):
        with pytest.raises(EngineLost, match=why):
            await publish(engine, wrong, Version(0, 2))
    with pytest.raises(EngineLost, match="without adapters"):
        await publish(engine, [], Version(0, 2))
    with pytest.raises(EngineRejected, match="gloo"):
        await engine.init_transfer(InitInfo(backend="nccl"))
    await engine.generate(REQUEST)
    assert server.asked[-1][1]["lora_path"] == NAME and server.version == "0.1"
    await publish(engine, buckets(3, base), Version(0, 3))
    assert server.version == "0.3"


async def test_a_request_that_comes_while_adapters_are_replaced_is_not_the_bases(
    engine: SglangEngine, server: Server, model_folder: Path
) -> None:
    """SGLang itself looks the name up once its pause is over."""
    server.loads = asyncio.Queue()
    for step in (1, 2):
        publication = asyncio.create_task(publish(engine, buckets(step, weights_name(model_folder)), Version(0, step)))
        goes_on = await server.loads.get()
        await engine.generate(REQUEST)
        goes_on.set()
        await publication
    assert [body.get("lora_path") for path, body in server.asked if path == "/generate"] == [NAME, NAME]


async def test_an_adapter_that_sglang_refuses_is_an_error_and_a_later_one_is_taken(
    engine: SglangEngine, server: Server, model_folder: Path
) -> None:
    base = weights_name(model_folder)
    server.loaded[NAME] = None, {}  # type: ignore[assignment]
    with pytest.raises(EngineLost, match="already loaded"):
        await publish(engine, buckets(1, base), Version(0, 1))
    server.loaded.clear()
    await publish(engine, buckets(2, base), Version(0, 2))
    assert NAME in server.loaded and server.version == "0.2"
