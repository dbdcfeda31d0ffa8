"""Worlds that the task's seed draws: Gymnasium, PettingZoo, TextArena, OpenEnv and reasoning-gym.

`gymnasium:NAME`, `pettingzoo:ID` (games of agents that take turns, each agent as a role), `textarena:NAME` (games for
one player, or for several as roles), `openenv:URL` (behind OpenEnv's servers), `reasoning_gym:DATASET` (a question, and
its own score of the answer). Each imports its package when it is used. The samples of a group share a seed.
"""

import inspect
import re
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec

from rl_async.agent_loop.environments.session import without_escapes
from rl_async.agent_loop.step import Step
from rl_async.errors import ConfigError
from rl_async.extraction import last_number
from rl_async.messages import Task


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

    def reward(self) -> float:
        return self._score
