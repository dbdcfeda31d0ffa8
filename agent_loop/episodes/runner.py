"""Runs one episode: its loop, its tools and its environment."""

import contextlib
import logging
import random

from rl_async.agent_loop.chat_formats.format import ChatFormat, text_size
from rl_async.agent_loop.environments.interface import EnvironmentFactory
from rl_async.agent_loop.environments.registry import get_environment
from rl_async.agent_loop.episodes.episode import Episode
from rl_async.agent_loop.episodes.loops import get_loop
from rl_async.agent_loop.tools.registry import get_tool, require_listed, task_tools
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import LeasedGroup, Trajectory
from rl_async.offload import off_loop
from rl_async.rollout_server.api import Generator

log = logging.getLogger("rl_async.agent_loop")


class EpisodeRunner:
    """Runs episodes of one config. Its constructor raises ConfigError for missing loops, tools or environments."""

    def __init__(self, config: RunConfig, chat: ChatFormat, generator: Generator) -> None:
        self._config, self._chat, self._generator = config, chat, generator
        self._random = random.Random(config.seed)  # chooses the episodes whose rendering is checked
        get_loop(config.agent.loop)
        for name in config.agent.tools:
            get_tool(name)
        environment = config.agent.environment
        self._environment: EnvironmentFactory | None = get_environment(environment) if environment else None

    async def run(self, group: LeasedGroup, sample: int) -> list[Trajectory]:
        """Run one episode, from the prompt to its rows without a reward; the last one ends with the last answer.

        Raises EngineError, whatever a user's loop or environment raises, and ConfigError or DataError if the task names
        what does not exist or code that the config does not list.
        """
        task = group.task
        require_listed(self._config, task)
        loop, tools = get_loop(task.agent or self._config.agent.loop), task_tools(self._config, task)
        async with contextlib.AsyncExitStack() as stack:
            if self._environment is not None:
                environment = await stack.enter_async_context(self._environment(task))
                tools += environment.tools()
            episode = await off_loop(
                text_size(task.prompt),
                Episode,
                group,
                sample,
                config=self._config,
                chat=self._chat,
                generator=self._generator,
                tools=tools,
            )
            reason = await loop(episode)
        if self._random.random() < self._config.agent.check_rendering:
            self._check(episode)
        return episode.trajectories(reason)

    def _check(self, episode: Episode) -> None:
        at = episode.drift()
        if at is not None:
            log.warning(
                "task %s: from token %d on, the episode's tokens differ from the chat template of the whole "
                "conversation; the model is trained on the tokens as sampled",
                episode.task.task_id,
                at,
            )
