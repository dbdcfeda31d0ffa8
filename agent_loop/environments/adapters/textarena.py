"""`textarena:NAME`: games of TextArena for one player."""

import threading
from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.environments.adapters.seeds import seed_of
from rl_async.agent_loop.step import Step
from rl_async.messages import Task

_RESETTING = threading.Lock()  # TextArena draws from Python's global generator, which it seeds in reset


class TextArena:
    """Options are those of ``textarena.make``. The game's own reward is the episode's.

    What a game draws after its reset is not reproducible.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._task, self._options = name, task, options

    def reset(self) -> str:
        import textarena

        self._game: Any = textarena.make(self._name, **self._options)
        with _RESETTING:
            self._game.reset(num_players=1, seed=seed_of(self._task))
        return self._news()

    def step(self, answer: str) -> Step:
        done, _ = self._game.step(answer)
        return Step(done=True) if done else Step(self._news())

    def reward(self) -> dict[str, float]:
        rewards, _ = self._game.close()
        return {"score": float((rewards or {}).get(0, 0.0))}

    def _news(self) -> str:
        """Return what the game has said since the last turn: wrappers would repeat the whole game each time."""
        game = self._game
        while hasattr(game, "env"):
            game = game.env
        player, messages = game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender != player)
