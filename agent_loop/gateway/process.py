"""The composition root of a gateway: connects it to engines, reward service and queue, and serves it."""

import asyncio
import contextlib
import functools
import socket
from pathlib import Path

import uvloop

from rl_async import tracing
from rl_async.agent_loop.chat_formats.format import reasoning_and_answer
from rl_async.agent_loop.chat_formats.registry import load_format
from rl_async.agent_loop.gateway.open_episodes import OpenEpisodes
from rl_async.agent_loop.gateway.server import GatewayServer
from rl_async.agent_loop.process import cancel_on_signals
from rl_async.configs.checks.gateway import gateway_problem
from rl_async.configs.load.loader import load_resolved
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_RESTART, ConfigError, QueueLost, RlAsyncError, UserError
from rl_async.process.http_auth import Access, run_token, token_file
from rl_async.process.http_server import server_of
from rl_async.process.role import bind, run_role
from rl_async.process.run_files import Target, listed, read_endpoints
from rl_async.reward_loop.api_keys import forget_api_keys
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.connect import engine_pool
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient

ANSWER_S = 5.0
LINGER_S = 10.0  # in which agent programs are told that the run is over


async def run_gateway(
    config: RunConfig, listener: socket.socket, access: Access, queue_address: str, *, folder: Path, reward_model: str
) -> None:
    """Serve until the run is over or SIGTERM or SIGINT arrives.

    Raises UserError for names in the config that do not exist, and an ExceptionGroup with QueueLost or ProtocolError if
    the queue is gone.
    """
    cancel_on_signals()
    async with contextlib.AsyncExitStack() as stack:
        pool = engine_pool(config.rollout, run_token(folder, "engines"))
        chat = load_format(config.model.path, config.agent)
        read = functools.partial(reasoning_and_answer, chat)
        service = RewardService(config.reward, model_url=reward_model, folder=folder, sandbox=config.sandbox, read=read)
        rewards = await stack.enter_async_context(service)
        forget_api_keys(config)
        client = QueueClient(queue_address, role="agent", name="gateway", keys=client_keys(config, folder, "worker"))
        queue = await stack.enter_async_context(client)
        stack.push_async_callback(pool.close)
        episodes = OpenEpisodes(config, chat, pool, queue, rewards)
        server = server_of(GatewayServer(config, episodes).app, access)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(pool.watch(queue), name="engine registry")
            # uvicorn takes the signals over while it serves, and raises them again at its end
            serving = group.create_task(server.serve(sockets=[listener]), name="server")
            await episodes.run()
            await asyncio.wait([serving], timeout=LINGER_S)
            server.should_exit = True
            await serving
            watching.cancel()


def serve(run: Path, queue: str, reward_model: str, host: str, port: int) -> None:
    """Run a gateway of the run in ``run`` until the run is over. Raises UserError, and what ``run_gateway`` does."""
    config = load_resolved(run / "config.yaml")
    if problem := gateway_problem(config):
        raise ConfigError(problem)
    host = host or (config.agent.gateway or GatewayConfig()).host
    access = Access.of_run(run, "gateway", (host, *config.launcher.http_hosts))
    listener = bind(host, port, "agent.gateway")
    listener.listen()
    address, number = listener.getsockname()[:2]
    print(f"gateway: http://{address}:{number} (token: {token_file(run, 'gateway')})", flush=True)
    traced = tracing.traced(config.tracking.otlp_endpoint, run, "gateway")
    target = Target(f"{address}:{number}", "gateway", f"gateway-{number}")  # others may be attached to the run
    with traced, listed(config.tracking.prometheus, run, target), contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run_gateway(config, listener, access, queue, folder=run, reward_model=reward_model))


def attach(run: Path, host: str, port: int) -> int:
    """Run a gateway beside the processes of a run that is going on; the exit code."""

    def work() -> None:
        places = read_endpoints(run)
        keys = client_keys(load_resolved(run / "config.yaml"), run, "worker")
        probe = SyncQueueClient(places.queue, role="agent", name="gateway-probe", timeout_s=ANSWER_S, keys=keys)
        try:
            with probe as queue:
                queue.status()
        except QueueLost as error:
            raise UserError(f"{run} is not running: its queue at {places.queue} does not answer") from error
        serve(run, places.queue, places.reward_model, host, port)

    return run_role("gateway", work, {RlAsyncError: EXIT_RESTART})
