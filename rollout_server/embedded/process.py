"""The embedded engine as a process: the model, the engine's thread and the HTTP server, put together."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl_async import tracing
from rl_async.configs.derived import compute_type
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.process.http_auth import Access
from rl_async.process.http_server import server_of
from rl_async.process.role import bind
from rl_async.rollout_server.embedded.attention import NAME as ATTENTION
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.quantized import quantize_layers
from rl_async.rollout_server.embedded.server import EngineServer
from rl_async.torch_shared import is_out_of_memory, pick_device

log = logging.getLogger("rl_async.engine")


def load_model(config: RunConfig) -> torch.nn.Module:
    """Load the model of ``model.path`` onto its device, quantised as configured. Raises UserError if there is none."""
    if not Path(config.model.path).is_dir():  # Transformers would look for it on the Hub
        raise UserError(f"model.path: there is no folder {config.model.path}")
    device, dtype = pick_device(config.model.device), getattr(torch, compute_type(config.model))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]  # Transformers adds paragraphs of advice
        raise UserError(f"model.path: cannot load a causal LM from {config.model.path}: {reason}") from error
    model = model.to(device).eval()
    if config.rollout.quantization != "none":
        quantize_layers(model, config.rollout.quantization)
    return model


def _crash(error: Exception) -> None:
    """End the process, which the launcher replaces, and say what to do if memory was missing."""
    if is_out_of_memory(error):
        log.error("out of memory: lower rollout.cache_bytes or rollout.max_batch_size (docs/how-to/memory.md)")
    os._exit(1)


def serve(run: Path, index: int, host: str, port: int, cache_bytes: int | None) -> None:
    """Serve as engine ``index`` of a run until SIGTERM. Raises UserError for a config, model or address that fails.

    ``cache_bytes``: of its KV cache; None: as the config says.
    """
    # Exit also while the model loads; uvicorn takes the signal over while it serves, and raises it again at its end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = load_resolved(run / "config.yaml")
    access = Access.of_run(run, "engines", (host, *config.launcher.http_hosts))
    if config.launcher.threads is not None:  # else as the launcher's OMP_NUM_THREADS says
        torch.set_num_threads(config.launcher.threads)
    torch.manual_seed(config.seed + 10_000 + index)
    listener = bind(host, port, "rollout.port")
    model, rollout = load_model(config), config.rollout
    core = EngineCore(
        model,
        max_batch=rollout.max_batch_size,
        max_length=rollout.max_model_len,
        cache_bytes=cache_bytes or (rollout.cpu_cache_bytes if model.device.type == "cpu" else rollout.cache_bytes),
        min_iteration_s=config.debug.min_iteration_s,
        record_routes=config.trainer.router_replay != "never",
    )
    engine = EngineThread(core, on_crash=_crash)
    server = EngineServer(engine, config.model.path)
    try:
        with tracing.traced(config.tracking.otlp_endpoint, run, f"engine-{index}"):
            server_of(server.app, access).run(sockets=[listener])
    finally:
        engine.stop()
