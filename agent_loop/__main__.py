"""The agent worker process: ``python -m rl_async.agent_loop --run RUN --index I --queue ADDRESS``."""

import argparse
import asyncio
import contextlib
import logging
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
from rl_async.errors import RlAsyncError, UserError
from rl_async.process.lifeline import watch_lifeline
from rl_async.process.log import setup_logging
from rl_async.process.stacks import answer_with_stacks
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.connect import engine_pool
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client.async_client import QueueClient

log = logging.getLogger("rl_async.agent_loop")


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
    parser = argparse.ArgumentParser(prog="python -m rl_async.agent_loop", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with config.yaml")
    parser.add_argument("--index", type=int, required=True, help="number of this worker")
    parser.add_argument("--queue", required=True, help="address of the transfer queue, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--reward-model", default="", help="URL of the run's own reward model, if it has one")
    arguments = parser.parse_args(argv)
    setup_logging(f"agent-{arguments.index}")
    try:
        config = load_resolved(arguments.run / "config.yaml")
        with contextlib.suppress(asyncio.CancelledError):
            uvloop.run(
                run_worker(
                    config,
                    arguments.index,
                    arguments.queue,
                    folder=arguments.run,
                    reward_model=arguments.reward_model,
                )
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BaseExceptionGroup as group:  # what ended the worker's tasks
        expected, other = group.split(RlAsyncError)
        if expected is None or other is not None:
            raise
        log.error("the worker ended: %s", "; ".join(_texts(expected)))
        return 1
    return 0


def _texts(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [text for inner in error.exceptions for text in _texts(inner)]
    return [f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    watch_lifeline()
    answer_with_stacks()
    sys.exit(main())
