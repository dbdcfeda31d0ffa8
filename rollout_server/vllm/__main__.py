"""Starts a vLLM server for training: ``PYTHON -m rl_async.rollout_server.vllm [flags of vllm serve]``.

PYTHON needs vLLM, and rl-async beside it for the plugin. The variable RL_ASYNC_TOKEN_FILE names the file with the token
that every request must carry. The server ends with the launcher that started it.
"""

import os
import runpy
import sys
from importlib.util import find_spec

from rl_async import tracing
from rl_async.configs.engines import STREAM_INTERVAL, VLLM
from rl_async.process.http_auth import check_token
from rl_async.process.role import join_supervisor

FENCE = "rl_async.rollout_server.api.LineageFence"
EVERYTHING, TRACES = tracing.VARIABLES
TRACE_DEFAULTS = {
    # vLLM's own default is gRPC.
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    # Otherwise each request of an episode without a trace begins one.
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}
NEWER = f"install a newer one of {VLLM.versions}"
COUNTER = "rl_async.rollout_server.vllm.versions.WeightVersions"
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
    sys.argv = ["vllm", *_for_this_version(), *_tracing(), *sys.argv[1:]]
    if "--headless" in sys.argv:
        return _follow()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _follow() -> None:
    """Run the workers of a further node of an engine, as ``vllm serve`` does, until they end.

    That command itself looks for a package of the name vllm, which CPU builds are not.
    """
    from rl_async.rollout_server.vllm import versions

    if missing := versions.lacking(versions.FURTHER_NODES):
        sys.exit(f"this vLLM has no {', '.join(missing)}, which further nodes of an engine need; {NEWER}")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    serve.cmd(parser.parse_args([serve.name, *sys.argv[1:]]))


def _for_this_version() -> list[str]:
    """Return ``FLAGS`` as the installed vLLM takes them, and have the versions of tokens counted if it does not."""
    from vllm.platforms import current_platform
    from vllm.sampling_params import SamplingParams

    from rl_async.rollout_server.vllm import versions

    flags = list(FLAGS)
    divided = current_platform.is_cpu() and "--enable-expert-parallel" in sys.argv
    if divided and (missing := versions.lacking(versions.DIVIDED_EXPERTS_ON_CPU)):
        sys.exit(f"this vLLM has no {', '.join(missing)}, without which it mixes up divided experts on a CPU; {NEWER}")
    if versions.lacking(versions.TOKEN_VERSIONS):
        if missing := versions.lacking(versions.COUNTED_VERSIONS):
            sys.exit(f"this vLLM has no {', '.join(missing)}, by which versions of tokens are counted; {NEWER}")
        versions.register()
        # Behind the fence and the check of the token, which vLLM puts around the middlewares before them.
        flags = ["--middleware", COUNTER, *flags]
    if all(map(versions.lacking, versions.SCALE_OUT)):
        flags.remove("--enable-scale-out")
    if "stream_interval" not in SamplingParams.__struct_fields__:
        flags += ["--stream-interval", str(STREAM_INTERVAL)]
    return flags


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
