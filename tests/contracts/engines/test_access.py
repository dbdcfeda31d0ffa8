"""Who may use an engine's routes: those who have the run's token, no web page, and no trainer that was replaced."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from rl_async.errors import TrainerReplaced
from rl_async.messages import Version
from rl_async.process.http_auth import bearer
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, running

ROUTES = (
    *("POST /inference/v1/generate", "POST /abort_requests", "POST /pause", "POST /resume", "GET /is_paused"),
    *("POST /init_weight_transfer_engine", "POST /start_weight_update", "POST /update_weights"),
    *(
        "POST /finish_weight_update",
        "GET /weight_info",
        "GET /get_world_size",
        "POST /weight_checker",
        "POST /sleep",
        "POST /wake_up",
    ),
    *("GET /load", "GET /metrics", "GET /no_such_route"),
)
OF_VLLM = (
    *("GET /v1/models", "POST /v1/completions", "POST /tokenize", "GET /version", "GET /docs", "GET /openapi.json"),
    *("POST /collective_rpc", "GET /server_info", "POST /reset_prefix_cache", "POST /abort_requests", "GET /ping"),
)


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=pytest.mark.slow)])
def peer(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    """A running engine of each kind."""
    # Not forked: a test looks at its command line and its environment.
    with running(request.param, model_folder, tmp_path_factory.mktemp("run"), eager=True, forked=False) as started:
        yield started


def routes(peer: Peer) -> tuple[str, ...]:
    return ROUTES + OF_VLLM if peer.kind == "vllm" else ROUTES


async def status(peer: Peer, route: str, **headers: str) -> int:
    method, path = route.split()
    async with (
        aiohttp.ClientSession(peer.url) as session,
        session.request(method, path, data="{}", headers=headers) as response,
    ):
        await response.read()
        return response.status


async def test_a_web_page_cannot_pause_an_engine(peer: Peer) -> None:
    simple = {"Origin": "https://example.com", "Content-Type": "text/plain"}  # a browser asks nobody before this
    assert await status(peer, "POST /pause", **simple) == 403
    assert await status(peer, "POST /pause", Host="rebound.example.com") == 403


async def test_without_the_token_every_route_is_refused(peer: Peer) -> None:
    for route in routes(peer):
        assert (route, await status(peer, route)) == (route, 401)
        assert (route, await status(peer, route, Authorization="Bearer " + "0" * 43)) == (route, 401)
    assert await status(peer, "GET /health") == 200


async def test_a_web_socket_needs_the_token_too(peer: Peer) -> None:
    async with aiohttp.ClientSession(peer.url) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect("/v1/realtime")
    assert refused.value.status in (401, 403)  # 401 where uvicorn does not know web sockets


async def test_the_token_opens_routes_and_stays_secret(peer: Peer, connect: Connect) -> None:
    assert await status(peer, "GET /weight_info", **bearer(peer.token)) == 200
    assert await status(peer, "GET /load", **{"x-api-key": peer.token}) == 200
    assert await status(peer, "POST /pause", **bearer(peer.token), Origin="null") == 403
    client = connect()
    await client.pause("keep")
    await client.resume()
    leader = psutil.Process(peer.group)
    for process in (leader, *leader.children(recursive=True)):
        # A child may end meanwhile.
        with suppress(psutil.NoSuchProcess):
            assert peer.token not in " ".join([*process.cmdline(), *process.environ().values()])
    assert leader.is_running()
    assert peer.token not in peer.log.read_text()


async def test_a_trainer_that_another_has_replaced_cannot_touch_the_engine(connect: Connect) -> None:
    old, new = (connect(lineage=lineage) for lineage in (0, 1))
    await old.pause()
    await old.start_update()  # and here it is frozen
    served = await new.version()
    update = UpdateInfo(names=[], dtype_names=[], shapes=[], checksum="")
    calls = [
        *(old.pause, old.resume, old.start_update, old.version, old.is_sleeping),
        lambda: old.init_transfer(InitInfo(backend="ipc")),
        lambda: old.update(update),
        lambda: old.finish_update(Version(0, 7)),
        lambda: old.sleep(2),
        lambda: old.wake(["weights"]),
    ]
    for call in calls:
        with pytest.raises(TrainerReplaced):
            await call()
    assert await new.version() == served
