"""Runs episodes: from a leased sample, with its loop, tools and environment, to rows without a reward.

A game is an episode of several roles that speak in turn. It tells one role at a time something, and gets its answer.
Each role that the policy plays has a conversation of its own, an ``Episode``, which its own loop drives; to that loop
the game is an environment that answers when it is the role's turn again. Opponents play the other roles.

    game ──to──> seat ──> the role's loop ──answer──> game
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from rl_async.agent_loop.chat_formats.format import ChatFormat, Message, text_size
from rl_async.agent_loop.environments.environment_registry import LocalEnvironments
from rl_async.agent_loop.environments.session import (
    Answering,
    Environments,
    OpenEnvironment,
    OpenGame,
    Services,
    Speaker,
    SpeechTooLong,
    check_opponents,
    joined,
    make_opponents,
)
from rl_async.agent_loop.episode import Episode, Loop, PromptTooLong, get_loop
from rl_async.agent_loop.tools.mcp_toolbox import McpToolbox
from rl_async.agent_loop.tools.tool import CallableTool, Step
from rl_async.agent_loop.tools.tool_registry import (
    NO_SERVERS,
    TOOLS_OF_CODE,
    CodeTools,
    distinct,
    get_tool,
    require_listed,
    task_tools,
)
from rl_async.concurrency import Overdue, contained, off_loop, within
from rl_async.configs.derived import CODE_TOOLS
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, EnvironmentFailed, EpisodeTimeout
from rl_async.messages import TIMEOUT, LeasedGroup, Task, Trajectory
from rl_async.reward_loop.api import ENVIRONMENT, Score
from rl_async.rollout_server.api import Generator
from rl_async.transfer_queue.images import images_of

log = logging.getLogger("rl_async.agent_loop")

T = TypeVar("T")


class Table:
    """Whose turn it is in a game. A role waits here until the game tells it something, or is over."""

    def __init__(self, game: OpenGame) -> None:
        self._game, self._over = game, False
        # Whether a role has spoken.
        self.answered = False
        self._told = {role: asyncio.Queue[list[Message] | None]() for role in game.roles}

    async def answer(self, said: str) -> Step:
        """Pass the answer of the role whose turn it is to the game, and give the next role its turn."""
        if self._over:
            return Step(done=True)
        self.answered = True
        step, messages = await self._game.step(said)
        self.tell(step, messages)
        return step

    async def turn(self, role: str) -> list[Message] | None:
        """Wait for a role's turn; return the messages to it, or None if the game is over."""
        return None if self._over else await self._told[role].get()

    def end(self) -> None:
        """End the game."""
        self._over = True
        for told in self._told.values():
            told.put_nowait(None)

    def tell(self, step: Step, messages: list[Message]) -> None:
        """Give the role that the game addresses its turn, or end the game."""
        if step.done:
            self.end()
        else:
            self._told[step.to].put_nowait(messages)


class Seat:
    """The game as one role sees it (``Answering``)."""

    def __init__(self, table: Table, role: str) -> None:
        self._table, self.role = table, role

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Play a turn; return the game's step and, once it is the role's turn again, the messages to the role. There
        are none if the game is over."""
        step = await self._table.answer(answer)
        return step, await self._table.turn(self.role) or []


async def play_game(
    game: OpenGame,
    first: tuple[Step, list[Message]],
    prompt: Sequence[Message],
    converse: Callable[[Seat, list[Message]], Awaitable[T]],
    opponents: Mapping[str, Speaker],
    max_turns: int,
) -> dict[str, T]:
    """Play a game whose ``reset`` returned ``first``; return the results of ``converse`` for each role that had a
    turn, in the order of the roles.

    ``converse`` plays one role, given the first messages of its conversation. The game is over when it returns, or
    raises PromptTooLong because the game grew too long. Other errors of it and of the game pass through. Raises
    EnvironmentFailed if the policy never had a turn.
    """
    table = Table(game)

    async def converses(role: str) -> T | None:
        told = await table.turn(role)
        if told is None:
            return None
        done = None
        try:
            done = await converse(Seat(table, role), beginning(prompt, told))
        except PromptTooLong:
            # Before anybody spoke, the task itself is too long.
            if not table.answered:
                raise
        table.end()
        return done

    try:
        async with asyncio.TaskGroup() as tasks:
            for role, speaker in opponents.items():
                tasks.create_task(_oppose(table, role, speaker, prompt, max_turns), name=role)
            mine = [role for role in game.roles if role not in opponents]
            played = {role: tasks.create_task(converses(role), name=role) for role in mine}
            table.tell(*first)
    # The first error cancelled the other conversations.
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    found = {role: done for role, task in played.items() if (done := task.result()) is not None}
    if not found:
        raise EnvironmentFailed(f"the game ended before the policy had a turn as {' or '.join(played)}")
    return found


async def _oppose(table: Table, role: str, speaker: Speaker, prompt: Sequence[Message], max_turns: int) -> None:
    """Play a role that the policy does not play, for ``max_turns`` turns at most."""
    told = await table.turn(role)
    said: list[Message] = [] if told is None else beginning(prompt, told)
    for _ in range(max_turns):
        if told is None:
            return
        try:
            answer = await speaker.say(said)
        except SpeechTooLong:
            break
        if not answer.whole:
            break
        await table.answer(answer.text)
        told = await table.turn(role)
        said += [{"role": "assistant", "content": answer.text}, *(told or ())]
    table.end()


def beginning(prompt: Sequence[Message], told: list[Message]) -> list[Message]:
    """Return how a role's conversation begins: with the task's prompt, unless the role is told a system message."""
    return told if told and told[0]["role"] == "system" else joined(prompt, told)


# Share of episodes whose tokens are compared with the chat template of the whole conversation. That takes as long as
# rendering them did, and a template that drifts does so in most episodes.
CHECKED_SHARE = 0.02


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
        """Without ``hosted`` environments, they are made in this process."""
        self._toolbox = toolbox
        self._config, self._chat, self._generator = config, chat, generator
        # Chooses the episodes whose rendering is checked.
        self._random = random.Random(config.seed)
        get_loop(config.agent.loop)
        # Logged once: loops that tasks name in place of the config's, tools with a cut result, rewards without a use.
        self._logged_loops: set[str] = set()
        self._logged_cuts: set[str] = set()
        self._unused_reward = ENVIRONMENT not in {term.name for term in config.reward.functions}
        for name in config.agent.tools:
            get_tool(name)
        self._services, self._environments = Services(config, chat, generator), hosted
        if not set(CODE_TOOLS).isdisjoint(config.agent.tools):
            self._services.sandbox()
        self._opponents = make_opponents(config, chat, generator)
        if config.agent.environment and hosted is None:
            self._environments = LocalEnvironments(config.agent.environment, self._services)

    async def close(self) -> None:
        """Close the services that its environments share, and its opponents."""
        await self._services.close()
        for opponent in self._opponents.values():
            await opponent.close()

    async def run(self, group: LeasedGroup, sample: int, images: dict[str, bytes] | None = None) -> list[Trajectory]:
        """Run one episode; return its rows, role by role. A conversation's last row ends with the last answer.

        The images that the rows refer to are added to ``images``, by hash.

        The rows are not scored, but carry the environment's reward. Raises EpisodeTimeout at the deadline, since a
        user's loop or environment may never return; EngineError; EnvironmentFailed; any error of a user's loop;
        ConfigError if that returns no reason; and ConfigError or DataError if the task has unknown names or names code
        that the config does not list.
        """
        begun, agent = list[Episode](), self._config.agent
        try:
            played = await within(agent.episode_timeout_s, self._played(group, sample, begun))
        except Overdue:
            played = self._cut_short(begun) if agent.on_timeout == "truncate" and group.partition == "train" else []
            if not played:
                limit = f"{agent.episode_timeout_s:g} s (agent.episode_timeout_s)"
                raise EpisodeTimeout(f"episode {group.group_id}.{sample} did not finish within {limit}") from None
        rows = [row for conversation in played for row in self._rows(*conversation)]
        for segment, row in enumerate(rows):
            row.segment = segment
        if images is not None:
            for conversation in played:
                images |= conversation.episode.images
        return rows

    async def _played(self, group: LeasedGroup, sample: int, begun: list[Episode]) -> list["_Played"]:
        """Play the conversations of an episode; each is in ``begun`` from its beginning on."""
        task = group.task
        require_listed(self._config, task)
        async with contextlib.AsyncExitStack() as stack:
            of_servers = stack.enter_context(self._toolbox.episode()) if self._toolbox else NO_SERVERS
            tools = task_tools(self._config, task, of_servers)
            world = await stack.enter_async_context(self._environments.open(task)) if self._environments else None
            shared = _Shared(group, sample, tools, of_servers, begun)
            return await (self._play_game(shared, world) if isinstance(world, OpenGame) else self._play(shared, world))

    def _cut_short(self, begun: Sequence[Episode]) -> list["_Played"]:
        """Return the conversations of an episode that ran out of time, if the policy has answered in them. The
        environment may be the part that hangs, so it is not asked for a reward."""
        score = Score(0.0, reason="the episode ran out of time") if self._environments else None
        return [_Played(episode, TIMEOUT, score) for episode in begun if episode.answered]

    async def _play(self, shared: "_Shared", world: OpenEnvironment | None) -> list["_Played"]:
        """Play an episode without roles. Raises ConfigError if the config has opponents."""
        if self._opponents:
            raise ConfigError(f"agent.opponents: {self._config.agent.environment} has no roles; leave them out")
        tools, prompt = shared.tools, shared.group.task.prompt
        if world is not None:
            prompt = joined(prompt, await world.reset())
            tools = [*tools, *distinct(world.tools(), shared.of_servers)]
        episode, reason = await self._converse(shared, prompt, tools, world)
        return [_Played(episode, reason, await world.reward() if world else None)]

    async def _play_game(self, shared: "_Shared", game: OpenGame) -> list["_Played"]:
        """Play an episode of several roles; return those that the policy played."""
        check_opponents(game.roles, self._opponents)
        first, of_game = await game.reset(), game.tools()
        if armed := [role for role in self._opponents if of_game[role]]:
            raise ConfigError(f"agent.opponents: {armed[0]} has tools in this game, which opponents cannot call")
        of_roles = {role: distinct(tools, shared.of_servers) for role, tools in of_game.items()}

        async def converse(seat: Seat, prompt: list[Message]) -> tuple[Episode, str]:
            return await self._converse(shared, prompt, [*shared.tools, *of_roles[seat.role]], seat, seat.role)

        prompt, turns = shared.group.task.prompt, self._config.agent.max_turns
        played = await play_game(game, first, prompt, converse, self._opponents, turns)
        scores = await game.reward()
        return [_Played(episode, reason, scores[role]) for role, (episode, reason) in played.items()]

    async def _converse(
        self,
        shared: "_Shared",
        prompt: Sequence[Message],
        tools: Sequence[CallableTool],
        world: Answering | None,
        role: str = "",
    ) -> tuple[Episode, str]:
        """Play one conversation of an episode, with a workspace of its own; return it, and why it ended."""
        async with contextlib.AsyncExitStack() as stack:
            # A task may name them itself.
            if any(tool in TOOLS_OF_CODE for tool in tools):
                code = await stack.enter_async_context(CodeTools(self._services.sandbox(), self._config))
                tools = code.bind(tools)
            if self._chat.pictures is not None:
                await self._chat.pictures.check(images_of(prompt))
            episode = await off_loop(
                text_size(prompt),
                Episode,
                shared.group,
                shared.sample,
                config=self._config,
                chat=self._chat,
                generator=self._generator,
                tools=tools,
                environment=world,
                prompt=prompt,
                role=role,
            )
            shared.begun.append(episode)
            name, loop = self._loop_of(shared.group.task)
            reason: object = await contained(loop(episode))
            # A user's loop may forget to return it.
            if not isinstance(reason, str):
                raise ConfigError(
                    f"agent.loop: {name} returned {reason!r:.80}; it must return why the episode ended, a string such "
                    "as 'stop': often what `await episode.generate()` returned"
                )
            return episode, reason

    def _loop_of(self, task: Task) -> tuple[str, Loop]:
        """Return the loop that plays a task, and its name; log once if a loop overrides the config's."""
        configured = self._config.agent.loop
        name = task.agent or configured
        loop = get_loop(name)
        if loop is not get_loop(configured) and name not in self._logged_loops:
            self._logged_loops.add(name)
            log.info("task %s: agent_name=%s overrides agent.loop=%s (logged once)", task.task_id, name, configured)
        return name, loop

    def _rows(self, episode: Episode, reason: str, score: Score | None) -> list[Trajectory]:
        """Return the rows of a conversation with the environment's score; log what a user should know of them."""
        if self._random.random() < CHECKED_SHARE and (at := episode.drift()) is not None:
            log.warning(
                "task %s: from token %d on, the episode's tokens differ from the chat template of the whole "
                "conversation; the model is trained on the tokens as sampled",
                episode.task.task_id,
                at,
            )
        rows = episode.trajectories(reason)
        self._log_cut_results(episode)
        if score is None:
            return rows
        rows[-1].reward_parts, rows[-1].reward_reasons = score.named(ENVIRONMENT), score.reasons(ENVIRONMENT)
        if self._unused_reward and score.value:
            self._unused_reward = False
            log.warning(
                "environment %s gives rewards to episodes, and reward.functions does not use them: add {name: %s}",
                self._config.agent.environment,
                ENVIRONMENT,
            )
        return rows

    def _log_cut_results(self, episode: Episode) -> None:
        for call in (call for turn in episode.turns for call in turn.tool_calls):
            if call.cut and call.name not in self._logged_cuts:
                self._logged_cuts.add(call.name)
                log.warning(
                    "tool %s: of a result of %d characters the policy sees the first %d tokens, and a line that says "
                    "so; raise agent.tool_response_tokens if that is too little (logged once per tool; "
                    "rollout/cut_results_mean counts them)",
                    call.name,
                    call.cut,
                    self._config.agent.tool_response_tokens,
                )


class _Shared(NamedTuple):
    """The things that the conversations of an episode share. ``of_servers`` are the tools of MCP servers among
    ``tools``; ``begun`` has each conversation from its beginning on."""

    group: LeasedGroup
    sample: int
    tools: Sequence[CallableTool]
    of_servers: Mapping[str, CallableTool]
    begun: list[Episode]


class _Played(NamedTuple):
    """A conversation that is over, the reason for its end, and the environment's score for it."""

    episode: Episode
    reason: str
    score: Score | None
