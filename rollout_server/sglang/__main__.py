"""Starts an SGLang server for training: ``PYTHON -m rl_async.rollout_server.sglang [flags of sglang serve]``.

PYTHON needs SGLang, and rl-async beside it. The variable RL_ASYNC_TOKEN_FILE names the file with the token that every
request must carry. The server ends with the launcher that started it.
"""

import os
import runpy
import sys
from importlib.util import find_spec
from typing import Any

from rl_async.configs.engines import SGLANG
from rl_async.process.http_auth import RequireToken, check_token
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


def main() -> None:
    """Check that SGLang is installed and run its server in this process."""
    join_supervisor()
    if find_spec("sglang") is None:
        sys.exit(f"{sys.executable} has no SGLang; install rl-async[sglang] there")
    check_token()
    _guard_routes()
    os.environ.update(VARIABLES)
    for name in UNWANTED:
        os.environ.pop(name, None)
    sys.argv = ["sglang", *SGLANG.fixed_arguments, *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _guard_routes() -> None:
    """Put our middleware (token, fence) around every application that uvicorn serves in this process.

    SGLang has no flag for middleware, and its own --api-key would show in its command line and its log.
    """
    import uvicorn

    class Config(uvicorn.Config):
        def __init__(self, app: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(RequireToken(LineageFence(app)), *arguments, **named)

    uvicorn.Config = Config  # type: ignore[misc]


if __name__ == "__main__":
    main()
