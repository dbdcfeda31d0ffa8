"""Starts a vLLM server for training: ``PYTHON -m rl_async.rollout_server.vllm [flags of vllm serve]``.

PYTHON needs vLLM, and rl-async beside it for the plugin. The variable RL_ASYNC_TOKEN_FILE names the file with the token
that every request must carry. The server ends with the launcher that started it.
"""

import os
import runpy
import sys
from importlib.util import find_spec

from rl_async import tracing
from rl_async.configs.engines import VLLM
from rl_async.process.http_auth import check_token
from rl_async.process.role import join_supervisor

FENCE = "rl_async.rollout_server.fence.LineageFence"
EVERYTHING, TRACES = tracing.VARIABLES
TRACE_DEFAULTS = {
    # vLLM's own default is gRPC.
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    # Otherwise each request of an episode without a trace begins one.
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}
FLAGS = ("--middleware", FENCE, *VLLM.fixed_arguments, "--disable-uvicorn-access-log")
VARIABLES = {
    # Enables the control routes: pause, weights, sleep.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Models are local folders.
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    """Check that vLLM is installed and run its server in this process."""
    join_supervisor()
    if find_spec("vllm") is None:
        sys.exit(f"{sys.executable} has no vLLM; {VLLM.install}")
    check_token()
    os.environ.update(VARIABLES)
    # This list of allowed plugins could leave ours out.
    os.environ.pop("VLLM_PLUGINS", None)
    sys.argv = ["vllm", *FLAGS, *_tracing(), *sys.argv[1:]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _tracing() -> list[str]:
    """Return vLLM's flags for its own spans, below those named by requests, if the run is traced."""
    endpoint = os.environ.get(TRACES) or os.environ.get(EVERYTHING, "")
    if not endpoint or not tracing.is_wanted(""):
        return []
    for name, value in TRACE_DEFAULTS.items():
        os.environ[name] = os.environ.get(name) or value
    return ["--otlp-traces-endpoint", endpoint if os.environ.get(TRACES) else f"{endpoint.rstrip('/')}/v1/traces"]


if __name__ == "__main__":
    main()
