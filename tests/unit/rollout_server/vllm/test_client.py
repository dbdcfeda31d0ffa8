"""The client of vLLM's dialect, and requests for one prompt that it sends as one."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rl_async import tracing
from rl_async.configs.engines import STREAM_INTERVAL
from rl_async.errors import EngineLost, EngineRejected, SchemaRejected, TrainerReplaced
from rl_async.messages import Sampling, Version, VersionRun
from rl_async.rollout_server.api import EngineLoad, EngineTokens, GenerateRequest, GenerateResult, Image, join
from rl_async.rollout_server.vllm import __main__ as started
from rl_async.rollout_server.vllm import versions
from rl_async.rollout_server.vllm.client import (
    PREEMPTIONS,
    ROUTED_BY,
    TOKENS,
    Coalescer,
    PendingRequest,
    VllmEngine,
)
from rl_async.rollout_server.vllm.plugin import QueuesReadToTheEnd
from rl_async.rollout_server.vllm.versions import Samples, Tokens, WeightVersions

COALESCED = GenerateRequest(request_id="", token_ids=[1, 2], sampling=Sampling(), max_tokens=4, stop_token_ids=[9])


def request(name: str, **changes: object) -> GenerateRequest:
    return msgspec.structs.replace(COALESCED, request_id=name, **changes)


def tokens(*ids: int) -> GenerateResult:
    return GenerateResult(token_ids=list(ids), logprobs=[0.0] * len(ids), versions=[], finish_reason="abort")


async def answer(coalescer: Coalescer, one: GenerateRequest) -> list[list[int]]:
    return [part.token_ids async for part in coalescer.stream(one)]


class Engine:
    """Answers the i-th request of a group with token i, in two parts. ``calls`` holds the ids of each group."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[str]] = []
        self._error = error

    async def sample(self, group: Sequence[PendingRequest]) -> None:
        self.calls.append([asked.request.request_id for asked in group])
        for i, asked in enumerate(group):
            asked.add(tokens(i))
        await asyncio.sleep(0)
        for i, asked in enumerate(group):
            if self._error is None or i == 0:
                asked.add(tokens(i, i))
                asked.end()
        if self._error is not None:
            raise self._error


async def test_one_prompt_is_sent_once_and_each_caller_gets_its_own_answer() -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=8)
    answers = await asyncio.gather(*(answer(coalescer, request(name)) for name in "abc"))
    assert engine.calls == [["a", "b", "c"]]
    assert answers == [[[0], [0, 0]], [[1], [1, 1]], [[2], [2, 2]]]
    await answer(coalescer, request("d"))
    assert engine.calls[1:] == [["d"]], "a later request is sent by itself"


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1]},
        {"sampling": Sampling(temperature=0.5)},
        {"sampling": Sampling(temperature=0.0)},
        {"max_tokens": 5},
        {"stop_token_ids": []},
        {"images": [Image.of(b"a drawing", "image/png", 1)]},
        {"min_version": Version(0, 1)},
    ],
    ids=str,
)
async def test_requests_that_differ_in_more_than_their_ids_are_sent_separately(change: dict[str, object]) -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=8)
    await asyncio.gather(answer(coalescer, request("a")), answer(coalescer, request("b", **change)))
    assert engine.calls == [["a"], ["b"]]


@pytest.mark.parametrize("change", [{"seed": 1}, {"sampling": Sampling(temperature=0.0)}], ids=str)
async def test_seeded_and_greedy_requests_are_sent_separately(change: dict[str, object]) -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=8)
    await asyncio.gather(*(answer(coalescer, request(name, **change)) for name in "ab"))
    assert engine.calls == [["a"], ["b"]]


async def test_a_refused_group_is_sent_one_by_one() -> None:
    calls = []

    async def sample(group: Sequence[PendingRequest]) -> None:
        calls.append([asked.request.request_id for asked in group])
        if len(group) > 1:
            raise EngineRejected("n must be at most 1")
        if calls[-1] == ["b"]:
            raise EngineRejected("b is refused by itself too")
        group[0].add(tokens(len(calls)))
        group[0].end()

    coalescer = Coalescer(sample, max_size=8)
    first, second = await asyncio.gather(*(answer(coalescer, request(name)) for name in "ab"), return_exceptions=True)
    assert calls == [["a", "b"], ["a"], ["b"]]
    assert first == [[2]] and str(second) == "b is refused by itself too"


async def test_a_schema_is_refused_to_all_of_a_group_at_once() -> None:
    calls = []

    async def sample(group: Sequence[PendingRequest]) -> None:
        calls.append(len(group))
        raise SchemaRejected("no grammar")

    coalescer = Coalescer(sample, max_size=8)
    answers = await asyncio.gather(*(answer(coalescer, request(name)) for name in "ab"), return_exceptions=True)
    assert calls == [2] and [type(error) for error in answers] == [SchemaRejected] * 2


async def test_an_answer_is_read_to_its_end_when_all_callers_have_theirs() -> None:
    read = asyncio.Event()

    async def sample(group: Sequence[PendingRequest]) -> None:
        group[0].add(tokens(5))
        group[0].end()
        await asyncio.sleep(0.01)
        read.set()

    assert await answer(Coalescer(sample, max_size=8), request("a")) == [[5]]
    async with asyncio.timeout(30):
        await read.wait()


async def test_groups_are_no_larger_than_max_size() -> None:
    engine = Engine()
    coalescer = Coalescer(engine.sample, max_size=2)
    await asyncio.gather(*(answer(coalescer, request(name)) for name in "abcde"))
    assert engine.calls == [["a", "b"], ["c", "d"], ["e"]]


async def test_a_failure_reaches_the_callers_that_still_wait() -> None:
    coalescer = Coalescer(Engine(EngineRejected("too long")).sample, max_size=8)
    first, *others = await asyncio.gather(*(answer(coalescer, request(name)) for name in "abc"), return_exceptions=True)
    assert first == [[0], [0, 0]]
    assert [str(error) for error in others] == ["too long", "too long"]


async def test_an_answer_without_an_end_is_lost() -> None:
    async def sample(group: Sequence[PendingRequest]) -> None:
        group[0].add(tokens(5))

    given = []
    with pytest.raises(EngineLost, match="broke off"):
        async for part in Coalescer(sample, max_size=8).stream(request("a")):
            given.append(part.token_ids)
    assert given == [[5]]


async def test_the_engine_stops_when_all_callers_have_left_and_not_before() -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def sample(group: Sequence[PendingRequest]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    coalescer = Coalescer(sample, max_size=8)
    first, second = (asyncio.create_task(answer(coalescer, request(name))) for name in "ab")
    async with asyncio.timeout(30):
        await begun.wait()
        first.cancel()
        await asyncio.wait((first,))
        assert not stopped.is_set() and not second.done()
        second.cancel()
        await stopped.wait()


REQUEST = GenerateRequest(
    request_id="r", token_ids=[1], sampling=Sampling(), max_tokens=2, stop_token_ids=[9], min_version=Version(0, 1)
)
ANSWER: dict[str, Any] = {
    "token_ids": [5, 9],
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -1.0, "rank": 3}, {"logprob": -2.0}]},
    "weight_versions": [{"version": "0.1", "start": 0, "end": 1}, {"version": "0.2", "start": 1, "end": 2}],
}


def stream(*chunks: Any) -> bytes:
    """As server-sent events."""
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(handler: Callable[[str, Any], tuple[int, Any]]) -> AsyncIterator[VllmEngine]:
    """A client of a server that answers ``handler(path, body)``: a status, and bytes or what becomes JSON."""

    async def handle(request: web.Request) -> web.Response:
        raw = await request.read()
        status, value = handler(request.path, msgspec.json.decode(raw) if raw else None)
        body = value if isinstance(value, bytes) else msgspec.json.encode(value)
        return web.Response(status=status, body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        client = VllmEngine(str(server.make_url("")))
        try:
            yield client
        finally:
            await client.close()


async def test_tokens_logprobs_and_versions_are_taken_over() -> None:
    async with answering(lambda path, body: (200, stream({"choices": [ANSWER]}))) as client:
        got = await client.generate(REQUEST)
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([5, 9], [-1.0, -2.0], "stop")
    assert got.versions == [VersionRun(Version(0, 1), 0, 1), VersionRun(Version(0, 2), 1, 2)]


def npy(array: np.ndarray) -> str:
    """As vLLM writes experts."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


async def test_experts_are_those_of_prompt_and_answer_from_the_first_that_is_wanted() -> None:
    experts = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    request = msgspec.structs.replace(REQUEST, token_ids=[1, 2, 3], routed_from=2)
    bodies = []

    def answer(path: str, body: Any) -> tuple[int, bytes]:
        bodies.append(body)
        return 200, stream({"choices": [ANSWER | {"routed_experts": npy(experts)}]})

    async with answering(answer) as client:
        got = await client.generate(request)
    assert bodies[0]["sampling_params"]["routed_experts_prompt_start"] == 2
    assert got.routes is not None and got.routes.start == 2 and np.array_equal(got.routes.experts, experts)


@pytest.mark.parametrize(
    "experts",
    [
        npy(np.zeros((3, 3, 4), np.uint8)),  # of a token that was not fed
        npy(np.zeros((2, 3), np.uint8)),
        npy(np.zeros((2, 3, 4), np.float32)),
        npy(np.zeros((2, 3, 4), np.uint8))[:40],
        "no base64",
    ],
)
async def test_experts_that_cannot_be_replayed_are_refused(experts: str) -> None:
    request = msgspec.structs.replace(REQUEST, token_ids=[1])
    chunk = {"choices": [ANSWER | {"routed_experts": experts}]}
    async with answering(lambda path, body: (200, stream(chunk))) as client:
        with pytest.raises(EngineRejected, match="experts"):
            await client.generate(request)


def part(tokens: list[int], spans: list[Any] | None, reason: str | None = None) -> Any:
    """One chunk of a stream."""
    logprobs = {"content": [{"logprob": -float(token)} for token in tokens]}
    versions = spans and [{"version": v, "start": s, "end": e} for v, s, e in spans]
    choice = {"token_ids": tokens, "finish_reason": reason, "logprobs": logprobs, "weight_versions": versions}
    return {"choices": [choice]}


async def parts_of(client: VllmEngine) -> list[GenerateResult]:
    return [given async for given in client.stream(REQUEST)]


async def test_parts_are_yielded_as_soon_as_their_versions_are_known() -> None:
    whole = [("0.1", 0, 2), ("0.2", 2, 4)]
    told_early = part([1], [("0.1", 0, 1)]), part([2, 3], [("0.1", 0, 2), ("0.2", 2, 3)]), part([4], whole, "stop")
    async with answering(lambda path, body: (200, stream(*told_early))) as client:
        first, second, third = await parts_of(client)
    assert [p.finish_reason for p in (first, second, third)] == ["abort", "abort", "stop"]
    assert (second.token_ids, second.logprobs) == ([2, 3], [-2.0, -3.0])
    assert second.versions == [VersionRun(Version(0, 1), 0, 1), VersionRun(Version(0, 2), 1, 2)]
    told_late = part([1], None), part([2, 3], None), part([4], whole, "stop")
    async with answering(lambda path, body: (200, stream(*told_late))) as client:
        (only,) = await parts_of(client)
    assert only == join(join(first, second), third)


async def test_a_broken_stream_has_yielded_the_parts_before() -> None:
    cut = stream(part([1], [("0.1", 0, 1)])), stream(part([1], [("0.1", 0, 1)]), {"error": {"message": "engine died"}})
    for body, named in zip(cut, ("broke off", "engine died"), strict=True):
        given = []
        async with answering(lambda path, _, body=body: (200, body)) as client:
            with pytest.raises(EngineLost, match=named):
                async for one in client.stream(REQUEST):
                    given.append(one.token_ids)
        assert given == [[1]]


@pytest.mark.parametrize(("code", "kind"), [(400, EngineRejected), (412, TrainerReplaced), (500, EngineLost)])
async def test_a_stream_may_begin_with_a_refusal(code: int, kind: type[Exception]) -> None:
    body = stream({"error": {"message": "prompt too long", "type": "BadRequestError", "param": None, "code": code}})
    async with answering(lambda path, _: (200, body)) as client:
        with pytest.raises(kind, match=f"{code}.*prompt too long"):
            await client.generate(REQUEST)


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (500, "Internal server error", SchemaRejected),
        (400, "Grammar error: Unimplemented keys", SchemaRejected),
        (400, "structured_outputs.json: x", SchemaRejected),
        (400, "prompt too long", EngineRejected),
        (503, "x", EngineLost),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_which_failures_are_those_of_a_schema(
    code: int, message: str, kind: type[Exception], streamed: bool
) -> None:
    asked = msgspec.structs.replace(REQUEST, json_schema='{"type": "integer"}')
    error = {"error": {"message": message, "code": code}}
    answer = (200, stream(error)) if streamed else (code, error)
    async with answering(lambda path, _: answer) as client:
        with pytest.raises(kind) as refused:
            await client.generate(asked)
        assert refused.type is kind
        with pytest.raises(EngineRejected if code == 400 else EngineLost) as refused:
            await client.generate(REQUEST)
        assert not isinstance(refused.value, SchemaRejected)


async def test_an_answer_in_a_schema_that_has_begun_is_lost_with_its_engine() -> None:
    asked = msgspec.structs.replace(REQUEST, json_schema='{"type": "integer"}')
    begun = ANSWER | {"token_ids": [5], "finish_reason": None, "logprobs": {"content": [{"logprob": -1.0}]}}
    begun["weight_versions"] = [{"version": "0.1", "start": 0, "end": 1}]
    body = stream({"choices": [begun]}, {"error": {"message": "x", "code": 500}})
    async with answering(lambda path, _: (200, body)) as client:
        with pytest.raises(EngineLost):
            await client.generate(asked)


METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.75
vllm:kv_cache_usage_perc{engine="1"} 0.25
vllm:num_preemptions_total{engine="0"} 7.0
vllm:prompt_tokens_total{engine="0"} 90.0
vllm:generation_tokens_total{engine="0"} 40.0
vllm:generation_tokens_total{engine="1"} 2.0
vllm:prefix_cache_queries_total{engine="0"} 80.0
vllm:prefix_cache_hits_total{engine="0"} 60.0
"""


async def test_the_load_of_all_copies_is_summed_and_the_share_of_their_caches_is_averaged() -> None:
    async with answering(lambda path, body: (200, METRICS.encode())) as client:
        tokens = EngineTokens(prompt=90, sampled=42, looked_up=80, found=60)
        assert await client.load() == EngineLoad(running=5, waiting=1, cache_usage=0.5, preemptions=7, tokens=tokens)


@pytest.mark.parametrize("name", ROUTED_BY)
async def test_an_engine_without_a_metric_that_routes_requests_is_refused_by_its_name(name: str) -> None:
    renamed = METRICS.replace(f"{name}{{", "vllm:renamed{")
    async with answering(lambda path, body: (200, renamed.encode())) as client:
        with pytest.raises(EngineRejected, match=name):
            await client.load()


@pytest.mark.parametrize("name", [PREEMPTIONS, *TOKENS])
async def test_what_an_engine_does_not_count_is_not_read_as_none(name: str) -> None:
    renamed = METRICS.replace(f"{name}{{", "vllm:renamed{")
    async with answering(lambda path, body: (200, renamed.encode())) as client:
        load = await client.load()
    assert (load.preemptions is None) == (name == PREEMPTIONS) and (load.tokens is None) == (name != PREEMPTIONS)


async def test_nothing_is_left_to_the_servers_defaults() -> None:
    sent: list[Any] = []

    def keep(path: str, body: Any) -> tuple[int, Any]:
        sent.append(body["sampling_params"])
        return 200, stream({"choices": [ANSWER]})

    async with answering(keep) as client:
        await client.generate(REQUEST)
        await client.generate(msgspec.structs.replace(REQUEST, json_schema='{"type": "object"}'))
    plain = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "stop_token_ids": [9], "top_p": 1.0, "top_k": 0} | {
        "min_p": 0.0,
        "seed": None,
        "n": 1,
        "ignore_eos": True,
        "stream_interval": STREAM_INTERVAL,
        "structured_outputs": None,
        "routed_experts_prompt_start": 0,
    }
    assert sent == [plain, plain | {"structured_outputs": {"json": '{"type": "object"}'}}]


async def test_samples_of_one_prompt_share_a_request_and_are_told_apart_by_their_index() -> None:
    asked: list[int] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        asked.append(body["sampling_params"]["n"])
        first, second = part([7], [("0.1", 0, 1)], "length"), part([8], [("0.1", 0, 1)], "stop")
        return 200, stream({"choices": [second["choices"][0] | {"index": 1}]}, first)

    async with answering(serve) as alone:
        client = VllmEngine(alone.url, max_coalesced=2)
        answers = await asyncio.gather(client.generate(REQUEST), client.generate(REQUEST))
        await client.close()
    assert asked == [2] and [got.token_ids for got in answers] == [[7], [8]]


async def test_choices_that_were_not_requested_are_refused() -> None:
    body = stream({"choices": [ANSWER | {"index": 1}]})
    async with answering(lambda path, _: (200, body)) as client:
        with pytest.raises(EngineRejected, match="choices 1"):
            await client.generate(REQUEST)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"weight_versions": [{"version": "0.0", "start": 0, "end": 2}]}, EngineLost, r"0\.0.* 0\.1"),
        (
            {"weight_versions": [{"version": "0.2", "start": 0, "end": 1}, {"version": "0.0", "start": 1, "end": 2}]},
            *(EngineLost, r"0\.0.* 0\.1"),
        ),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, EngineLost, "'default'"),
        ({"weight_versions": None}, EngineRejected, "weight version"),
        ({"weight_versions": [{"version": "0.1", "start": 0, "end": 1}]}, EngineRejected, "weight version"),
        ({"logprobs": None}, EngineRejected, "log-probability"),
        ({"finish_reason": "error"}, EngineLost, "finish_reason"),
    ],
)
async def test_answers_that_cannot_be_trained_on_are_refused(change: Any, error: type[Exception], named: str) -> None:
    async with answering(lambda path, body: (200, stream({"choices": [ANSWER | change]}))) as client:
        with pytest.raises(error, match=f"{client.url}.*{named}"):
            await client.generate(REQUEST)


@pytest.mark.parametrize(
    "answer",
    [b"{", b'{"choices": [{"finish_reason": "\xff"}]}', b'{"x": ' + b"[" * 100_000],
    ids=lambda raw: repr(raw[:20]),
)
async def test_answers_that_cannot_be_decoded_lose_the_engine(answer: bytes) -> None:
    async with answering(lambda path, body: (200, b"data: " + answer + b"\n\n")) as client:
        with pytest.raises(EngineLost, match=client.url):
            await client.generate(REQUEST)


async def test_an_update_left_by_an_earlier_trainer_is_made_to_fail_and_started_again() -> None:
    calls: list[str] = []

    def serve(path: str, body: Any) -> tuple[int, Any]:
        calls.append(path)
        if path == "/update_weights" or len(calls) == 1:
            return 500, {"error": {"message": "a weight update is already active"}}
        return 200, {}

    async with answering(serve) as client:
        await client.start_update()
    assert calls == ["/start_weight_update", "/update_weights", "/start_weight_update"]


async def test_a_connection_closed_by_the_server_costs_no_request() -> None:
    answered = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers once per connection, promises to keep it open, and closes it when it is used again."""
        nonlocal answered
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split()[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
        await reader.readexactly(length)
        body = stream({"choices": [ANSWER]})
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


# What the server of a vLLM before 0.32 gets from us, as far as it runs without vLLM.


class Workers:
    """vLLM's client of its engine, with a worker on each of two copies."""

    async def collective_rpc(self, method: str) -> list[dict[str, str]]:
        assert method == "weight_checksums"
        return [{"worker0:w": "a"}, {"worker1:w": "b"}]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A server whose route refuses the version 0.9, as vLLM does an update that was not started."""
    monkeypatch.setattr(versions, "HELD", [(0.0, "default")])

    async def finish(request: Request) -> JSONResponse:
        wanted = (await request.json())["weight_version"]
        return JSONResponse({}, 500 if wanted == "0.9" else 200)

    app = Starlette(routes=[Route("/finish_weight_update", finish, methods=["POST"])])
    app.add_middleware(WeightVersions)
    app.state.engine_client = Workers()
    with TestClient(app) as started:
        yield started


def test_a_version_counts_once_its_update_has_finished(client: TestClient) -> None:
    def version() -> str:
        return str(client.get("/weight_info").json()["weight_version"])

    assert version() == "default"
    for body, status, held in (
        ({"weight_version": "0.1"}, 200, "0.1"),
        ({"weight_version": "0.9"}, 500, "0.1"),
        ({"version": "0.2"}, 400, "0.1"),
        ({"weight_version": "0.2"}, 200, "0.2"),
    ):
        assert client.post("/finish_weight_update", json=body).status_code == status
        assert version() == held
    times = [time for time, _ in versions.HELD]
    assert len(times) == 3 and times == sorted(times)


def test_checksums_are_those_of_all_workers(client: TestClient) -> None:
    found = client.post("/weight_checker", json={"action": "checksum"}).json()
    assert found == {"checksums": {"worker0:w": "a", "worker1:w": "b"}}


def test_a_part_that_waits_takes_the_tokens_versions_and_end_of_the_next() -> None:
    first, second = {"version": "0.0", "start": 0, "end": 2}, {"version": "0.1", "start": 2, "end": 3}
    part = Tokens([5, 6], [first], last=False)
    part.extend(Tokens([7], [first, second], last=False))
    assert part == [5, 6, 7] and part.versions == [first, second]
    empty = Tokens([], [first], last=False)
    assert not empty, "vLLM would send a part without tokens"
    empty.extend(Tokens([], [first], last=True))
    assert empty and list(empty) == [], "the finish reason would be lost"


def test_the_outputs_of_a_part_count_as_all_samples() -> None:
    outputs = Samples(["third"], 4)
    assert len(outputs) == 4 and list(outputs) == ["third"]


# What our plugin makes of the queues from which vLLM reads the answers of an engine's workers.


class Queue:
    """Answers that have come; ``waits`` are the times for which somebody has waited for one that does not come."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.waits = list(answers), list[float | None]()

    def dequeue(self, timeout: float | None = None) -> str:
        if self.answers:
            return self.answers.pop(0)
        self.waits.append(timeout)
        raise TimeoutError


class Executor:
    """As much of vLLM's executor as the plugin touches."""

    def __init__(self, *queues: Queue) -> None:
        self.is_failed = False
        self.response_mqs: Any = queues
        self.response_mqs = QueuesReadToTheEnd(self)

    def call(self, timeout: float | None) -> list[str]:
        """Reads answers as `MultiprocExecutor.collective_rpc` does."""
        answers = []
        for queue in self.response_mqs:
            answer = queue.dequeue(timeout=timeout)
            if answer == "failed":
                raise RuntimeError(answer)
            answers.append(answer)
        return answers


def test_after_a_failure_the_answers_of_the_other_workers_are_read() -> None:
    executor = Executor(Queue("failed", "again"), Queue("loaded", "again"))
    with pytest.raises(RuntimeError):
        executor.call(None)
    assert not executor.is_failed
    assert executor.call(None) == ["again", "again"]


def test_a_worker_that_hangs_after_another_failed_fails_the_engine_after_a_while() -> None:
    executor = Executor(Queue("failed"), hung := Queue(), rest := Queue())
    with pytest.raises(RuntimeError):
        executor.call(None)
    assert executor.is_failed
    assert len(hung.waits) == 1 and hung.waits[0] is not None
    assert not rest.waits


def test_if_all_workers_hang_the_call_times_out_and_waits_for_no_other() -> None:
    executor = Executor(first := Queue(), second := Queue())
    with pytest.raises(TimeoutError):
        executor.call(3.0)
    assert executor.is_failed
    assert (first.waits, second.waits) == ([3.0], [])


# How vLLM is started: that it sends its spans where the run's go, and only then.


ALL, TRACES = tracing.VARIABLES
DEFAULTS = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, None),
        ({ALL: "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({ALL: "http://c:4318", TRACES: "http://d/traces"}, "http://d/traces"),
    ],
)
def test_vllm_sends_its_spans_where_those_of_the_run_go(
    variables: dict[str, str], endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: "there")
    for name in (ALL, TRACES, *DEFAULTS):
        monkeypatch.setenv(name, variables.get(name, ""))
    assert started._tracing() == ([] if endpoint is None else ["--otlp-traces-endpoint", endpoint])
    for name, value in DEFAULTS.items():
        assert started.os.environ[name] == ("" if endpoint is None else value)


def test_a_users_sampler_of_vllms_spans_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: "there")
    monkeypatch.setenv(ALL, "http://c:4318")
    for name in DEFAULTS:
        monkeypatch.setenv(name, "mine")
    assert started._tracing()
    assert [started.os.environ[name] for name in DEFAULTS] == ["mine", "mine"]


def test_a_vllm_without_the_package_starts_without_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    monkeypatch.setenv(ALL, "http://c:4318")
    assert started._tracing() == []
