"""Starts an SGLang server for training: ``PYTHON -m rl_async.rollout_server.sglang [flags of sglang serve]``.

PYTHON needs SGLang, and rl-async beside it. The variable RL_ASYNC_TOKEN_FILE names the file with the token that every
request must carry. The server ends with the launcher that started it.
"""

import os
import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from rl_async.configs.engines import SGLANG
from rl_async.files import UNDECODABLE
from rl_async.process.http_auth import App, Receive, RequireToken, Scope, Send, check_token
from rl_async.process.role import join_supervisor
from rl_async.rollout_server.fence import LineageFence

VARIABLES = {
    # Otherwise /health samples, which a paused engine cannot.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Models are local folders.
    "HF_HUB_OFFLINE": "1",
}
UNWANTED = (
    # It would report log-probabilities before the temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    # It would start another server, whose routes have not been tested.
    "SGLANG_RUST_SERVER",
)
# Methods of speculation whose tokens follow the policy and whose log-probabilities are the policy's, by the source of
# SGLang 0.5.23 (speculative/eagle_utils.py, layers/logprob_processor.py).
SPECULATION = "--speculative-algorithm"
EXACT_SPECULATION = ("NGRAM", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


def main() -> None:
    """Check that SGLang is installed and run its server in this process."""
    join_supervisor()
    if find_spec("sglang") is None:
        sys.exit(f"{sys.executable} has no SGLang; install rl-async[sglang] there")
    check_token()
    _check_speculation(sys.argv)
    _guard_routes()
    os.environ.update(VARIABLES)
    for name in UNWANTED:
        os.environ.pop(name, None)
    sys.argv = ["sglang", *SGLANG.fixed_arguments, *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _check_speculation(words: Sequence[str]) -> None:
    """Exit if the command line asks for speculation that samples from another distribution than it reports."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(SPECULATION)
    method = parser.parse_known_args(words)[0].speculative_algorithm
    if method is None:
        return
    if method.upper() not in EXACT_SPECULATION:
        sys.exit(f"{SPECULATION} {method} is not among those read here: {', '.join(EXACT_SPECULATION)}")
    import torch

    if torch.version.cuda is None:
        sys.exit(f"{SPECULATION}: without CUDA SGLang takes the likeliest tokens instead of sampling; leave it out")


def _guard_routes() -> None:
    """Put our middleware (token, fence, sleep) around every application that uvicorn serves in this process.

    SGLang has no flag for middleware, and its own --api-key would show in its command line and its log.
    """
    import uvicorn

    class Config(uvicorn.Config):
        def __init__(self, app: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(RequireToken(LineageFence(SleepReport(app))), *arguments, **named)

    uvicorn.Config = Config  # type: ignore[misc]


class _Tags(msgspec.Struct):
    """Body of the routes that free and allocate memory, a list of what it holds."""

    tags: list[str]


class SleepReport:
    """ASGI middleware that answers ``GET /is_sleeping``, which SGLang lacks, with ``{"is_sleeping": bool}``.

    SGLang's scheduler exits if it is to free memory that is free, or to allocate what is allocated, and an empty list
    stands for everything. So only tags that change anything are passed on.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._asleep: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass the request on. Memory counts as freed or allocated once SGLang has answered 200."""
        match (scope.get("method"), scope.get("path")):
            case ("GET", "/is_sleeping"):
                await JSONResponse({"is_sleeping": bool(self._asleep)})(scope, receive, send)
            case ("POST", "/release_memory_occupation"):
                await self._change(scope, receive, send, sleep=True)
            case ("POST", "/resume_memory_occupation"):
                await self._change(scope, receive, send, sleep=False)
            case _:
                await self._app(scope, receive, send)

    async def _change(self, scope: Scope, receive: Receive, send: Send, *, sleep: bool) -> None:
        body = await Request(scope, receive).body()
        try:
            named = msgspec.json.decode(body, type=_Tags).tags
        except UNDECODABLE as error:
            return await JSONResponse({"error": str(error)}, 400)(scope, receive, send)
        tags = [tag for tag in named if (tag in self._asleep) != sleep]
        if not tags:
            return await JSONResponse(None)(scope, receive, send)
        body = msgspec.json.encode(_Tags(tags))
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]

        async def only_these() -> Any:
            return {"type": "http.request", "body": body}

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._asleep = self._asleep | {*tags} if sleep else self._asleep - {*tags}
            await send(message)

        length = (b"content-length", str(len(body)).encode())
        await self._app(scope | {"headers": [*headers, length]}, only_these, note)


if __name__ == "__main__":
    main()
