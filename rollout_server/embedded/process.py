"""The embedded engine as a process: the model, the engine's thread and the HTTP server, put together."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl_async.configs.load.loader import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.process.http_auth import Access, run_token
from rl_async.process.http_server import server_of
from rl_async.process.role import bind
from rl_async.rollout_server.embedded.attention import NAME as ATTENTION
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.server import EngineServer


def load_model(config: RunConfig) -> torch.nn.Module:
    """Load the model of ``model.path`` onto its device. Raises UserError if there is none."""
    if not Path(config.model.path).is_dir():  # Transformers would look for it on the Hub
        raise UserError(f"model.path: there is no folder {config.model.path}")
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path,
            dtype=getattr(torch, config.model.dtype),
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]  # Transformers adds paragraphs of advice
        raise UserError(f"model.path: cannot load a causal LM from {config.model.path}: {reason}") from error
    return model.to(device).eval()


def serve(run: Path, index: int, host: str, port: int) -> None:
    """Serve as engine ``index`` of a run until SIGTERM. Raises UserError for a config, model or address that fails."""
    # Exit also while the model loads; uvicorn takes the signal over while it serves, and raises it again at its end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = load_resolved(run / "config.yaml")
    access = Access(run_token(run, "engines"), (host, *config.launcher.http_hosts))
    if config.launcher.threads is not None:  # else as the launcher's OMP_NUM_THREADS says
        torch.set_num_threads(config.launcher.threads)
    torch.manual_seed(config.seed + 10_000 + index)
    listener = bind(host, port, "rollout.port")
    model = load_model(config)
    core = EngineCore(
        model,
        max_batch=config.rollout.max_batch_size,
        max_length=config.rollout.max_model_len,
        cache_bytes=config.rollout.cpu_cache_bytes if model.device.type == "cpu" else None,
        min_iteration_s=config.debug.min_iteration_s,
    )
    engine = EngineThread(core, on_crash=lambda _: os._exit(1))
    server = EngineServer(engine, config.model.path)
    try:
        server_of(server.app, access).run(sockets=[listener])
    finally:
        engine.stop()
