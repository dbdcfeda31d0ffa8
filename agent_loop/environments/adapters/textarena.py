"""`textarena:NAME`: games of TextArena for one player, or for several as roles."""

import threading
from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.environments.adapters.seeds import seed_of
from rl_async.agent_loop.step import Step
from rl_async.errors import ConfigError
from rl_async.messages import Task

PLAYERS = "num_players"
GAME = -1  # who says what no player says
_RESETTING = threading.Lock()  # TextArena draws from Python's global generator, which it seeds in reset


def text_arena(name: str, task: Task, options: Mapping[str, Any]) -> "TextArena | TextArenaRoles":
    """Make a game. ``options`` are those of ``textarena.make``, and ``num_players``, 1 if it is not there.

    Raises ConfigError for a number of players that is none.
    """
    players = options.get(PLAYERS, 1)
    if not isinstance(players, int) or players < 1:
        raise ConfigError(f"agent.environment_options.{PLAYERS}={players!r} is not a number from 1 on")
    options = {key: value for key, value in options.items() if key != PLAYERS}
    return TextArena(name, task, options) if players == 1 else TextArenaRoles(name, task, options, players)


class TextArena:
    """A game for one player. The game's own reward is the episode's.

    What a game draws after its reset is not reproducible.
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
        while hasattr(self._inner, "env"):  # the wrappers of observations repeat the whole game each time
            self._inner = self._inner.env

    def play(self, answer: str) -> bool:
        """Tell the game what the player said whose turn it is; return whether it is over."""
        done, _ = self._game.step(answer)
        return bool(done)

    def news(self) -> tuple[int, str]:
        """Return whose turn it is, and what the game and the others have said since the player's last one."""
        player, messages = self._inner.get_observation()
        names = self._inner.state.role_mapping
        said = [
            text if sender == GAME else f"[{names.get(sender, sender)}] {text}"
            for sender, text, _ in messages
            if sender != player
        ]
        return player, "\n".join(said)

    def rewards(self) -> dict[int, float]:
        """Return the players' rewards; none as long as the game is not over."""
        rewards, _ = self._game.close()
        return {player: float(reward) for player, reward in (rewards or {}).items()}
