"""What `rl-async engine add` says of a server that no run can use."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rl_async.errors import UserError
from rl_async.launcher.cli.engine_membership import add_engine
from rl_async.process.http_auth import make_tokens, run_token
from rl_async.rollout_server.vllm.client import ROUTED_BY


async def refusal(run: Path, token: str, metrics: dict[str, float]) -> str:
    """The error on a server that takes ``token``, or no token if it is empty, and has these metrics."""

    async def handle(request: web.Request) -> web.Response:
        if token and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {token}":
            return web.Response(status=401, text="the token is missing or wrong")
        return web.Response(text="".join(f"{name} {value}\n" for name, value in metrics.items()))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        with pytest.raises(UserError) as caught:
            await asyncio.to_thread(add_engine, run, str(server.make_url("")).rstrip("/"), "vllm", 1.0)
    return str(caught.value)


async def test_a_missing_metric_is_named_and_the_token_is_not_blamed(tmp_path: Path) -> None:
    make_tokens(tmp_path / "keys")
    told = await refusal(tmp_path, run_token(tmp_path, "engines"), dict.fromkeys(ROUTED_BY[1:], 0.0))
    assert ROUTED_BY[0] in told and ROUTED_BY[1] not in told and "token" not in told


async def test_a_wrong_token_is_blamed(tmp_path: Path) -> None:
    make_tokens(tmp_path / "keys")
    told = await refusal(tmp_path, "of another run", dict.fromkeys(ROUTED_BY, 0.0))
    assert "RL_ASYNC_TOKEN_FILE" in told and "kind" not in told


async def test_an_engine_that_takes_requests_without_a_token_is_not_registered(tmp_path: Path) -> None:
    make_tokens(tmp_path / "keys")
    told = await refusal(tmp_path, "", dict.fromkeys(ROUTED_BY, 0.0))
    assert "RL_ASYNC_TOKEN_FILE" in told
