"""Runs one episode: its loop, its tools and its environment."""

import contextlib
import logging
import random

from rl_async.agent_loop.chat_formats.format import ChatFormat, text_size
from rl_async.agent_loop.environments.local import LocalEnvironments
from rl_async.agent_loop.environments.services import Services
from rl_async.agent_loop.environments.session import Environments, joined
from rl_async.agent_loop.episodes.episode import Episode
from rl_async.agent_loop.episodes.loops import get_loop
from rl_async.agent_loop.tools.code import TOOLS_OF_CODE, CodeTools
from rl_async.agent_loop.tools.mcp.toolbox import McpToolbox
from rl_async.agent_loop.tools.registry import NO_SERVERS, distinct, get_tool, require_listed, task_tools
from rl_async.configs.derived.sandbox import CODE_TOOLS
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import LeasedGroup, Trajectory
from rl_async.offload import off_loop
from rl_async.reward_loop.api import ENVIRONMENT, Score
from rl_async.rollout_server.api import Generator
from rl_async.sandbox.api import Sandbox
from rl_async.sandbox.registry import make_sandbox

log = logging.getLogger("rl_async.agent_loop")


class EpisodeRunner:
    """Runs episodes of one config. Its constructor raises ConfigError for missing loops, tools, environments
    or, if the tools run code, a missing sandbox."""

    def __init__(
        self,
        config: RunConfig,
        chat: ChatFormat,
        generator: Generator,
        toolbox: McpToolbox | None = None,
        hosted: Environments | None = None,
    ) -> None:
        """``hosted``: where episodes get their environments from; None: they are made in this process."""
        self._toolbox = toolbox
        self._config, self._chat, self._generator = config, chat, generator
        self._random = random.Random(config.seed)  # chooses the episodes whose rendering is checked
        get_loop(config.agent.loop)
        for name in config.agent.tools:
            get_tool(name)
        self._sandbox: Sandbox | None = None
        if not set(CODE_TOOLS).isdisjoint(config.agent.tools):
            self._open_sandbox()
        self._services, self._environments = Services(config, chat, generator), hosted
        if config.agent.environment and hosted is None:
            self._environments = LocalEnvironments(config.agent.environment, self._services)
        self._unused_reward = ENVIRONMENT not in {term.name for term in config.reward.functions}  # to warn once

    async def close(self) -> None:
        """Close what its environments share."""
        await self._services.close()

    async def run(self, group: LeasedGroup, sample: int) -> list[Trajectory]:
        """Run one episode, from the prompt to its rows; the last one ends with the last answer.

        They are not scored, but have what the environment says of the episode. Raises EngineError, EnvironmentFailed,
        whatever a user's loop raises, and ConfigError or DataError if the task names what does not exist or code that
        the config does not list.
        """
        task = group.task
        require_listed(self._config, task)
        loop = get_loop(task.agent or self._config.agent.loop)
        async with contextlib.AsyncExitStack() as stack:
            of_servers = stack.enter_context(self._toolbox.episode()) if self._toolbox else NO_SERVERS
            tools = task_tools(self._config, task, of_servers)
            session, prompt = None, task.prompt
            if any(tool in TOOLS_OF_CODE for tool in tools):  # a task may name them itself
                code = await stack.enter_async_context(CodeTools(self._open_sandbox(), self._config))
                tools = code.bind(tools)
            if self._environments is not None:
                session = await stack.enter_async_context(self._environments.open(task))
                prompt = joined(prompt, await session.reset())
                tools += distinct(session.tools(), of_servers)
            episode = await off_loop(
                text_size(prompt),
                Episode,
                group,
                sample,
                config=self._config,
                chat=self._chat,
                generator=self._generator,
                tools=tools,
                environment=session,
                prompt=prompt,
            )
            reason = await loop(episode)
            score = await session.reward() if session else None
        if self._random.random() < self._config.agent.check_rendering:
            self._check(episode)
        rows = episode.trajectories(reason)
        if score is not None:
            rows[-1].reward_parts = score.named(ENVIRONMENT)
            self._warn_if_unused(score)
        return rows

    def _warn_if_unused(self, score: Score) -> None:
        if self._unused_reward and score.value:
            self._unused_reward = False
            log.warning(
                "environment %s gives rewards to episodes, and reward.functions does not use them: add {name: %s}",
                self._config.agent.environment,
                ENVIRONMENT,
            )

    def _open_sandbox(self) -> Sandbox:
        """Return the sandbox, made at the first call. Raises ConfigError where none can be."""
        if self._sandbox is None:
            self._sandbox = make_sandbox(self._config.sandbox)
        return self._sandbox

    def _check(self, episode: Episode) -> None:
        at = episode.drift()
        if at is not None:
            log.warning(
                "task %s: from token %d on, the episode's tokens differ from the chat template of the whole "
                "conversation; the model is trained on the tokens as sampled",
                episode.task.task_id,
                at,
            )
