"""The embedded engine, served twice: at one port with the run's token, as a run does, and at another to everybody.

Both share the engine, its event loop and whatever else the machine does.

    python -m benchmarks.processes.open_engine --run RUN --port PORT --open-port PORT
"""

import argparse
import os
from pathlib import Path

import torch
import uvicorn

from rl_async.configs.load import load_resolved
from rl_async.process.http_auth import Access, App, Receive, RequireToken, Scope, Send, run_token
from rl_async.process.role import bind
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.server import EngineServer, load_model


def at_port(port: int, app: App, elsewhere: App) -> App:
    """Serve ``app`` at one port and ``elsewhere`` at all others."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["server"][1] == port else elsewhere)(scope, receive, send)

    return serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes.open_engine", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--open-port", type=int, required=True)
    arguments = parser.parse_args()
    config = load_resolved(arguments.run / "config.yaml")
    torch.set_num_threads(config.launcher.threads or 1)
    rollout = config.rollout
    core = EngineCore(load_model(config), max_batch=rollout.max_batch_size, max_length=rollout.max_model_len)
    server = EngineServer(EngineThread(core, on_crash=lambda _: os._exit(1)), config.model.path)
    closed = RequireToken(server.app, Access(run_token(arguments.run, "engines")))
    app = at_port(arguments.open_port, server.app, closed)
    settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    listeners = [bind("127.0.0.1", port, "--port") for port in (arguments.port, arguments.open_port)]
    uvicorn.Server(settings).run(sockets=listeners)


if __name__ == "__main__":
    main()
