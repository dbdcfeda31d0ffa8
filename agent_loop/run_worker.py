"""The composition root of an agent worker: connects it to engines, reward service and queue, and runs it."""

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from rl_async import tracing
from rl_async.agent_loop.chat_formats.format import ChatFormat, reasoning_and_answer
from rl_async.agent_loop.chat_formats.format_registry import load_format
from rl_async.agent_loop.environments.host_pool import HostedEnvironments
from rl_async.agent_loop.recorded import AsRecorded, RecordedRunner
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.telemetry import SamplesCollector
from rl_async.agent_loop.tools.mcp_toolbox import forget_variables
from rl_async.agent_loop.tools.tool_registry import connect_servers
from rl_async.agent_loop.worker import AgentWorker
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL
from rl_async.process.http_auth import run_token
from rl_async.process.http_server import exposed
from rl_async.process.role import heeded
from rl_async.reward_loop.model_client import forget_api_keys
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import Generator
from rl_async.rollout_server.pool import engine_pool
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client import QueueClient


@contextlib.asynccontextmanager
async def runner_and_rewards(
    config: RunConfig,
    chat: ChatFormat,
    generator: Generator,
    folder: Path,
    *,
    logs: Path,
    owner: str,
    reward_model: str = "",
) -> AsyncIterator[tuple[EpisodeRunner, RewardService]]:
    """Hold the episode runner and the reward service. Tool servers and environment hosts log to files in ``logs`` that
    are named after ``owner``.

    The API keys that the config names are read from the environment and removed from it. Raises UserError if a name in
    the config does not exist.
    """
    async with contextlib.AsyncExitStack() as stack:
        toolbox = await stack.enter_async_context(connect_servers(config.agent, logs, owner))
        forget_variables(config.agent.mcp)
        hosted = HostedEnvironments(config, logs, owner) if config.agent.environment_hosts else None
        runner = EpisodeRunner(config, chat, generator, toolbox, hosted)
        stack.push_async_callback(runner.close)
        read = functools.partial(reasoning_and_answer, chat)
        service = RewardService(config.reward, model_url=reward_model, folder=folder, sandbox=config.sandbox, read=read)
        rewards = await stack.enter_async_context(service)
        forget_api_keys(config)
        # The hosts start last, so that they do not inherit the API keys.
        if hosted is not None:
            await stack.enter_async_context(hosted)
        yield runner, rewards


async def run_worker(config: RunConfig, index: int, address: str, *, folder: Path, reward_model: str = "") -> None:
    """Run one worker until the run is over. ``reward_model`` is the URL of the run's own reward model.

    With ``rollout.replay`` it puts recorded episodes into the queue and needs no engine. Raises UserError for names in
    the config that do not exist, and an ExceptionGroup with QueueLost or ProtocolError if the queue is gone.
    """
    owner = f"agent-{index}"
    client = QueueClient(address, role="agent", name=owner, keys=client_keys(config, folder, "worker"))
    if config.rollout.replay:
        async with client as queue:
            await AgentWorker(queue, RecordedRunner(config), AsRecorded(), config).run()
        return
    async with contextlib.AsyncExitStack() as stack:
        pool = engine_pool(config.rollout, run_token(folder, "engines"))
        chat, logs = load_format(config.model.path, config.agent), folder / "logs"
        playing = runner_and_rewards(config, chat, pool, folder, logs=logs, owner=owner, reward_model=reward_model)
        runner, rewards = await stack.enter_async_context(playing)
        queue = await stack.enter_async_context(client)
        stack.push_async_callback(pool.close)
        worker = AgentWorker(queue, runner, rewards, config)
        collector = SamplesCollector(worker, pool)
        stack.enter_context(exposed(config.tracking.prometheus, folder, "worker", f"worker-{index}", collector))
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(pool.watch(queue), name="engine registry")
            await worker.run()
            watching.cancel()


def cancel_on_signals() -> list[int]:
    """Cancel the current task on SIGTERM or SIGINT; the returned list then gets the signal's number."""
    task, received = asyncio.current_task(), list[int]()
    assert task is not None

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in heeded(signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, cancel, number)
    return received


def work(folder: Path, index: int, queue: str, reward_model: str) -> None:
    """Run one worker of the run in ``folder``. Raises SystemExit on a signal, and the errors of ``run_worker``."""
    config = load_resolved(folder / "config.yaml")

    async def until_signalled() -> int:
        received = cancel_on_signals()
        try:
            await run_worker(config, index, queue, folder=folder, reward_model=reward_model)
        except asyncio.CancelledError:
            if not received:
                raise
            return EXIT_SIGNAL + received[0]
        return 0

    with tracing.traced(config.tracking.otlp_endpoint, folder, f"agent-{index}"):
        code = uvloop.run(until_signalled())
    if code:
        sys.exit(code)
