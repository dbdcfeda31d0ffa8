"""What SGLang's start script puts around the application that SGLang serves."""

from contextlib import nullcontext
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rl_async.accelerators import ACCELERATORS
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
