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
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from rl_async.accelerators import ACCELERATORS, accelerator_here
from rl_async.configs.engines import SGLANG
from rl_async.files import UNDECODABLE
from rl_async.process.http_auth import App, Receive, RequireToken, Scope, Send, check_token, with_body
from rl_async.process.role import join_supervisor
from rl_async.rollout_server.api import LineageFence

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
    model, method, adapters = _settings(sys.argv)
    _check_speculation(method)
    _guard_routes(Path(model) if adapters else None)
    os.environ.update(VARIABLES)
    for name in UNWANTED:
        os.environ.pop(name, None)
    sys.argv = ["sglang", *SGLANG.fixed_arguments, *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _settings(words: Sequence[str]) -> tuple[str, str | None, bool]:
    """Return the model, the method of speculation, and whether adapters are loaded, from SGLang's command line."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", default="")
    parser.add_argument(SPECULATION)
    parser.add_argument("--enable-lora", action="store_true")
    found = parser.parse_known_args(words)[0]
    return found.model_path, found.speculative_algorithm, found.enable_lora


def _check_speculation(method: str | None) -> None:
    """Exit if SGLang would sample from another distribution than it reports."""
    if method is None:
        return
    if method.upper() not in EXACT_SPECULATION:
        sys.exit(f"{SPECULATION} {method} is not among those read here: {', '.join(EXACT_SPECULATION)}")
    # On other makes than the first the likeliest tokens are taken instead of sampled ones (``_verify_uses_greedy``).
    if (here := accelerator_here()) != ACCELERATORS[0]:
        sys.exit(f"{SPECULATION}: on {here.make} SGLang takes the likeliest tokens instead of sampling; leave it out")


def _guard_routes(adapted: Path | None) -> None:
    """Put our middleware around every application that uvicorn serves in this process.

    These are token, fence, sleep, and adapters of the model ``adapted``, if given.

    SGLang has no flag for middleware, and its own --api-key would show in its command line and its log.
    """
    import uvicorn

    class Config(uvicorn.Config):
        def __init__(self, app: Any, *arguments: Any, **named: Any) -> None:
            if adapted is not None:
                from rl_async.rollout_server.sglang.adapters import PublishedAdapters

                app = PublishedAdapters(app, adapted)
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

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._asleep = self._asleep | {*tags} if sleep else self._asleep - {*tags}
            await send(message)

        await self._app(*with_body(scope, receive, msgspec.json.encode(_Tags(tags))), note)


if __name__ == "__main__":
    main()
