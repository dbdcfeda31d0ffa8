"""Engines behind a proxy: one keeps the whole contract, and a router over several is refused by name."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from rl_async.errors import EngineError, EngineLost, UserError
from rl_async.launcher.cli.live_actions import add_engine
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.http import EngineHttp
from tests.contracts.engines.engine_peers import Peer, errors, running, sampling, scaled, send, tensors

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
