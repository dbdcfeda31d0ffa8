"""Gymnasium: a world that is shown as text and acted in by numbers."""

import pytest

from rl_async.errors import ConfigError
from tests.unit.agent_loop.fakes import answered, session


async def test_a_world_in_text() -> None:
    options = {"render_mode": "ansi", "is_slippery": False}
    async with session("gymnasium:FrozenLake-v1", options) as lake:
        (first,) = await lake.reset()
        assert "[S]FFF\nFHFH" in first["content"], "without escapes, and one sees where one is"
        assert "from 0 to 3: 0 is 'Move left', 1 is 'Move down', 2" in first["content"]
        ((refused, messages),) = await answered(lake, "north")
        assert refused.reward is None and "from 0 to 3" in messages[0]["content"]
        path = await answered(lake, *(f"I go {number}" for number in (1, 1, 2, 2, 1, 2)))  # 1 is down, 2 is right
        reward = await lake.reward()
    assert [step.reward for step, _ in path] == [0.0] * 5 + [1.0]
    assert [step.done for step, _ in path] == [False] * 5 + [True]
    assert reward is not None and reward.value == 0.0, "the turns have it"


@pytest.mark.parametrize("name", ["Blackjack-v1", "CliffWalking-v1", "CartPole-v1", "MountainCar-v0", "Acrobot-v1"])
async def test_the_model_is_told_what_actions_mean(name: str) -> None:
    async with session(f"gymnasium:{name}") as world:
        (first,) = await world.reset()
    assert ": 0 is '" in first["content"], first["content"]


async def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="FrozenLake-v9"):
        async with session("gymnasium:FrozenLake-v9") as lake:
            await lake.reset()


async def test_what_cannot_be_played_in_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="Pendulum-v1"):
        async with session("gymnasium:Pendulum-v1") as pendulum:
            await pendulum.reset()
