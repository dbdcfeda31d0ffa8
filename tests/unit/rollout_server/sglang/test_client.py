"""The client of SGLang's API, against servers that send what SGLang may send."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import msgspec
import pytest
import uvicorn
from aiohttp import web
from aiohttp.test_utils import TestServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rl_async.accelerators import ACCELERATORS
from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Sampling, Version, VersionRun
from rl_async.process.http_auth import RequireToken
from rl_async.rollout_server.api import GenerateRequest, Image, LineageFence
from rl_async.rollout_server.sglang import __main__ as start
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo

REQUEST = GenerateRequest(
    request_id="r", token_ids=[1], sampling=Sampling(), max_tokens=2, stop_token_ids=[9], min_version=Version(0, 1)
)
SPANS = [{"version": "0.1", "start": 0, "end": 1}, {"version": "0.2", "start": 1, "end": 2}]
META: dict[str, Any] = {
    "completion_tokens": 2,
    "weight_version": "0.2",
    "finish_reason": {"type": "stop", "matched": 9},
    "output_token_logprobs": [[-1.0, 5, None], [-2.0, 9, None]],
    "weight_versions": SPANS,
}
INIT = InitInfo(
    backend="gloo", master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="weights-0"
)
UPDATE = UpdateInfo(names=["w"], dtype_names=["float32"], shapes=[[2]], checksum="")
DONE = {"success": True, "message": "Success"}


def events(*answers: Any) -> web.Response:
    """A stream as SGLang sends it."""
    lines = [b"data: " + msgspec.json.encode(answer) + b"\n\n" for answer in answers]
    return web.Response(body=b"".join([*lines, b"data: [DONE]\n\n"]), content_type="text/event-stream")


def event(tokens: list[int], count: int, version: str, **meta: Any) -> dict[str, Any]:
    """An event with these tokens, the last of ``count``, each with its own number below zero as log-probability."""
    logprobs = [[-float(token), token, None] for token in tokens]
    about = {"completion_tokens": count, "weight_version": version, "finish_reason": None}
    return {"output_ids": tokens, "meta_info": about | {"output_token_logprobs": logprobs} | meta}


def ending(*spans: tuple[str, int, int]) -> dict[str, Any]:
    """What the last event has beside its tokens."""
    named = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    return {"finish_reason": {"type": "length", "length": 9}, "weight_versions": named}


@asynccontextmanager
async def answering(handler: Callable[[str, Any], tuple[int, Any]]) -> AsyncIterator[SglangEngine]:
    """A client of a server that answers ``handler(path, body)``: a status and what becomes JSON."""

    async def handle(request: web.Request) -> web.Response:
        raw = await request.read()
        status, value = handler(request.path, msgspec.json.decode(raw) if raw else None)
        if request.path == "/generate":
            return events(*(value if isinstance(value, list) else [value]))
        return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        client = SglangEngine(str(server.make_url("")))
        try:
            yield client
        finally:
            await client.close()


async def test_tokens_logprobs_and_versions_are_taken_over() -> None:
    async with answering(lambda path, body: (200, {"output_ids": [5, 9], "meta_info": META})) as client:
        got = await client.generate(REQUEST)
        parts = [part async for part in client.stream(REQUEST)]
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([5, 9], [-1.0, -2.0], "stop")
    assert got.versions == [VersionRun(Version(0, 1), 0, 1), VersionRun(Version(0, 2), 1, 2)]
    assert parts == [got]


LONG = msgspec.structs.replace(REQUEST, max_tokens=9)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        # All of one version: every part is certain.
        (
            [event([1], 1, "0.1"), event([2, 3], 3, "0.1"), event([4], 4, "0.1", **ending(("0.1", 0, 4)))],
            [[1], [2, 3], [4]],
        ),
        # The update may have come after 2, so that 3 and what follows wait for the end.
        (
            [
                *(event([1], 1, "0.1"), event([2, 3], 3, "0.2"), event([4], 4, "0.2")),
                event([5], 5, "0.2", **ending(("0.1", 0, 2), ("0.2", 2, 5))),
            ],
            [[1], [2, 3, 4, 5]],
        ),
        # The first event may hold tokens from before an update, too.
        ([event([1, 2], 2, "0.2"), event([3], 3, "0.2", **ending(("0.1", 0, 1), ("0.2", 1, 3)))], [[1, 2, 3]]),
    ],
)
async def test_parts_arrive_as_far_as_their_versions_are_certain(answer: list[Any], parts: list[list[int]]) -> None:
    async with answering(lambda path, body: (200, answer)) as client:
        got = [part async for part in client.stream(LONG)]
        whole = await client.generate(LONG)
    assert [part.token_ids for part in got] == parts
    assert [part.finish_reason for part in got] == ["abort"] * (len(parts) - 1) + ["length"]
    spans = answer[-1]["meta_info"]["weight_versions"]
    assert whole.token_ids == [token for part in parts for token in part]
    assert whole.logprobs == [-float(token) for token in whole.token_ids]
    assert [(str(run.version), run.start, run.end) for run in whole.versions] == [
        (span["version"], span["start"], span["end"]) for span in spans
    ]


async def test_a_request_aborted_while_it_waits_has_its_last_token_once() -> None:
    again = event([2], 2, "0.1", **ending(("0.1", 0, 2)))
    again["meta_info"] |= {
        "finish_reason": {"type": "abort"},
        "output_token_logprobs": [[-1.0, 1, None], [-2.0, 2, None]],
    }
    async with answering(lambda path, body: (200, [event([1], 1, "0.1"), event([2], 2, "0.1"), again])) as client:
        got = await client.generate(LONG)
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([1, 2], [-1.0, -2.0], "abort")


@pytest.mark.parametrize(
    ("answer", "error", "named"),
    [
        ([event([1], 1, "0.1"), event([1, 2], 2, "0.1")], EngineRejected, "--incremental-streaming-output"),
        ([event([1], 1, "0.1"), event([2], 2, "0.1", **ending(("0.2", 0, 2)))], EngineLost, r"0\.1"),
        ([event([1], 1, "0.1")], EngineLost, "finish reason"),
        ([event([1], 1, "0.1"), {"error": {"message": "out of memory", "code": 500}}], EngineLost, "out of memory"),
        ([{"error": {"message": "too long", "code": 400}}], EngineRejected, "too long"),
        ([{"output_ids": [1]}], EngineLost, "nothing about them"),
    ],
)
async def test_streams_that_cannot_be_trained_on_are_refused(
    answer: list[Any], error: type[Exception], named: str
) -> None:
    async with answering(lambda path, body: (200, answer)) as client:
        with pytest.raises(error, match=f"{client.url}.*{named}"):
            await client.generate(LONG)


async def test_nothing_is_left_to_the_servers_defaults_and_no_stop_token_to_ignore_eos() -> None:
    sent: list[Any] = []

    def keep(path: str, body: Any) -> tuple[int, Any]:
        sent.append(body)
        return 200, {"output_ids": [5, 9], "meta_info": META}

    async with answering(keep) as client:
        await client.generate(REQUEST)
        await client.generate(msgspec.structs.replace(REQUEST, stop_token_ids=[]))
    expected = {"max_new_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0} | {
        "sampling_seed": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "no_stop_trim": True,
        "n": 1,
        "stream_interval": 64,
    }
    assert [body["sampling_params"] for body in sent] == [
        expected | {"stop_token_ids": [9], "ignore_eos": False},
        expected | {"stop_token_ids": [], "ignore_eos": True},
    ]
    assert sent[0]["rid"] != sent[1]["rid"] and {len(body["rid"]) for body in sent} == {34}


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"weight_versions": [{"version": "0.0", "start": 0, "end": 2}]}, EngineLost, r"0\.0.* 0\.1"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, EngineLost, "'default'"),
        ({"weight_versions": None}, EngineRejected, "weight version"),
        ({"weight_versions": SPANS[:1]}, EngineRejected, "weight version"),
        ({"output_token_logprobs": None}, EngineRejected, "log-probability"),
        ({"output_token_logprobs": [[-1.0, 5, None]]}, EngineRejected, "log-probability"),
        ({"output_token_logprobs": [[-1.0, 9, None], [-2.0, 5, None]]}, EngineRejected, "log-probability"),
        ({"finish_reason": {"type": "bored"}}, EngineLost, "finish_reason"),
        ({"finish_reason": {"type": "abort", "status_code": 503, "message": "out of time"}}, EngineLost, "out of time"),
        ({"finish_reason": {"type": "abort", "status_code": 400, "message": "too long"}}, EngineRejected, "too long"),
    ],
)
async def test_answers_that_cannot_be_trained_on_are_refused(change: Any, error: type[Exception], named: str) -> None:
    async with answering(lambda path, body: (200, {"output_ids": [5, 9], "meta_info": META | change})) as client:
        with pytest.raises(error, match=f"{client.url}.*{named}"):
            await client.generate(REQUEST)


async def test_an_aborted_request_keeps_what_was_sampled() -> None:
    meta = META | {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}}
    async with answering(lambda path, body: (200, {"output_ids": [5, 9], "meta_info": meta})) as client:
        got = await client.generate(REQUEST)
    assert (got.token_ids, got.finish_reason) == ([5, 9], "abort")


@pytest.mark.parametrize("change", [{"json_schema": "{}"}, {"images": [Image.of(b"a drawing", "image/png", 0)]}])
async def test_json_schemas_and_images_are_refused_and_not_forgotten(change: dict[str, Any]) -> None:
    async with answering(lambda path, body: pytest.fail("it was asked")) as client:
        with pytest.raises(EngineRejected):
            await client.generate(msgspec.structs.replace(REQUEST, **change))


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=20), Sampling(min_p=0.1)])
async def test_samplers_whose_logprobs_sglang_does_not_report_are_refused(sampling: Sampling) -> None:
    async with answering(lambda path, body: (200, {"output_ids": [5, 9], "meta_info": META})) as client:
        with pytest.raises(EngineRejected, match=r"top_p.*top_k.*min_p"):
            await client.generate(msgspec.structs.replace(REQUEST, sampling=sampling))


async def test_one_request_is_aborted_by_the_id_that_it_runs_under() -> None:
    seen: dict[str, Any] = {}
    arrived, aborted = asyncio.Event(), asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        seen["running"] = (await request.json())["rid"]
        arrived.set()
        await aborted.wait()
        return events({"output_ids": [5, 9], "meta_info": META})

    async def abort(request: web.Request) -> web.Response:
        seen["aborted"] = await request.json()
        aborted.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", abort)
    async with TestServer(app) as server:
        client = SglangEngine(str(server.make_url("")))
        running = asyncio.create_task(client.generate(REQUEST))
        await asyncio.wait_for(arrived.wait(), 10)
        await client.abort("another")
        assert "aborted" not in seen
        await client.abort("r")
        await asyncio.wait_for(running, 10)
        await client.close()
    assert seen["aborted"] == {"rid": seen["running"]}


@pytest.mark.parametrize("status", [200, 400])
async def test_a_refusal_is_an_error_with_its_message(status: int) -> None:
    no = {"success": False, "message": "Failed to receive weights: Unaligned received tensor w"}

    def serve(path: str, body: Any) -> tuple[int, Any]:
        return (status, no) if path == "/update_weights_from_distributed" else (200, DONE)

    async with answering(serve) as client:
        await client.init_transfer(INIT)
        with pytest.raises(EngineRejected, match="Unaligned received tensor w"):
            await client.update(UPDATE)


async def test_an_update_without_a_group_is_refused() -> None:
    async with answering(lambda path, body: (200, DONE)) as client:
        with pytest.raises(EngineRejected, match="init_transfer"):
            await client.update(UPDATE)
        with pytest.raises(EngineRejected, match="ipc"):
            await client.init_transfer(InitInfo(backend="ipc"))
        with pytest.raises(EngineRejected, match=r"rollout\.engine"):
            await client.init_transfer(InitInfo(backend="gloo", store="/somewhere"))


async def test_earlier_groups_are_left_before_a_new_one_is_joined() -> None:
    calls: list[tuple[str, str]] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        calls.append((path, body["group_name"]))
        if len(calls) == 1:
            return 400, {"success": False, "message": "The group to be destroyed does not exist."}
        return 200, DONE

    async with answering(serve) as client:
        await client.init_transfer(INIT)
        await client.init_transfer(msgspec.structs.replace(INIT, group_name="weights-1"))
    leave, join = "/destroy_weights_update_group", "/init_weights_update_group"
    assert calls[:2] == [(leave, "weights-0"), (join, "weights-0")]
    assert sorted(calls[2:4]) == [(leave, "weights-0"), (leave, "weights-1")]
    assert calls[4:] == [(join, "weights-1")]


async def test_an_update_that_an_earlier_trainer_left_is_ended_first() -> None:
    calls: list[str] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        calls.append(path)
        if len(calls) == 1:
            return 400, {
                "success": False,
                "message": "a weight-update session is already open; call end_weight_update()",
            }
        return 200, DONE

    async with answering(serve) as client:
        await client.start_update()
    assert calls == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


async def test_a_version_is_finished_without_aborting_anybody() -> None:
    calls: list[tuple[str, Any]] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        calls.append((path, body))
        return 200, DONE

    async with answering(serve) as client:
        await client.finish_update(Version(2, 7))
    assert calls == [
        ("/end_weight_update", {}),
        ("/flush_cache", None),
        ("/update_weight_version", {"new_version": "2.7", "abort_all_requests": False}),
    ]


@pytest.mark.parametrize(("name", "version"), [("0.3", Version(0, 3)), ("default", None), (None, None)])
async def test_the_version_served(name: str | None, version: Version | None) -> None:
    async with answering(lambda path, body: (200, {"weight_version": name})) as client:
        assert await client.version() == version


async def test_a_version_that_is_not_ours_is_an_error() -> None:
    async with answering(lambda path, body: (200, {"weight_version": "step-7"})) as client:
        with pytest.raises(EngineLost, match="step-7"):
            await client.version()


async def test_pause_wait_is_refused() -> None:
    modes: list[str] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        modes.append(body["mode"])
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    async with answering(serve) as client:
        await client.pause("keep")
        await client.pause("abort")
        with pytest.raises(EngineRejected, match="wait"):
            await client.pause("wait")
    assert modes == ["retract", "abort"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"starts": [0], "numels": [1]}, "bucket_bytes"),
        ({"kind": "delta", "base": "0.1", "payload_bytes": 8}, "weight_sync.way=delta"),
        ({"hold": "keep"}, "weight_sync.way=delta"),
    ],
)
async def test_buckets_that_sglang_cannot_load_are_not_sent(change: dict[str, Any], said: str) -> None:
    paths: list[str] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        paths.append(path)
        return 200, DONE

    async with answering(serve) as client:
        await client.init_transfer(INIT)
        with pytest.raises(EngineRejected, match=said):
            await client.update(msgspec.structs.replace(UPDATE, **change))
        with pytest.raises(EngineRejected, match="staged"):
            await client.start_update(staged=True)
    assert "/update_weights_from_distributed" not in paths and "/begin_weight_update" not in paths


# What SGLang's start script puts around the application that SGLang serves.


async def application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing is asked")


def test_routes_ask_for_the_token_first_and_then_for_the_lineage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "token").write_text("t" * 43)
    monkeypatch.setenv("RL_ASYNC_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)  # restored afterwards
    start._guard_routes(None)
    guarded = uvicorn.Config(application).app
    assert isinstance(guarded, RequireToken)
    assert isinstance(guarded._app, LineageFence) and isinstance(guarded._app._app, start.SleepReport)
    assert guarded._app._app._app is application


def test_only_tags_that_sleep_are_woken_and_only_others_put_to_sleep() -> None:
    calls: list[tuple[str, Any]] = []

    async def change(request: Request) -> JSONResponse:
        """SGLang's side, which fails at a tag that it does not know."""
        tags = (await request.json())["tags"]
        calls.append((request.url.path, tags))
        return JSONResponse(None, 500 if "graphs" in tags else 200)

    app = Starlette(
        routes=[Route(f"/{way}_memory_occupation", change, methods=["POST"]) for way in ("release", "resume")]
    )
    with TestClient(start.SleepReport(app)) as client:

        def sent(way: str, *tags: str) -> int:
            return client.post(f"/{way}_memory_occupation", json={"tags": tags}).status_code

        def sleeps() -> bool:
            return bool(client.get("/is_sleeping").json()["is_sleeping"])

        assert sent("resume", "weights") == 200 and not sleeps()
        assert sent("release", "graphs") == 500 and not sleeps()
        assert sent("release", "kv_cache", "weights") == 200 and sleeps()
        assert sent("release", "kv_cache") == 200
        assert sent("resume", "weights") == 200 and sleeps()
        assert sent("release", "kv_cache", "weights") == 200
        assert sent("resume", "weights", "kv_cache") == 200 and not sleeps()
        assert client.post("/release_memory_occupation", json={"tag": "weights"}).status_code == 400
    assert calls == [
        ("/release_memory_occupation", ["graphs"]),
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/release_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["weights", "kv_cache"]),
    ]


@pytest.mark.parametrize(
    ("words", "make", "refused"),
    [
        ([], 1, ""),
        (["--speculative-algorithm", "NGRAM"], 0, ""),
        (["--speculative-algorithm=EAGLE3"], 0, ""),
        (["--speculative-algorithm", "UNO"], 0, "UNO"),
        (["--speculative-algorithm", "NGRAM"], 1, "likeliest"),
    ],
)
def test_speculation_that_would_sample_from_another_distribution_ends_the_start(
    words: list[str], make: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "accelerator_here", lambda: ACCELERATORS[make])
    with pytest.raises(SystemExit, match=refused) if refused else nullcontext():
        start._check_speculation(start._settings(["sglang", *words])[1])
