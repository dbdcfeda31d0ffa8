"""Loads a sequence classifier and serves it."""

import argparse
import signal
import sys
from typing import Any

import torch

from rl_async import tracing
from rl_async.process.http_auth import Access
from rl_async.process.http_server import server_of
from rl_async.process.role import bind
from rl_async.reward_loop.render import load_tokenizer
from rl_async.reward_loop.server.app import Application
from rl_async.reward_loop.server.batcher import Batcher
from rl_async.reward_loop.server.classifier import load_classifier, longest, score


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


def serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM. Raises UserError without a token, if the model cannot be loaded, or if the port is taken."""
    # also while the model loads; uvicorn takes the signal over while it serves, and raises it again at its end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    access = Access.from_environment()
    torch.set_num_threads(arguments.threads)
    listener = bind(arguments.host, arguments.port, "reward model")
    app = _application(arguments).app
    # seconds; longer than its clients keep a connection that they do not use
    with tracing.traced("", None, "reward-model"):
        server_of(app, access, lifespan="on", timeout_keep_alive=60).run(sockets=[listener])
