"""Every body that our client sends, against SGLang's own structs; answers that they make, read by our client.

SGLang itself is not run: nothing here says that it does what its source says.

A stand-in for SGLang's server, which starts uvicorn as SGLang 0.5.23 does; SGLang itself is not run.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import uvicorn
import xxhash
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_async.configs.engines import SGLANG
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineLost, EngineRejected
from rl_async.launcher.plan.planning import plan
from rl_async.messages import EngineRecord, Sampling, Version, VersionRun
from rl_async.model_files import weights_name
from rl_async.process.http_auth import TOKEN_FILE, bearer, make_tokens, run_token, token_file
from rl_async.rollout_server.api import EngineLoad, GenerateRequest
from rl_async.rollout_server.pool import connect
from rl_async.rollout_server.sglang.__main__ import UNWANTED, VARIABLES
from rl_async.rollout_server.sglang.adapters import NAME, PublishedAdapters
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.weight_sync.buckets import Bucket, as_adapters, numbered
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports import SharedMemorySender
from tests.contracts.sglang.wheel import cut_out, field_names, load, refusal, routes, wheel_folder
from tests.contracts.weights.test_transport import Directory
from tests.support.configs import float32_config
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.rounding import assert_near, rounding
from tests.support.weights import make_buckets

REQUEST = GenerateRequest(
    request_id="r", token_ids=[1, 2], sampling=Sampling(temperature=0.7), max_tokens=3, stop_token_ids=[9], seed=5
)
INIT = InitInfo(
    backend="gloo", master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="weights-0"
)
UPDATE = UpdateInfo(names=["w", "b"], dtype_names=["bfloat16", "float32"], shapes=[[2, 2], [2]], checksum="c")
TOKENS = [4, 5, 9]


@pytest.fixture
def folder() -> Path:
    return wheel_folder()


def answer(folder: Path, tokens: list[int], reason: Any, changes: list[tuple[str, int]], now: str) -> Any:
    """An answer to /generate in one event, as SGLang builds it. ``changes``: weights that were left behind after so
    many tokens."""
    types = load(folder, "sglang.api.v1.api_types")
    versions = load(folder, "sglang.srt.utils.weight_versions")
    events = [versions.WeightVersionEvent(old_version=name, num_output_tokens=end) for name, end in changes]
    spans: dict[str, Any] = {}
    versions.add_weight_versions_to_meta_info(
        spans, versions.compute_weight_version_spans(events, now, len(tokens)), len(tokens)
    )
    meta = types.GenerateMetaInfo(
        id="r",
        prompt_tokens=2,
        completion_tokens=len(tokens),
        finish_reason=reason,
        output_token_logprobs=[types.LogprobEntry(logprob=-float(t), token_id=t) for t in tokens],
        weight_version=now,
        weight_versions=[types.WeightVersionSpan(**span) for span in spans["weight_versions"]],
    )
    return types.GenerateResponse(output_ids=tokens, meta_info=meta).to_json_value()


def streamed(folder: Path, sent: list[tuple[list[int], str]], changes: list[tuple[str, int]], queued: int) -> list[Any]:
    """The events of an answer that reaches SGLang's server as ``sent``: tokens, and the version in use as they come.

    The server's own functions cut the log-probabilities, and join the first ``queued`` of them, which the client was
    too slow to take apart; ``changes`` are as in ``answer``.
    """
    manager = folder / "sglang/srt/managers/tokenizer_manager.py"
    sliced = "_INCREMENTAL_STREAMING_META_INFO_KEYS"
    names = {sliced: cut_out(manager, sliced)}
    cut = cut_out(manager, "_slice_streaming_output_meta_info", **names)
    coalesce = cut_out(manager, "_coalesce_streaming_chunks", **names)
    versions, so_far, events = load(folder, "sglang.srt.utils.weight_versions"), list[int](), list[Any]()
    for tokens, version in sent:
        before = len(so_far)
        so_far += tokens
        meta: dict[str, Any] = {"finish_reason": None, "weight_version": version, "completion_tokens": len(so_far)}
        meta["output_token_logprobs"] = [(-float(token), token, None) for token in so_far]
        cut(meta, before)
        events.append({"output_ids": list(tokens), "meta_info": meta})
    last = events[-1]["meta_info"]
    last["finish_reason"] = {"type": "stop", "matched": 9}
    left = [versions.WeightVersionEvent(old_version=name, num_output_tokens=end) for name, end in changes]
    spans = versions.compute_weight_version_spans(left, sent[-1][1], len(so_far))
    versions.add_weight_versions_to_meta_info(last, spans, len(so_far))
    return [coalesce(None, events[:queued], "r"), *events[queued:]]


@asynccontextmanager
async def sglang(
    folder: Path, generate: Callable[[], Any], seen: set[str] | None = None
) -> AsyncIterator[SglangEngine]:
    """A client of a server that has SGLang's routes and refuses what SGLang's structs refuse."""
    served = routes(folder)
    structs = load(folder, "sglang.srt.managers.io_struct")
    builtins = load(folder, "sglang.srt.utils.msgspec_utils").msgspec_to_builtins
    ranks = [structs.ChecksumInfo(checksums={"w": sum_}, per_gpu_checksum="", parallelism_info=[]) for sum_ in "ab"]
    loads = load(folder, "sglang.srt.managers.load_snapshot")
    queues = loads.QueueMetrics(waiting=2, grammar=0, paused=0, retracted=1, prealloc_ready=0)
    snapshot = loads.LoadSnapshot(num_running_reqs=3, num_waiting_reqs=2, token_usage=0.5, queues=queues)
    special = {
        "/generate": generate,
        "/model_info": lambda: {"weight_version": "0.3"},
        "/server_info": lambda: {"tp_size": 2, "pp_size": 1},
        # Each group of data-parallel attention has a scheduler.
        "/v1/loads": lambda: {"loads": [snapshot.to_dict({"core", "queues"})] * 2},
        "/weights_checker": lambda: {"success": True, "message": "Success.", "ranks": builtins(ranks)},
    }

    async def handle(request: web.Request) -> web.Response:
        route = served.get(request.path)
        if route is None or request.method not in route.methods:
            return web.json_response({"detail": "Not Found"}, status=404)
        if seen is not None:
            seen.add(request.path)
        raw = await request.read()
        why = refusal(folder, route, request.path, msgspec.json.decode(raw) if raw else None)
        if why:
            return web.json_response({"error": why}, status=400)
        content = special.get(request.path, lambda: {"success": True, "message": "Success"})()
        if request.path == "/generate":
            lines = [
                b"data: " + msgspec.json.encode(event) for event in (content if type(content) is list else [content])
            ]
            return web.Response(body=b"\n\n".join([*lines, b"data: [DONE]", b""]), content_type="text/event-stream")
        return web.json_response(content)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        client = SglangEngine(str(server.make_url("")))
        try:
            yield client
        finally:
            await client.close()


async def test_every_request_has_a_route_and_a_body_that_sglang_takes(folder: Path) -> None:
    stop = load(folder, "sglang.api.v1.api_types").FinishStop(matched=9)
    seen: set[str] = set()
    async with sglang(folder, lambda: answer(folder, TOKENS, stop, [], "0.3"), seen) as client:
        assert await client.health()
        await client.generate(REQUEST)
        await client.generate(msgspec.structs.replace(REQUEST, stop_token_ids=[], seed=None))
        await client.abort()
        for mode in ("keep", "abort"):
            await client.pause(mode)  # type: ignore[arg-type]
        await client.init_transfer(INIT)
        await client.start_update()
        await client.update(UPDATE)
        await client.finish_update(Version(0, 3))
        assert await client.version() == Version(0, 3)
        assert await client.checksums() == {"tp0:w": "a", "tp1:w": "b"}
        assert await client.workers() == 2
        assert await client.load() == EngineLoad(running=6, waiting=4, cache_usage=0.5, preempted=2)
        await client.sleep(2)
        await client.wake(["weights"])
        await client.wake(["kv_cache"])
        await client.resume()
    assert seen == {
        *("/health", "/generate", "/abort_request", "/pause_generation", "/continue_generation", "/model_info"),
        *("/destroy_weights_update_group", "/init_weights_update_group", "/begin_weight_update", "/end_weight_update"),
        *("/update_weights_from_distributed", "/flush_cache", "/update_weight_version", "/weights_checker"),
        "/server_info",
        *("/release_memory_occupation", "/resume_memory_occupation", "/v1/loads"),
    }


async def test_an_answer_with_two_versions_is_read(folder: Path) -> None:
    stop = load(folder, "sglang.api.v1.api_types").FinishStop(matched=9)
    async with sglang(folder, lambda: answer(folder, TOKENS, stop, [("0.2", 1)], "0.3")) as client:
        got = await client.generate(REQUEST)
    assert (got.token_ids, got.logprobs, got.finish_reason) == (TOKENS, [-4.0, -5.0, -9.0], "stop")
    assert got.versions == [VersionRun(Version(0, 2), 0, 1), VersionRun(Version(0, 3), 1, 3)]


@pytest.mark.parametrize(
    ("sent", "changes", "queued", "parts"),
    [
        ([([4], "0.2"), ([5, 6], "0.2"), ([9], "0.2")], [], 1, [[4], [5, 6], [9]]),
        ([([4], "0.2"), ([5], "0.2"), ([6], "0.3"), ([7, 9], "0.3")], [("0.2", 2)], 1, [[4], [5], [6, 7, 9]]),
        ([([4], "0.2"), ([5], "0.3"), ([6], "0.3"), ([9], "0.3")], [("0.2", 1)], 2, [[4, 5, 6, 9]]),
    ],
)
async def test_a_stream_is_cut_where_its_versions_are_uncertain(
    folder: Path, sent: Any, changes: Any, queued: int, parts: list[list[int]]
) -> None:
    async with sglang(folder, lambda: streamed(folder, sent, changes, queued)) as client:
        got = [part async for part in client.stream(msgspec.structs.replace(REQUEST, max_tokens=9))]
    assert [part.token_ids for part in got] == parts
    true = [version for tokens, version in sent for _ in tokens]
    runs = [run for part in got for run in part.versions]
    assert [str(run.version) for run in runs for _ in range(run.start, run.end)] == true


async def test_finish_reasons_are_read(folder: Path) -> None:
    types = load(folder, "sglang.api.v1.api_types")
    reasons = {
        "stop": types.FinishStop(matched=9),
        "length": types.FinishLength(length=3),
        "abort": types.FinishAbort(),
    }
    for name, reason in reasons.items():
        async with sglang(folder, lambda reason=reason: answer(folder, TOKENS, reason, [], "0.3")) as client:
            assert (await client.generate(REQUEST)).finish_reason == name


async def test_a_request_aborted_before_its_first_token_is_read(folder: Path) -> None:
    reason = load(folder, "sglang.api.v1.api_types").FinishAbort(message="Abort in waiting queue")
    async with sglang(folder, lambda: answer(folder, [], reason, [], "default")) as client:
        got = await client.generate(REQUEST)
    assert (got.token_ids, got.versions, got.finish_reason) == ([], [], "abort")


@pytest.mark.parametrize(("status", "error"), [(400, EngineRejected), (503, EngineLost)])
async def test_an_abort_with_a_status_is_an_error(folder: Path, status: int, error: type[Exception]) -> None:
    reason = load(folder, "sglang.api.v1.api_types").FinishAbort(message="too long", status_code=status)
    async with sglang(folder, lambda: answer(folder, [], reason, [], "0.3")) as client:
        with pytest.raises(error, match="too long"):
            await client.generate(REQUEST)


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 3}}, "unknown field"),
        ("/generate", {"input_ids": ["x"], "sampling_params": {}}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/pause_generation", {"mode": "wait"}, "mode"),
        ("/init_weights_update_group", {"master_address": "127.0.0.1"}, "master_port"),
        ("/update_weights_from_distributed", {"names": ["w"], "dtypes": ["float32"]}, "shapes"),
        ("/update_weight_version", {"abort_all_requests": False}, "new_version"),
        ("/begin_weight_update", {"selector": "everything"}, "selector"),
        ("/begin_weight_update", None, "NoneType"),
        ("/begin_weight_update", {"select": "all"}, "overlook select"),
    ],
)
def test_what_the_structs_refuse(folder: Path, path: str, body: Any, why: str) -> None:
    assert why in refusal(folder, routes(folder)[path], path, body)


def test_every_flag_and_variable_that_we_use_or_refuse_exists(folder: Path) -> None:
    known = field_names(folder)
    config = float32_config("calculator", ["rollout.engine=sglang"], mode="colocated")
    engine = plan(config, Path("runs/mine"), gpus=1).engines[0]
    assert {*SGLANG.sleep_flags} <= {*engine.argv}
    lora = ["rollout.engine=sglang", "trainer.lora={}"]
    for way, flags in ((["weight_sync.adapters=load"], {*SGLANG.adapter_flags}), ([], set[str]())):
        adapted = plan(float32_config("calculator", lora + way), Path("runs/mine"), gpus=2).engines[0]
        assert {*SGLANG.adapter_flags} & {*adapted.argv} == flags
    flags = {word for word in engine.argv if word.startswith("--")} | {
        *SGLANG.flags,
        *SGLANG.fixed_flags,
        *SGLANG.refused_flags,
        *("--nnodes", *SGLANG.node_flags),
        *(word for word in SGLANG.adapter_flags if word.startswith("--")),
    }
    # The page of SGLang says that these may be added.
    allowed = {"--attn-dp-size", "--enable-fp32-lm-head", "--enable-hierarchical-cache", "--speculative-algorithm"}
    assert not any(SGLANG.refusal(flag) for flag in allowed)
    flags |= allowed
    by_abbreviation = {"--tp", "--pp", "--dp"}
    not_a_field = {"--config"}
    assert {flag for flag in flags if flag[2:].replace("-", "_") not in known} == by_abbreviation | not_a_field
    variables = load(folder, "sglang.srt.environ").envs
    ours = {name for name in (*VARIABLES, *UNWANTED) if name.startswith("SGLANG_")}
    assert ours and all(hasattr(variables, name) for name in ours)


def test_guessed_tokens_have_the_log_probabilities_of_the_policy_at_the_temperature(folder: Path) -> None:
    original = SimpleNamespace(SGLANG_RETURN_ORIGINAL_LOGPROB=SimpleNamespace(get=lambda: False))
    source = folder / "sglang/srt/layers/logprob_processor.py"
    compute = cut_out(source, "compute_spec_logprobs", torch=torch, envs=original)
    logits, temperatures = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([[0.7], [1.3]])
    predicted, accepted = torch.tensor([3, 1, 4, 1, 5, 8]), torch.tensor([[0, 2], [3, 4]])
    output = SimpleNamespace(next_token_logits=logits)
    sampling = SimpleNamespace(is_all_greedy=False, temperatures=temperatures)
    batch = SimpleNamespace(seq_lens=[5, 5], sampling_info=sampling, top_logprobs_nums=None, token_ids_logprobs=None)
    compute(batch, output, predicted, accept_index=accepted)
    for row, places in enumerate(accepted):
        exact = (logits[places].double() / temperatures[row]).log_softmax(-1)
        assert_near(output.next_token_logprobs[row], exact[range(2), predicted[places]], rounding(16.0, 9))


SERVER = """
import sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

routes = [Route(path, lambda request: Response("ok")) for path in ("/health", "/model_info")]
port = int(sys.argv[sys.argv.index("--port") + 1])
uvicorn.Server(uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=port)).run()
"""


def status(url: str, **headers: str) -> int:
    """The status of a GET; 0 if nothing listens."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def test_requests_without_the_token_do_not_reach_sglang(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVER)
    make_tokens(tmp_path / "keys")
    url, path = f"http://127.0.0.1:{(port := free_port())}", os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-m", "rl_async.rollout_server.sglang", "--port", str(port)]
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{path}", TOKEN_FILE: str(token_file(tmp_path, "engines"))}
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while status(f"{url}/health") == 0:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert status(f"{url}/health") == 200
        assert status(f"{url}/model_info") == status(url) == 401
        assert status(f"{url}/model_info", **bearer(run_token(tmp_path, "engines"))) == 200
        assert status(f"{url}/health", Origin="https://example.com") == 403
    finally:
        process.kill()
        process.wait()


def test_without_a_token_file_sglang_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_FILE}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "rl_async.rollout_server.sglang"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and TOKEN_FILE in ended.stderr and "Traceback" not in ended.stderr


# Adapters by name: our middleware between our client and a server with SGLang's routes, bodies and reader of files.


LAYER = "model.layers.0.self_attn.q_proj"
RANK = 2
ADAPTER_REQUEST = GenerateRequest(request_id="r", token_ids=[1], sampling=Sampling(), max_tokens=1, stop_token_ids=[])


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
    await engine.generate(ADAPTER_REQUEST)
    for step in (1, 2):
        await publish(engine, buckets(step, weights_name(model_folder)), Version(0, step))
        config, found = server.loaded[NAME]
        assert (config.r, config.lora_alpha, config.target_modules) == (RANK, RANK, ["q_proj"])
        sent = adapters(step)
        assert torch.equal(found[f"base_model.model.{LAYER}.lora_A.weight"], sent[f"{LAYER}.lora_A.weight"])
        assert torch.equal(found[f"base_model.model.{LAYER}.lora_B.weight"], 0.5 * sent[f"{LAYER}.lora_B.weight"])
        await engine.generate(ADAPTER_REQUEST)
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
    await engine.generate(ADAPTER_REQUEST)
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
        await engine.generate(ADAPTER_REQUEST)
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


# Our coordinator and SGLang's own weight updater, on the CPU over gloo. SGLang on a GPU, and NCCL, are not run.


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


def weights_buckets(value: float) -> list[Bucket]:
    """Two buckets, of two tensors and of one."""
    return list(make_buckets(weights(value).items(), 200))


def expected(value: float) -> dict[str, str]:
    return {
        f"tp0:{name}": xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy().tobytes())
        for name, tensor in weights(value).items()
    }


def coordinator(directory: Directory) -> WeightCoordinator:
    sync = WeightSyncConfig(way="gloo", timeout_s=30)
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


@pytest.mark.slow
def test_our_buckets_are_laid_out_as_sglangs() -> None:
    tensors = list(weights(1.0).items())
    theirs = load(wheel_folder(), "sglang.srt.weight_sync.tensor_bucket").FlattenedTensorBucket
    [ours] = make_buckets(tensors, 1 << 20)
    assert torch.equal(ours.data, theirs(named_tensors=tensors).get_flattened_tensor())
    empty = theirs.empty(ours.info.names, ours.info.dtype_names, ours.info.shapes, "cpu")
    empty.get_flattened_tensor().copy_(ours.data)
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(empty.reconstruct_tensors(), tensors, strict=True))


@pytest.mark.slow
def test_two_engines_get_two_versions_from_one_trainer_and_one_from_the_next(start: Start) -> None:
    directory, records = Directory(), start("a", "b")
    directory.add(*records)
    with coordinator(directory) as first:
        for step in (0, 1):
            report = first.publish(Version(0, step), weights_buckets(step * 10.0))
            assert (report.engines, report.failures) == (["a", "b"], [])
            assert [state(record) for record in records] == [(expected(step * 10.0), Version(0, step))] * 2
    with coordinator(directory) as second:  # it counts its groups from 0 again, so that their names are taken
        assert second.publish(Version(1, 1), weights_buckets(20.0)).failures == []
    assert [state(record) for record in records] == [(expected(20.0), Version(1, 1))] * 2


@pytest.mark.slow
def test_an_engine_of_ours_and_one_of_sglangs_are_one_group(start: Start) -> None:
    with start_ours() as ours:
        directory, records = Directory(), [*start("theirs"), ours]
        directory.add(*records)
        with coordinator(directory) as trainer:
            report = trainer.publish(Version(0, 0), weights_buckets(7.0))
        assert (report.engines, report.failures) == (["theirs", "ours"], [])
        assert state(records[0]) == (expected(7.0), Version(0, 0))


@pytest.mark.slow
def test_an_update_that_an_earlier_trainer_left_is_ended(start: Start) -> None:
    directory, [record] = Directory(), start("a")
    directory.add(record)
    asyncio.run(asked(record.url, SglangEngine.start_update))
    with coordinator(directory) as trainer:
        assert trainer.publish(Version(0, 0), weights_buckets(5.0)).failures == []
    assert state(record) == (expected(5.0), Version(0, 0))


@pytest.mark.slow
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
        assert trainer.publish(Version(0, 0), weights_buckets(5.0)).failures == []
    assert state(record) == (expected(5.0), Version(0, 0))
    assert not asyncio.run(asked(record.url, SglangEngine.is_sleeping))


@pytest.mark.slow
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
