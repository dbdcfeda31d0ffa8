"""An answer whose engine is lost is continued exactly by another engine; both are real processes."""

import asyncio
import logging
import os
import re
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from rl_async.configs.engines import STREAM_INTERVAL
from rl_async.errors import EngineError, EngineLost, UserError
from rl_async.launcher.cli.live_actions import add_engine
from rl_async.messages import EngineList, EngineRecord, Sampling, Version, VersionRun
from rl_async.rollout_server import pool as pool_module
from rl_async.rollout_server.api import EngineLoad, GenerateRequest, GenerateResult
from rl_async.rollout_server.http import EngineHttp
from rl_async.rollout_server.pool import EnginePool
from rl_async.rollout_server.vllm.client import VllmEngine
from tests.contracts.engines.engine_peers import (
    ATTEMPTS,
    Peer,
    differences,
    errors,
    running,
    sampling,
    scaled,
    send,
    tensors,
)
from tests.support.rounding import PlainPass

V0, V1 = Version(0, 0), Version(0, 1)
BATCH = 16
REQUESTS = 40  # more than both engines decode at once
CAUGHT = 8  # answers of the lost engine that are in their middle when it is struck
WAIT_S = 120.0
STOP = 7
KEPT = re.compile(r"request (\S+): victim .*after (\d+) tokens")  # the pool's log line

PAIRS = [  # who is lost, and who goes on
    pytest.param(("embedded", "embedded"), id="embedded-embedded"),
    pytest.param(("embedded", "vllm"), marks=pytest.mark.nightly, id="embedded-vllm"),
]
VLLM_IS_LOST = pytest.param(("vllm", "embedded"), marks=pytest.mark.slow, id="vllm-embedded")  # a minute to replace


@pytest.fixture(scope="module")
def kinds(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kinds of the engine that is lost and of the one that survives."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module")
def survivor(kinds: tuple[str, str], model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """The engine that survives all tests."""
    with running(kinds[1], model_folder, tmp_path_factory.mktemp("survivor"), batch=BATCH, eager=True) as peer:
        yield peer


@pytest.fixture
def victim(kinds: tuple[str, str], model_folder: Path, tmp_path: Path) -> Iterator[Peer]:
    """The engine that a test kills or freezes."""
    # A forked process may hold what ends with its parent, so vLLM, which a test kills, starts as in a run.
    forked = kinds[0] == "embedded"
    with running(kinds[0], model_folder, tmp_path, batch=BATCH, eager=True, forked=forked) as peer:
        yield peer


class Watched:
    """A client that counts the tokens of each unfinished answer."""

    def __init__(self, client: VllmEngine) -> None:
        self._client = client
        self.begun: dict[str, int] = {}
        self.more = asyncio.Event()

    async def stream(self, request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]:
        async for part in self._client.stream(request, session=session):
            if part.finish_reason == "abort":  # more is to come
                self.begun[request.request_id] = self.begun.get(request.request_id, 0) + len(part.token_ids)
            else:
                self.begun.pop(request.request_id, None)
            self.more.set()
            yield part

    async def in_the_middle(self, count: int, tasks: Sequence[asyncio.Task[GenerateResult]]) -> bool:
        """Wait until that many answers have a part and not their end; return False if all ``tasks`` ended before."""
        while sum(tokens >= STREAM_INTERVAL for tokens in self.begun.values()) < count:
            if all(task.done() for task in tasks):
                return False
            self.more.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.more.wait(), 0.1)
        return True

    async def load(self) -> EngineLoad:
        return await self._client.load()

    async def is_sleeping(self) -> bool:
        return await self._client.is_sleeping()

    async def close(self) -> None:
        await self._client.close()


class Registry:
    """A registry that never changes, as if the queue had not noticed the loss yet."""

    def __init__(self, engines: EngineList) -> None:
        self._engines = engines

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        if after == self._engines.revision:
            await asyncio.sleep(wait_s)
        return self._engines


@asynccontextmanager
async def pool_of(engines: dict[str, tuple[Peer, Version]]) -> AsyncIterator[tuple[EnginePool, dict[str, Watched]]]:
    """A pool of these engines as a worker has it, and its clients."""
    clients: dict[str, Watched] = {}

    def connect(record: EngineRecord) -> Watched:
        return clients.setdefault(record.engine_id, Watched(engines[record.engine_id][0].client()))

    records = [EngineRecord(engine_id=n, url=p.url, kind=p.kind, version=v) for n, (p, v) in engines.items()]
    registry = EngineList(revision=1, engines=records, published=V0)
    pool = EnginePool(connect, WAIT_S, BATCH)
    pool.update(registry)
    watching = asyncio.create_task(pool.watch(Registry(registry)))
    try:
        yield pool, clients
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await pool.close()


@contextmanager
def struck(peer: Peer) -> Iterator[None]:
    """Let a frozen engine go on at the end, so that it can be ended; a killed one stays dead."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(peer.group, signal.SIGCONT)


def requests() -> list[GenerateRequest]:
    """Of three temperatures; every fourth may stop early."""
    return [
        GenerateRequest(
            request_id=f"r{n}",
            token_ids=[(7 * i + n) % 60 for i in range(4 + n % 9)],
            sampling=Sampling(temperature=(0.7, 1.0, 1.4)[n % 3]),
            max_tokens=400 + 5 * (n % 20),
            stop_token_ids=[STOP] if n % 4 == 0 else [],
            min_version=V0,
        )
        for n in range(REQUESTS)
    ]


async def answers(
    number: signal.Signals, asked: list[GenerateRequest], victim: Peer, survivor: Peer, *, version: Version = V0
) -> list[GenerateResult]:
    """Return the pool's answers when one of two engines gets a signal midway; the other's weights are ``version``."""
    with struck(victim):
        async with pool_of({"victim": (victim, V0), "survivor": (survivor, version)}) as (pool, clients):
            for _ in range(ATTEMPTS):  # this process may be too slow to see answers in their middle
                tasks = [asyncio.create_task(pool.generate(request, session=request.request_id)) for request in asked]
                async with asyncio.timeout(WAIT_S):
                    if await clients["victim"].in_the_middle(CAUGHT, tasks):
                        os.killpg(victim.group, number)
                        return await asyncio.gather(*tasks)
    raise AssertionError(f"{ATTEMPTS} times all answers were over before {CAUGHT} were seen in their middle")


def kept(log: pytest.LogCaptureFixture) -> dict[str, int]:
    """Return how many tokens of the lost engine the pool logged as kept, by request, if there are any."""
    lines = [KEPT.match(record.getMessage()) for record in log.records if record.name == "rl_async.pool"]
    return {line[1]: int(line[2]) for line in lines if line and int(line[2])}


def assert_as_asked(request: GenerateRequest, got: GenerateResult) -> None:
    """Token count, stop rule, one log-probability per token, and versions of exactly the sampled tokens."""
    count = len(got.token_ids)
    stopped = got.token_ids[-1] in request.stop_token_ids
    assert got.finish_reason == ("stop" if stopped else "length")
    assert count <= request.max_tokens and (stopped or count == request.max_tokens)
    assert not set(got.token_ids[:-1]) & set(request.stop_token_ids)
    assert len(got.logprobs) == count
    assert [run.start for run in got.versions] + [count] == [0] + [run.end for run in got.versions]
    assert all(run.start < run.end for run in got.versions)


async def load(peer: Peer, folder: Path, scale: float, version: Version) -> None:
    """Send it the folder's weights, scaled, as ``version``."""
    client = peer.client()
    try:
        await send(client, tensors(folder, scale), version)
    finally:
        await client.close()


# The next test kills one for `make test`, too.
@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("kinds", PAIRS, indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_answers_of_a_lost_engine_are_continued_exactly(
    number: signal.Signals,
    victim: Peer,
    survivor: Peer,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.5)  # a frozen engine is found by its silence alone
    monkeypatch.setattr(pool_module, "PROBE_S", 2.0)
    caplog.set_level(logging.WARNING, "rl_async.pool")
    for peer in (victim, survivor):
        await load(peer, model_folder, 1.0, V0)
    asked = requests()
    answered = await answers(number, asked, victim, survivor)
    model, continued = PlainPass(scaled(model_folder)), kept(caplog)
    assert len(continued) >= CAUGHT // 2, caplog.text
    for request, got in zip(asked, answered, strict=True):
        assert_as_asked(request, got)
        assert got.versions == [VersionRun(V0, 0, len(got.token_ids))]
        assert len(got.token_ids) > continued.get(request.request_id, 0)
        assert errors(model, request, got).max() <= 1


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kinds", [*PAIRS, VLLM_IS_LOST], indirect=True)
async def test_tokens_after_the_boundary_are_from_the_other_engines_weights(
    victim: Peer, survivor: Peer, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rl_async.pool")
    await load(victim, model_folder, 1.0, V0)
    await load(survivor, model_folder, 1.5, V1)
    asked = requests()
    answered = await answers(signal.SIGKILL, asked, victim, survivor, version=V1)
    old, new, continued = scaled(model_folder), scaled(model_folder, 1.5), kept(caplog)
    assert len(continued) >= CAUGHT // 2, caplog.text
    apart = 0.0  # of the two weights, in log-probability; few tokens of one answer may hardly show it
    for request, got in zip(asked, answered, strict=True):
        assert_as_asked(request, got)
        boundary = next((run.end for run in got.versions if run.version == V0), 0)
        if request.request_id in continued:
            assert boundary == continued[request.request_id]
            assert [run.version for run in got.versions] == [V0, V1]
            apart = max(apart, differences(old, request, got)[boundary:].max().item())
        assert (errors(old, request, got)[:boundary] <= 1).all()
        assert (errors(new, request, got)[boundary:] <= 1).all()
    assert apart > 1e-2


# Engines behind a proxy: one keeps the whole contract, and a router over several is refused by name.


REQUEST = GenerateRequest(
    request_id="r", token_ids=[5, 6, 7], sampling=Sampling(), max_tokens=400, stop_token_ids=[], seed=1
)
# Of the connection to the proxy, not of the request.
OWN = {"host", "connection", "transfer-encoding", "content-length"}


@pytest.fixture(scope="module")
def peer(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with running("embedded", model_folder, tmp_path_factory.mktemp("engine")) as peer:
        yield peer


@asynccontextmanager
async def proxy(*urls: str) -> AsyncIterator[str]:
    """A plain HTTP proxy, which sends each request to the next of ``urls`` and passes answers on as they arrive."""
    targets = cycle(urls)

    async def forward(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OWN}
        body, target = await request.read(), next(targets)
        async with session.request(request.method, f"{target}{request.path_qs}", data=body, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in OWN}
            passed = web.StreamResponse(status=answer.status, headers=kept)
            await passed.prepare(request)
            async for data in answer.content.iter_any():
                await passed.write(data)
            await passed.write_eof()
            return passed

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", forward)
    async with ClientSession() as session, TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_an_engine_behind_a_proxy_updates_and_names_the_version_of_every_token(
    peer: Peer, model_folder: Path
) -> None:
    async with proxy(peer.url) as url:
        client = replace(peer, url=url).client()
        try:
            await send(client, tensors(model_folder), Version(0, 0))
            async with sampling(client, REQUEST) as (task,):
                await send(client, tensors(model_folder, 1.5), Version(0, 1))
                got = await task
            assert [run.version for run in got.versions] == [Version(0, 0), Version(0, 1)]
            assert await client.version() == Version(0, 1)
            cut = got.versions[0].end
            sampled = msgspec.structs.replace(got, token_ids=got.token_ids[cut:], logprobs=got.logprobs[cut:])
            asked = msgspec.structs.replace(REQUEST, token_ids=REQUEST.token_ids + got.token_ids[:cut])
            assert errors(scaled(model_folder, 1.5), asked, sampled).max() <= 1
            with pytest.raises(EngineLost):
                await client.generate(msgspec.structs.replace(REQUEST, min_version=Version(0, 2)))
            stranger = EngineHttp(url, 5.0)
            assert await stranger.needs_token()
            await stranger.close()
        finally:
            await client.close()


@pytest.fixture(scope="module")
def other(peer: Peer, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A second engine of the same run."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(peer.log.parent / "keys", folder / "keys")
    with running("embedded", model_folder, folder) as other:
        assert other.token == peer.token
        yield other


async def test_a_router_over_several_engines_is_refused_and_takes_no_weights(
    peer: Peer, other: Peer, model_folder: Path
) -> None:
    async with proxy(peer.url, other.url) as url:
        with pytest.raises(UserError, match=r"2 engines.*own address"):
            await asyncio.to_thread(add_engine, peer.log.parent, url, "embedded", 1.0)
        client = replace(peer, url=url).client()
        with pytest.raises(EngineError):
            await send(client, tensors(model_folder, 2.0), Version(0, 9))
        await client.close()
