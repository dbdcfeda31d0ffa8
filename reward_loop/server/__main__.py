"""The reward model's process: ``python -m rl_async.reward_loop.server --model PATH --port P``."""

import argparse
import signal
import socket
import sys
from typing import Any

import torch
import uvicorn

from rl_async.errors import UserError
from rl_async.process.lifeline import watch_lifeline
from rl_async.process.log import setup_logging
from rl_async.process.stacks import answer_with_stacks
from rl_async.reward_loop.render import load_tokenizer
from rl_async.reward_loop.server.app import Application
from rl_async.reward_loop.server.batcher import Batcher
from rl_async.reward_loop.server.classifier import load_classifier, longest, score


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rl_async.reward_loop.server", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a sequence classifier with one label")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only; there is no access control")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--batch-size", type=int, default=32, help="conversations per forward pass")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on CPU")
    return parser.parse_args()


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"reward model: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _application(arguments: argparse.Namespace) -> Application:
    model: Any = load_classifier(arguments.model, arguments.dtype, arguments.device)
    config = model.config
    return Application(
        Batcher(lambda rows: score(model, rows), arguments.batch_size),
        load_tokenizer(arguments.model, "reward model"),
        name=arguments.model,
        label=(config.id2label or {}).get(0),
        vocabulary=config.get_text_config().vocab_size,
        longest=longest(model),
    )


def main() -> None:
    """Serve until SIGTERM."""
    watch_lifeline()
    answer_with_stacks()
    arguments = _arguments()
    setup_logging("reward-model")
    # also while the model loads; uvicorn takes the signal over while it serves, and raises it again at its end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(arguments.threads)
    try:
        listener = _bind(arguments.host, arguments.port)
        application = _application(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    settings = uvicorn.Config(
        application.app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_keep_alive=60,  # seconds; longer than its clients keep a connection that they do not use
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main()
