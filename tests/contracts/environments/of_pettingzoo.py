"""PettingZoo: games in which agents take turns."""

import gymnasium
import pettingzoo
import pytest

from rl_async.agent_loop.environments.environment_registry import get_environment
from rl_async.agent_loop.environments.session import GameSession, Services
from rl_async.errors import ConfigError
from rl_async.messages import Task
from tests.unit.agent_loop.fakes import run_config

NAME = "pettingzoo:classic/tictactoe-v3"


def game(name: str = NAME) -> GameSession:
    services = Services(run_config(environment=name))
    task = Task(task_id="t", data_source="d", prompt=[], ground_truth="")
    return GameSession(name, get_environment(name).make(task, services), 120.0)


async def test_a_game_of_two_roles() -> None:
    async with game() as played:
        assert played.roles == ("player_1", "player_2")
        first, messages = await played.reset()
        assert first.to == "player_1" and "0, 1, 2, 3, 4, 5, 6, 7, 8." in messages[0]["content"]
        step, messages = await played.step("I take 0")
        assert step.to == "player_2" and "1, 2, 3, 4, 5, 6, 7, 8." in messages[0]["content"]
        for refused in ("0", "the middle", "9"):
            step, messages = await played.step(refused)
            assert (step.to, step.done, step.reason) == ("player_2", False, "no action") and messages
        for move in (3, 1, 4, 2):
            step, _ = await played.step(str(move))
        assert step.done, "0, 1 and 2 are a column"
        assert {role: score.value for role, score in (await played.reward()).items()} == {
            "player_1": 1.0,
            "player_2": -1.0,
        }


async def test_an_unfinished_game_is_worth_nothing() -> None:
    async with game() as played:
        await played.reset()
        assert {score.value for score in (await played.reward()).values()} == {0.0}


def test_what_cannot_be_played_in_text_is_refused() -> None:
    class Boxes(pettingzoo.AECEnv):
        possible_agents = ("one", "two")

        def action_space(self, agent: str) -> gymnasium.Space:
            return gymnasium.spaces.Box(0, 1)

    pettingzoo.register("aec", "test/boxes-v0", Boxes)
    with pytest.raises(ConfigError, match="boxes-v0"):
        game("pettingzoo:test/boxes-v0")
