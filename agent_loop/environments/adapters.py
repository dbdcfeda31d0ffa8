"""Environments of other projects: each class imports its project's package when it is used.

Worlds that the task's seed draws: `gymnasium:NAME`, `pettingzoo:ID` (games of agents that take turns, each agent as a
role), `textarena:NAME` (games for one player, or for several as roles), `openenv:URL` (behind OpenEnv's servers),
`reasoning_gym:DATASET` (a question, and its own score of the answer). The samples of a group share a seed.

`verifiers:NAME`: environments of verifiers' classic interface (`load_environment`), with their rubric. verifiers' own
rollout runs, and asks the adapter for the model's answers: so a SingleTurnEnv, a MultiTurnEnv and classes derived from
them decide themselves about their messages and the end.

    answer ──> step() ──> the rollout's pending request ──> env_response ──> next request ──> observation

`verl:FILE.yaml`: verl's interactions and tools (`verl.interactions`, `verl.tools`), unchanged. FILE is the file of
verl's `multi_turn.interaction_config_path` or `multi_turn.tool_config_path`: a list `interaction` of `{name,
class_name, config}`, or a list `tools` of `{class_name, config, tool_schema}`; two files are joined by a comma. The
columns of `extra_info` are verl's. `interaction_kwargs` has the `name` of the task's interaction and its arguments;
`tools_kwargs` has, for each tool by name, `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs` and `release_kwargs`;
`tool_selection` lists the task's tools, and without it a task has all.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import re
import signal
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.session import without_escapes
from rl_async.agent_loop.tools.tool import Step, ToolResult, failed
from rl_async.concurrency import outcomes, time_limit
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.extraction import last_number
from rl_async.files import UNDECODABLE
from rl_async.messages import Task
from rl_async.userload import load_user_object


def seed_of(task: Task) -> int:
    """Return ``extra_info.seed``, or a number made from the task's id."""
    seed = task.extra.get("seed")
    return seed if isinstance(seed, int) else zlib.crc32(task.task_id.encode()) & 0x7FFFFFFF


# A line of the section "Action Space" that Gymnasium's own environments have in their documentation.
_MEANING = re.compile(r"^\s*[-|]\s*(\d+)\s*[:|]\s*([^|\n]+?)\s*(?:\||$)", re.MULTILINE)


class Gymnasium:
    """Options are those of ``gymnasium.make``; with ``render_mode: ansi`` the model sees the rendering.

    The action is the answer itself in a Text space, and the last number of the answer in a Discrete one; the model is
    told the meanings of the numbers, if the environment documents them. Every step's reward is its turn's; an answer
    without an action has none, and the model is told.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._task, self._options = name, task, options

    def reset(self) -> str:
        import gymnasium

        try:
            self._world: Any = gymnasium.make(self._name, **self._options)
        # The environment or version is unknown, or a package that it needs is missing.
        except gymnasium.error.Error as error:
            raise ConfigError(f"agent.environment: gymnasium:{self._name}: {error}") from error
        self._how = how_to_act(f"gymnasium:{self._name}", self._world.action_space, meanings(self._world.unwrapped))
        observation, _ = self._world.reset(seed=seed_of(self._task))
        return "\n".join(filter(None, [self._shown(observation), self._how]))

    def step(self, answer: str) -> Step:
        action = action_of(answer, self._world.action_space)
        if action is None:
            return Step(self._how or "That is no action.", reason="no action")
        observation, reward, terminated, truncated, _ = self._world.step(action)
        return Step(self._shown(observation), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        if hasattr(self, "_world"):
            self._world.close()

    def _shown(self, observation: Any) -> str:
        return without_escapes(str(self._world.render() if self._world.render_mode == "ansi" else observation))


def meanings(world: Any) -> dict[int, str]:
    """Return the meanings of an environment's numbered actions, as far as it documents them."""
    if hasattr(world, "get_action_meanings"):
        return dict(enumerate(map(str, world.get_action_meanings())))
    _, _, section = (inspect.getdoc(type(world)) or "").partition("Action Space")
    return {
        int(number): meaning for number, meaning in _MEANING.findall(section.partition("\n#")[0].partition(" ##")[0])
    }


def how_to_act(name: str, space: Any, known: Mapping[int, str] | None = None) -> str:
    """Return how to answer in an action space; empty where any text is an action.

    Raises ConfigError, naming the environment, for a space of other things than texts or numbers.
    """
    import gymnasium

    if isinstance(space, gymnasium.spaces.Text):
        return ""
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(f"agent.environment: actions of {name} are {space}, not text or a number")
    numbers = range(int(space.start), int(space.start + space.n))
    told = f"Answer with a number from {numbers[0]} to {numbers[-1]}"
    if not known or any(number not in known for number in numbers):
        return f"{told}."
    return f"{told}: {', '.join(f'{number} is {known[number]!r}' for number in numbers)}."


def action_of(answer: str, space: Any) -> Any:
    """Return the action that an answer names, or None."""
    import gymnasium

    if isinstance(space, gymnasium.spaces.Text):
        return answer if answer in space else None
    number = last_number(answer)
    action = int(number) if number is not None and number.lstrip("-").isdecimal() else None
    return action if action is not None and space.start <= action < space.start + space.n else None


class PettingZoo:
    """Options are those of ``pettingzoo.make``.

    With ``render_mode: ansi`` agents see the rendering. Actions are as for `gymnasium:NAME`; an answer without an
    action that is allowed at that moment is not played, and the agent is told. A reward of the game counts for the
    agent that gets it, even after another's move.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        import pettingzoo

        self._seed, self._game = seed_of(task), pettingzoo.make("aec", name, **options)
        self.roles = tuple(map(str, self._game.possible_agents))
        # Raises for actions that are neither text nor numbers.
        for agent in self._game.possible_agents:
            how_to_act(f"pettingzoo:{name}", self._game.action_space(agent))
        self._totals = dict.fromkeys(self.roles, 0.0)

    def reset(self) -> Step:
        self._game.reset(seed=self._seed)
        return self._turn()

    def step(self, answer: str) -> Step:
        game = self._game
        agent = game.agent_selection
        allowed = self._allowed(agent)
        action = action_of(answer, game.action_space(agent))
        if action is None or (allowed is not None and action not in allowed):
            return Step(self._how(agent), to=str(agent), reason="no action")
        self._play(action)
        while game.agents and (game.terminations[game.agent_selection] or game.truncations[game.agent_selection]):
            self._play(None)
        return self._turn() if game.agents else Step(done=True)

    def reward(self) -> dict[str, float]:
        return dict(self._totals)

    def close(self) -> None:
        self._game.close()

    def _play(self, action: Any) -> None:
        self._game.step(action)
        for agent, reward in self._game.rewards.items() if action is not None else ():
            self._totals[str(agent)] += float(reward)

    def _turn(self) -> Step:
        agent = self._game.agent_selection
        seen = self._game.render() if self._game.render_mode == "ansi" else self._game.observe(agent)
        if isinstance(seen, Mapping) and "observation" in seen:
            seen = seen["observation"]
        return Step(f"{without_escapes(str(seen))}\n{self._how(agent)}".strip(), to=str(agent))

    def _allowed(self, agent: Any) -> list[int] | None:
        """Return the actions that are allowed now, or None if the game does not say."""
        seen = self._game.observe(agent)
        mask = seen.get("action_mask") if isinstance(seen, Mapping) else self._game.infos[agent].get("action_mask")
        return None if mask is None else [place for place, may in enumerate(mask) if may]

    def _how(self, agent: Any) -> str:
        allowed = self._allowed(agent)
        told = how_to_act("", self._game.action_space(agent))
        return told if allowed is None else f"Answer with one of these numbers: {', '.join(map(str, allowed))}."


PLAYERS = "num_players"
# The sender of the game's own messages.
GAME = -1
# TextArena draws from Python's global generator, which it seeds in reset.
_RESETTING = threading.Lock()


def text_arena(name: str, task: Task, options: Mapping[str, Any]) -> "TextArena | TextArenaRoles":
    """Make a game. ``options`` are those of ``textarena.make``, and ``num_players``, by default 1.

    Raises ConfigError for an invalid number of players.
    """
    players = options.get(PLAYERS, 1)
    if not isinstance(players, int) or players < 1:
        raise ConfigError(f"agent.environment_options.{PLAYERS}={players!r} is not a number from 1 on")
    options = {key: value for key, value in options.items() if key != PLAYERS}
    return TextArena(name, task, options) if players == 1 else TextArenaRoles(name, task, options, players)


class TextArena:
    """A game for one player. The game's own reward is the episode's.

    Random numbers that a game draws after its reset are not reproducible.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._game = _Game(name, options)
        self._seed = seed_of(task)

    def reset(self) -> str:
        self._game.begin(1, self._seed)
        return self._game.news()[1]

    def step(self, answer: str) -> Step:
        return Step(done=True) if self._game.play(answer) else Step(self._game.news()[1])

    def reward(self) -> dict[str, float]:
        return {"score": self._game.rewards().get(0, 0.0)}


class TextArenaRoles:
    """A game for several players, whose roles are ``player-0``, ``player-1`` and so on."""

    def __init__(self, name: str, task: Task, options: Mapping[str, Any], players: int) -> None:
        self._game = _Game(name, options)
        self._seed = seed_of(task)
        self.roles = tuple(f"player-{number}" for number in range(players))

    def reset(self) -> Step:
        self._game.begin(len(self.roles), self._seed)
        return self._turn()

    def step(self, answer: str) -> Step:
        return Step(done=True) if self._game.play(answer) else self._turn()

    def reward(self) -> dict[str, float]:
        rewards = self._game.rewards()
        return {role: rewards.get(number, 0.0) for number, role in enumerate(self.roles)}

    def _turn(self) -> Step:
        player, news = self._game.news()
        return Step(news, to=self.roles[player])


class _Game:
    """A game of TextArena, which tells each player only what is new."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name, self._options = name, options

    def begin(self, players: int, seed: int) -> None:
        import textarena

        self._game: Any = textarena.make(self._name, **self._options)
        with _RESETTING:
            self._game.reset(num_players=players, seed=seed)
        self._inner: Any = self._game
        # The wrappers of observations repeat the whole game each time.
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env

    def play(self, answer: str) -> bool:
        """Pass the answer of the player whose turn it is to the game; return whether the game is over."""
        done, _ = self._game.step(answer)
        return bool(done)

    def news(self) -> tuple[int, str]:
        """Return the player whose turn it is, and the messages of the game and the others since its last turn."""
        player, messages = self._inner.get_observation()
        names = self._inner.state.role_mapping
        said = [
            text if sender == GAME else f"[{names.get(sender, sender)}] {text}"
            for sender, text, _ in messages
            if sender != player
        ]
        return player, "\n".join(said)

    def rewards(self) -> dict[int, float]:
        """Return the players' rewards, which are empty until the game is over."""
        rewards, _ = self._game.close()
        return {player: float(reward) for player, reward in (rewards or {}).items()}


class OpenEnv:
    """Options: ``action``, the field of the action that takes the answer (``message``), and ``observation``, the field
    that the model sees; without it, the whole observation as JSON. Every step's reward is its turn's.

    OpenEnv's generic client is used, so nothing of the environment is installed here, and none of its code runs.
    """

    def __init__(self, url: str, task: Task, options: Mapping[str, Any]) -> None:
        self._url, self._task = url, task
        self._client: Any = None
        self._action, self._observation = options.get("action", "message"), options.get("observation")

    async def reset(self) -> str:
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url)
        result = await self._client.reset(seed=seed_of(self._task))
        return self._shown(result.observation)

    async def step(self, answer: str) -> Step:
        result = await self._client.step({self._action: answer})
        return Step(self._shown(result.observation), reward=result.reward, done=bool(result.done))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        shown = observation if self._observation is None else observation[self._observation]
        return shown if isinstance(shown, str) else msgspec.json.encode(shown).decode()


class ReasoningGym:
    """Options are the data set's parameters. The answer is the text in ``<answer>`` tags, or all of the turn."""

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._seed, self._options = name, seed_of(task), options
        self._score = 0.0

    def reset(self) -> str:
        import reasoning_gym

        try:
            self._dataset = reasoning_gym.create_dataset(self._name, size=1, seed=self._seed, **self._options)
        # The data set or a parameter is unknown.
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"agent.environment: reasoning_gym:{self._name}: {error}") from error
        self._entry = self._dataset[0]
        return str(self._entry["question"])

    def step(self, answer: str) -> Step:
        from reasoning_gym.utils import extract_answer

        said = extract_answer(answer) or answer
        try:
            self._score = float(self._dataset.score_answer(said.strip(), self._entry))
        # Some scorers raise on an answer of another form; an episode that is played again for it would bias training.
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            self._score = 0.0
        return Step(done=True)

    async def reward(self) -> float:
        # A coroutine, which needs no thread.
        return self._score


class Verifiers:
    """Options are those of the environment's ``load_environment``. The rubric's reward is the episode's.

    A task has its columns where verl has them: ``prompt``, the ground truth (``answer``) and ``extra_info.info``. Tools
    that verifiers offers in the request itself (ToolEnv), and rubrics that compare whole groups, are refused.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._task, self._options = name, task, options
        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._pending: _Request | None = None
        self._rollout: asyncio.Task[Any] | None = None

    async def reset(self) -> list[Message]:
        self._world = _load(self._name, msgspec.json.encode(self._options))
        task = self._task
        row = {
            "prompt": task.prompt,
            "answer": task.ground_truth,
            "example_id": task.extra.get("index", 0),
            "info": task.extra.get("info") or {},
        }
        rollout = self._world.rollout(row, _client(self._requests), "policy", {})
        self._rollout = asyncio.create_task(rollout, name="verifiers")
        first = await self._next_request()
        if first is None:
            raise EnvironmentFailed(f"verifiers:{self._name} ended before the first turn")
        if first.messages[: len(task.prompt)] != _plain(task.prompt):
            raise EnvironmentFailed(f"verifiers:{self._name} changes the prompt of its task, which is already fixed")
        return first.messages[len(task.prompt) :]

    async def step(self, answer: str) -> Step:
        assert self._pending is not None
        # The messages until now, and this answer.
        known = len(self._pending.messages) + 1
        self._pending.answer.set_result(answer)
        request = await self._next_request()
        if request is None:
            return Step(done=True)
        return Step(request.messages[known:] or None)

    async def reward(self) -> dict[str, float]:
        import verifiers

        assert self._rollout is not None
        # The episode ended on our side: turns or tokens were used up.
        if self._pending is not None:
            self._pending.answer.set_exception(verifiers.OverlongPromptError("the episode has no room for more"))
            self._pending = None
        state = await self._rollout
        await self._world.rubric.score_rollout(state)
        metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
        return metrics | {"score": float(state["reward"])}

    async def close(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.wait([self._rollout])

    async def _next_request(self) -> "_Request | None":
        """Wait for the rollout's next request; None at its end. Raises EnvironmentFailed if it ended in error."""
        assert self._rollout is not None
        asked = asyncio.create_task(self._requests.get(), name="verifiers request")
        try:
            await asyncio.wait([asked, self._rollout], return_when=asyncio.FIRST_COMPLETED)
            self._pending = asked.result() if asked.done() else None
        finally:
            asked.cancel()
        if self._pending is None and (error := (await self._rollout).get("error")):
            raise EnvironmentFailed(f"verifiers:{self._name}: {type(error).__name__}: {error}")
        return self._pending


class _Request:
    """The conversation that the model is asked to continue."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()


@functools.cache
def _load(name: str, options: bytes) -> Any:
    """Load an environment, which works in the main thread alone: it handles signals, and those are the worker's."""
    import verifiers

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return verifiers.load_environment(name, **msgspec.json.decode(options))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _plain(messages: Sequence[Any]) -> list[Message]:
    """Return messages of any form with role and content as text."""
    plain = []
    for message in messages:
        given = message if isinstance(message, dict) else message.model_dump()
        content = given.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        plain.append({"role": given["role"], "content": content or ""})
    return plain


def _client(requests: "asyncio.Queue[_Request]") -> Any:
    """Make verifiers' client of a model that is asked through ``requests``."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Policy(Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Response:
            if tools:
                raise EnvironmentFailed("verifiers: environments that offer tools in the request are not supported")
            request = _Request(_plain(prompt))
            requests.put_nowait(request)
            said = await request.answer
            message = ResponseMessage(content=said, finish_reason="stop", is_truncated=False)
            return Response(id="episode", created=0, model=model, message=message)

        def setup_client(self, config: Any) -> Any: ...
        async def to_native_tool(self, tool: Any) -> Any: ...
        async def to_native_prompt(self, messages: Any) -> Any: ...
        async def get_native_response(self, *_: Any, **__: Any) -> Any: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def from_native_response(self, response: Any) -> Any: ...
        async def close(self) -> None: ...

    return Policy(None)


class EpisodeInteraction:
    """An episode with an interaction of verl. As there, its score is the sum of the turns' scores, and
    ``calculate_score`` is not called from outside."""

    def __init__(self, known: Mapping[str, Any], task: Task) -> None:
        given = task.extra.get("interaction_kwargs") or {}
        # Arrow fills in the keys of other rows.
        self._kwargs = {key: value for key, value in given.items() if value is not None}
        self._interaction = _chosen(known, self._kwargs.get("name"), task)
        self._id, self._scores = f"{task.task_id}.{uuid.uuid4().hex}", list[float]()
        self._messages: list[Message] = [dict(message) for message in task.prompt]

    async def start(self) -> None:
        """Begin the episode."""
        self._id = await self._interaction.start_interaction(self._id, **self._kwargs)

    async def step(self, answer: str) -> Step:
        """Answer a turn."""
        self._messages.append({"role": "assistant", "content": answer})
        done, text, score, _ = await self._interaction.generate_response(self._id, self._messages, **self._kwargs)
        self._messages.append({"role": "user", "content": text})
        self._scores.append(float(score))
        return Step(text, done=bool(done))

    def reward(self) -> dict[str, float]:
        """Return the episode's score, and the last turn's."""
        return {"score": sum(self._scores), "last": self._scores[-1] if self._scores else 0.0}

    async def finalize(self) -> None:
        """End the episode."""
        finalize = self._interaction.finalize_interaction
        # The base class takes no id.
        await (finalize(self._id) if inspect.signature(finalize).parameters else finalize())


def _chosen(known: Mapping[str, Any], name: str | None, task: Task) -> Any:
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None or name not in known:
        raise DataError(
            f"task {task.task_id}: extra_info.interaction_kwargs.name is {name!r}; known: {', '.join(known)}"
        )
    return known[name]


# The arguments of a task for a tool, by verl's names above.
Kwargs = dict[str, dict[str, Any]]


def make_tool(kind: Callable[..., Any], config: dict[str, Any], schema: dict[str, Any] | None) -> Any:
    """Make a tool of verl; without a schema it has its own."""
    if schema is None:
        return kind(config=config, tool_schema=None)
    # verl's tools are written for this class.
    schemas = importlib.import_module("verl.tools.schemas")
    return kind(config=config, tool_schema=schemas.OpenAIFunctionToolSchema.model_validate(schema))


class VerlTool:
    """A tool of verl with the instance of one episode, a ``CallableTool``."""

    def __init__(self, tool: Any, kwargs: Kwargs) -> None:
        self.name: str = tool.name
        self.schema: dict[str, Any] = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        self._tool, self._kwargs = tool, kwargs
        self._id, self.earned = uuid.uuid4().hex, 0.0

    async def create(self) -> None:
        """Make the instance."""
        given = self._kwargs.get("create_kwargs", {})
        # Tools read them as arguments, as verl documents, or from `create_kwargs`, as its agent loop calls them.
        made = await self._tool.create(self._id, **{"create_kwargs": given, **given})
        # verl returns a response, too, since 0.5.
        self._id = made[0] if isinstance(made, tuple) else made

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Execute the tool. As in verl, an error is the call's result."""
        try:
            async with time_limit(timeout_s):
                given = self._kwargs.get("execute_kwargs", {})
                response, reward, _ = await self._tool.execute(self._id, arguments, **given)
            text, earned = _text(response), float(reward or 0.0)
        except TimeoutError:
            return failed("timeout")
        # A tool is the user's code and may raise anything.
        except Exception as error:
            return failed(str(error) or type(error).__name__)
        self.earned += earned
        return ToolResult(text)

    async def reward(self) -> float:
        return float(await self._tool.calc_reward(self._id, **self._kwargs.get("calc_reward_kwargs", {})))

    async def release(self) -> None:
        """End the instance."""
        await self._tool.release(self._id, **self._kwargs.get("release_kwargs", {}))


class EpisodeTools:
    """The tools of a task, each with one instance for the episode. Raises DataError for one that does not exist."""

    def __init__(self, known: Mapping[str, Any], task: Task) -> None:
        kwargs = _without_none(task.extra.get("tools_kwargs") or {})
        selected = task.extra.get("tool_selection") or list(known)
        if unknown := [name for name in selected if name not in known]:
            raise DataError(f"task {task.task_id}: extra_info.tool_selection: no tool {unknown[0]!r}: {list(known)}")
        self.tools = [VerlTool(known[name], kwargs.get(name, {})) for name in selected]
        self._created: list[VerlTool] = []

    async def create(self) -> None:
        """Make the instances."""
        for tool in self.tools:
            await tool.create()
            self._created.append(tool)

    async def reward(self) -> dict[str, float]:
        """Return the sum of all rewards: those of the calls, and each tool's final one, as ``tool_NAME``."""
        final = {f"tool_{tool.name}": await tool.reward() for tool in self.tools}
        calls = sum(tool.earned for tool in self.tools)
        return {"score": sum(final.values()) + calls, **final, **({"calls": calls} if final else {})}

    async def release(self) -> None:
        """End the instances; raises the first error, after all were tried."""
        ended = await outcomes(*(tool.release() for tool in self._created))
        for error in ended:
            if isinstance(error, BaseException):
                raise error


def _without_none(given: Any) -> Any:
    """Return mappings without the keys that Arrow fills in for other rows' sake."""
    if not isinstance(given, dict):
        return given
    return {key: _without_none(value) for key, value in given.items() if value is not None}


def _text(response: Any) -> str:
    """Read a response: a text, or verl's ToolResponse, whose images and videos are named only."""
    if isinstance(response, str):
        return response
    left_out = [f"[{kind}s are not shown]" for kind in ("image", "video") if getattr(response, kind, None)]
    return "\n".join([response.text or "", *left_out]).strip() if left_out else response.text or ""


class _Interaction(msgspec.Struct):
    class_name: str
    name: str = ""
    config: dict[str, Any] = {}


class _Tool(msgspec.Struct):
    class_name: str
    config: dict[str, Any] = {}
    tool_schema: dict[str, Any] | None = None


class _File(msgspec.Struct):
    interaction: list[_Interaction] = []
    tools: list[_Tool] = []


class Listed(NamedTuple):
    """The interactions and tools of verl's files by name. As in verl, they serve all episodes of a process."""

    interactions: Mapping[str, Any]
    tools: Mapping[str, Any]


class Verl:
    """An episode with verl's tools, its interaction, or both. Their scores add up to the episode's reward."""

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        listed = listed_in(name)
        self._tools = EpisodeTools(listed.tools, task)
        self._interaction = EpisodeInteraction(listed.interactions, task) if listed.interactions else None

    async def reset(self) -> None:
        await self._tools.create()
        if self._interaction is not None:
            await self._interaction.start()

    def tools(self) -> Sequence[VerlTool]:
        return self._tools.tools

    async def step(self, answer: str) -> Step:
        return Step(done=True) if self._interaction is None else await self._interaction.step(answer)

    async def reward(self) -> dict[str, float]:
        parts = await self._tools.reward()
        if self._interaction is not None:
            said = self._interaction.reward()
            parts |= said | {"score": parts["score"] + said["score"]}
        return parts

    async def close(self) -> None:
        # The stack calls both, even if one raises.
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._tools.release)
            if self._interaction is not None:
                stack.push_async_callback(self._interaction.finalize)


@functools.cache
def listed_in(files: str) -> Listed:
    """Make the objects that files of verl, joined by commas, list. Raises ConfigError naming the mistake in them."""
    key = f"agent.environment=verl:{files}"
    interactions, tools = dict[str, Any](), dict[str, Any]()
    for file in files.split(","):
        try:
            listed = msgspec.yaml.decode(Path(file).read_bytes(), type=_File)
        except (OSError, *UNDECODABLE) as error:
            raise ConfigError(f"{key}: {file}: {error}") from error
        if not listed.interaction and not listed.tools:
            raise ConfigError(f"{key}: {file} lists neither interactions nor tools")
        for entry in listed.interaction:
            name = entry.class_name.rpartition(".")[2].removesuffix("Interaction").lower()
            # verl derives a missing name from the class.
            called = entry.name or name
            interactions[called] = _class(entry.class_name, key)({"name": called, **entry.config})
        for declared in listed.tools:
            if (kind := declared.config.get("type", "native")) != "native":
                raise ConfigError(f"{key}: {file}: {declared.class_name} is of type {kind!r}; for MCP use agent.mcp")
            tool = make_tool(_class(declared.class_name, key), declared.config, declared.tool_schema)
            tools[tool.name] = tool
    return Listed(interactions, tools)


def _class(dotted: str, key: str) -> Callable[..., Any]:
    module, _, name = dotted.rpartition(".")
    kind: Callable[..., Any] = load_user_object(f"{module}:{name}", key)
    return kind
