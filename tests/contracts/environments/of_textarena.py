"""TextArena: a game for one player, won by whoever listens, and games for two."""

from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.environment_registry import LocalEnvironments
from rl_async.agent_loop.environments.session import OpenGame, Services
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.tools.tool import Step
from rl_async.errors import ConfigError
from rl_async.messages import Task
from rl_async.reward_loop.api import Score
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config, session

NIM = {"environment": "textarena:Nim-v0", "environment_options": {"num_players": 2, "piles": [1, 2]}}


@pytest.mark.parametrize("seed", [3, 4])
async def test_a_game(seed: int) -> None:
    low, high = 1, 20
    async with session("textarena:GuessTheNumber-v0", extra={"seed": seed}) as game:
        (first,) = await game.reset()
        assert "Guess The Number" in first["content"]
        for _ in range(5):  # halving needs no more
            guess = (low + high) // 2
            step, messages = await game.step(f"I try [{guess}]")
            if step.done:
                break
            (said,) = messages
            assert "Guess The Number" not in said["content"], "it is told once"
            low, high = (guess + 1, high) if "higher" in said["content"] else (low, guess - 1)
        reward = await game.reward()
    assert step.done and reward is not None and reward.value == 1.0


async def test_a_game_that_is_not_finished_has_no_reward() -> None:
    async with session("textarena:GuessTheNumber-v0") as game:
        await game.reset()
        reward = await game.reward()
    assert reward is not None and reward.value == 0.0


async def test_the_same_task_is_the_same_game() -> None:
    prompts = set()
    for _ in range(2):
        async with session("textarena:Countdown-v0", extra={"seed": 3}) as game:
            (first,) = await game.reset()
            prompts.add(first["content"])
    assert len(prompts) == 1


def world(**agent: Any) -> LocalEnvironments:
    config = run_config(**agent)
    return LocalEnvironments(str(config.agent.environment), Services(config))


def task(seed: int = 3) -> Task:
    return Task(task_id="t", data_source="d", prompt=[], ground_truth="", extra={"seed": seed})


async def test_players_take_turns_and_one_wins_what_the_other_loses() -> None:
    async with world(**NIM).open(task()) as game:
        assert isinstance(game, OpenGame) and list(game.roles) == ["player-0", "player-1"]
        first, (told,) = await game.reset()
        assert first.to == "player-0" and "Welcome to Nim, Player 0" in told["content"]
        said = []
        for answer in ("[1 1]", "[0 1]", "[1 1]"):
            step, messages = await game.step(answer)
            said.append((step.to, [message["content"] for message in messages]))
        assert await game.reward() == {"player-0": Score(1.0), "player-1": Score(-1.0)}
    assert step == Step(done=True)
    (to, (second,)), (back, (third,)), _ = said
    assert (to, back) == ("player-1", "player-0")
    assert "Welcome to Nim, Player 1" in second and "[Player 0] [1 1]" in second, "it sees what was said before"
    assert "Welcome" not in third and "[Player 1] [0 1]" in third and "[1 1]" not in third, "only what is new"


async def test_a_move_that_is_none_is_tried_again_and_then_loses() -> None:
    async with world(**NIM).open(task()) as game:
        assert isinstance(game, OpenGame)
        await game.reset()
        step, messages = await game.step("hello")
        assert step.to == "player-0" and "invalid move" in messages[0]["content"]
        step, _ = await game.step("hello")
        assert step.done and await game.reward() == {"player-0": Score(-1.0), "player-1": Score(1.0)}


async def test_who_begins_is_the_games_choice_and_the_same_for_the_same_task() -> None:
    began = {}
    for seed in (*range(6), *range(6)):
        kuhn = world(environment="textarena:KuhnPoker-v0", environment_options={"num_players": 2})
        async with kuhn.open(task(seed)) as game:
            assert isinstance(game, OpenGame)
            step, (told,) = await game.reset()
            assert began.setdefault(seed, (step.to, told["content"])) == (step.to, told["content"])
            assert {score.value for score in (await game.reward()).values()} == {0.0}, "it is not over"
    assert {role for role, _ in began.values()} == {"player-1"}
    assert len({told for _, told in began.values()}) > 1, "their cards"


async def test_an_episode_of_two_players_becomes_a_row_for_each() -> None:
    renderer = ChatRenderer(train_tokenizer(demos("shop", 100), 300))
    sizes = {"max_model_len": 4000}
    config = run_config(sizes, **NIM, max_tokens=4000)
    engine = ScriptedEngine(renderer, ["[1 1]", "[0 1]", "[1 1]"])
    rows = await EpisodeRunner(config, renderer, engine).run(leased("Play to win."), 0)
    assert [(row.role, row.reward_parts["environment"]) for row in rows] == [("player-0", 1.0), ("player-1", -1.0)]
    answers = [[turn.text for turn in row.turns if turn.role == "assistant"] for row in rows]
    assert answers == [["[1 1]", "[1 1]"], ["[0 1]"]]


@pytest.mark.parametrize("players", [0, "two", 1.5])
async def test_a_number_of_players_that_is_none_is_refused(players: Any) -> None:
    with pytest.raises(ConfigError, match=r"agent\.environment_options\.num_players"):
        async with world(environment="textarena:Nim-v0", environment_options={"num_players": players}).open(task()):
            pass
