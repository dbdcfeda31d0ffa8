"""The client against servers that answer what vLLM may answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Sampling, Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.vllm import VllmEngine

REQUEST = GenerateRequest(
    request_id="r", token_ids=[1], sampling=Sampling(), max_tokens=2, stop_token_ids=[9], min_version=Version(0, 1)
)
ANSWER: dict[str, Any] = {
    "token_ids": [5, 9],
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -1.0, "rank": 3}, {"logprob": -2.0}]},
    "weight_versions": [{"version": "0.1", "start": 0, "end": 1}, {"version": "0.2", "start": 1, "end": 2}],
}


@asynccontextmanager
async def answering(handler: Callable[[str, Any], tuple[int, Any]]) -> AsyncIterator[VllmEngine]:
    """A client of a server that answers ``handler(path, body)``: a status and what becomes JSON."""

    async def handle(request: web.Request) -> web.Response:
        raw = await request.read()
        status, value = handler(request.path, msgspec.json.decode(raw) if raw else None)
        return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        client = VllmEngine(str(server.make_url("")))
        try:
            yield client
        finally:
            await client.close()


async def test_tokens_logprobs_and_versions_are_taken_over() -> None:
    async with answering(lambda path, body: (200, {"choices": [ANSWER]})) as client:
        got = await client.generate(REQUEST)
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([5, 9], [-1.0, -2.0], "stop")
    assert got.versions == [VersionRun(Version(0, 1), 0, 1), VersionRun(Version(0, 2), 1, 2)]


async def test_nothing_is_left_to_the_servers_defaults() -> None:
    sent: list[Any] = []

    def keep(path: str, body: Any) -> tuple[int, Any]:
        sent.append(body["sampling_params"])
        return 200, {"choices": [ANSWER]}

    async with answering(keep) as client:
        await client.generate(REQUEST)
    assert sent == [
        {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "stop_token_ids": [9], "top_p": 1.0, "top_k": 0}
        | {"min_p": 0.0, "seed": None, "ignore_eos": True}
    ]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"weight_versions": [{"version": "0.0", "start": 0, "end": 2}]}, EngineLost, "older than 0.1"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, EngineLost, "did not send"),
        ({"weight_versions": None}, EngineRejected, "weight version of every token"),
        ({"weight_versions": [{"version": "0.1", "start": 0, "end": 1}]}, EngineRejected, "weight version of every"),
        ({"logprobs": None}, EngineRejected, "one log-probability per sampled token"),
        ({"finish_reason": "error"}, EngineLost, "not Answer"),
    ],
)
async def test_answers_that_cannot_be_trained_on_are_refused(change: Any, error: type[Exception], said: str) -> None:
    async with answering(lambda path, body: (200, {"choices": [ANSWER | change]})) as client:
        with pytest.raises(error, match=said):
            await client.generate(REQUEST)


async def test_an_update_that_an_earlier_trainer_left_is_made_to_fail_and_started_again() -> None:
    calls: list[str] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        calls.append(path)
        if path == "/update_weights" or len(calls) == 1:
            return 500, {"error": {"message": "a weight update is already active"}}
        return 200, {}

    async with answering(serve) as client:
        await client.start_update()
    assert calls == ["/start_weight_update", "/update_weights", "/start_weight_update"]


async def test_a_connection_that_the_server_closed_meanwhile_costs_no_request() -> None:
    answered = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers once per connection, promises to keep it, and hangs up when it is used again."""
        nonlocal answered
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split()[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
        await reader.readexactly(length)
        body = msgspec.json.encode({"choices": [ANSWER]})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        answered += 1
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = VllmEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        for _ in range(3):
            assert (await engine.generate(REQUEST)).token_ids == [5, 9]
        assert answered == 3
    finally:
        await engine.close()
        server.close()
