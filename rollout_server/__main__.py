"""The embedded engine's process: ``python -m rl_async.rollout_server --run RUN --index I --port P``."""

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoModelForCausalLM

from rl_async.configs.load.loader import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.process.lifeline import watch_lifeline
from rl_async.process.log import setup_logging
from rl_async.process.stacks import answer_with_stacks
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine import Engine
from rl_async.rollout_server.embedded.server import Server


def load_model(config: RunConfig) -> torch.nn.Module:
    """The config's model on its device. Raises UserError if there is none."""
    if not Path(config.model.path).is_dir():  # Transformers would look for it on the Hub
        raise UserError(f"model.path: there is no folder {config.model.path}")
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=getattr(torch, config.model.dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]  # Transformers adds paragraphs of advice
        raise UserError(f"model.path: cannot load a causal LM from {config.model.path}: {reason}") from error
    return model.to(device).eval()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError if the address cannot be had."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"rollout.port: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def main() -> None:
    """Serve until SIGTERM."""
    watch_lifeline()
    answer_with_stacks()
    parser = argparse.ArgumentParser(prog="python -m rl_async.rollout_server", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with config.yaml")
    parser.add_argument("--index", type=int, default=0, help="number of this engine in the run")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only; there is no access control")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    setup_logging(f"engine-{arguments.index}")
    # also while the model loads; uvicorn takes the signal over while it serves, and raises it again at its end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        config = load_resolved(arguments.run / "config.yaml")
        torch.set_num_threads(config.launcher.threads)
        torch.manual_seed(config.seed + 10_000 + arguments.index)
        listener = bind(arguments.host, arguments.port)
        core = EngineCore(
            load_model(config),
            max_batch=config.rollout.max_batch_size,
            max_length=config.rollout.max_model_len,
            min_iteration_s=config.debug.min_iteration_s,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    engine = Engine(core, on_crash=lambda _: os._exit(1))
    server = Server(engine, config.model.path)
    settings = uvicorn.Config(
        server.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    try:
        uvicorn.Server(settings).run(sockets=[listener])
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
