"""What SGLang's start script puts around the application that SGLang serves."""

from typing import Any

import pytest
import uvicorn

from rl_async.process.http_auth import RequireToken
from rl_async.rollout_server.fence import LineageFence
from rl_async.rollout_server.sglang import __main__ as start


async def application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing is asked")


def test_routes_ask_for_the_token_first_and_then_for_the_lineage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "token").write_text("t" * 43)
    monkeypatch.setenv("RL_ASYNC_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)  # restored afterwards
    start._guard_routes()
    guarded = uvicorn.Config(application).app
    assert isinstance(guarded, RequireToken)
    assert isinstance(guarded._app, LineageFence) and guarded._app._app is application
