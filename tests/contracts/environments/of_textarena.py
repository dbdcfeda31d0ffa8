"""TextArena: a game for one player, won by whoever listens."""

import pytest

from tests.contracts.environments.playing import session


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
