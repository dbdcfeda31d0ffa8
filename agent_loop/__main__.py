"""The agent worker process: ``python -m rl_async.agent_loop --run RUN --index I --queue ADDRESS``."""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import uvloop

from rl_async.agent_loop.chat_formats.render import load_renderer
from rl_async.agent_loop.episodes.loops import EpisodeRunner
from rl_async.agent_loop.worker import AgentWorker
from rl_async.configs.derived.samples import samples_per_group
from rl_async.configs.load.loader import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_RESTART, RlAsyncError
from rl_async.process.role import add_run, role_parser, run_role
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.connect import engine_pool
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client.async_client import QueueClient


async def run_worker(config: RunConfig, index: int, address: str, *, folder: Path, reward_model: str = "") -> None:
    """Run one worker until the run is over, or SIGTERM or SIGINT comes. ``reward_model``: where the run's own answers.

    Raises UserError for names in the config that do not exist, in an ExceptionGroup QueueLost or ProtocolError when
    the queue is gone.
    """
    this = asyncio.current_task()
    if this is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)

    async with contextlib.AsyncExitStack() as stack:
        pool = engine_pool(config.rollout)
        runner = EpisodeRunner(config, load_renderer(config.model.path), pool)
        rewards = await stack.enter_async_context(RewardService(config.reward, model_url=reward_model, folder=folder))
        client = QueueClient(address, role="agent", name=f"agent-{index}", keys=client_keys(config, folder))
        queue = await stack.enter_async_context(client)
        stack.push_async_callback(pool.close)
        worker = AgentWorker(
            queue,
            runner,
            rewards,
            concurrency=config.agent.concurrency,
            group_size=samples_per_group(config),
            lease_s=config.queue.lease_s,
            episode_timeout_s=config.agent.episode_timeout_s,
        )
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(pool.watch(queue), name="engine registry")
            await worker.run()
            watching.cancel()


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = role_parser("agent_loop", __doc__)
    add_run(parser)
    parser.add_argument("--index", type=int, required=True, help="number of this worker")
    parser.add_argument("--queue", required=True, help="address of the transfer queue, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--reward-model", default="", help="URL of the run's own reward model, if it has one")
    arguments = parser.parse_args(argv)

    def work() -> None:
        config = load_resolved(arguments.run / "config.yaml")
        folder, reward_model = arguments.run, arguments.reward_model
        with contextlib.suppress(asyncio.CancelledError):
            uvloop.run(run_worker(config, arguments.index, arguments.queue, folder=folder, reward_model=reward_model))

    return run_role(f"agent-{arguments.index}", work, {RlAsyncError: EXIT_RESTART})


if __name__ == "__main__":
    sys.exit(main())
