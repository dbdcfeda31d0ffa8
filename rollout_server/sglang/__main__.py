"""An SGLang server as this project needs it: ``PYTHON -m rl_async.rollout_server.sglang [flags of sglang serve]``.

PYTHON has SGLang, and rl-async beside it. Ends with the launcher that started it.
"""

import os
import runpy
import sys
from importlib.util import find_spec

from rl_async.process.role import join_supervisor

FLAGS = ("--skip-tokenizer-init",)  # token ids in and out; a tokenizer would add stop tokens of its own
VARIABLES = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else /health samples, which a paused engine cannot
    "HF_HUB_OFFLINE": "1",  # a model is a folder here; nothing is ever looked up
}
UNWANTED = (
    "SGLANG_RETURN_ORIGINAL_LOGPROB",  # log-probabilities before the temperature
    "SGLANG_RUST_SERVER",  # another server, whose routes have not been looked at
)


def main() -> None:
    """Become the server."""
    join_supervisor()
    if find_spec("sglang") is None:
        sys.exit(f"{sys.executable} has no SGLang; install rl-async[sglang] there")
    os.environ.update(VARIABLES)
    for name in UNWANTED:
        os.environ.pop(name, None)
    sys.argv = ["sglang", *FLAGS, *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
