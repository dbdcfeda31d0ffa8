"""Gymnasium: a world that is shown as text and acted in by numbers."""

import re

import pytest

from rl_async.errors import ConfigError
from tests.contracts.environments.playing import answered, session


async def test_a_world_in_text() -> None:
    options = {"render_mode": "ansi", "is_slippery": False}
    async with session("gymnasium:FrozenLake-v1", options) as lake:
        (first,) = await lake.reset()
        assert "SFFF" in re.sub(r"\x1b\[\d+m", "", first["content"]) and "from 0 to 3" in first["content"]
        ((refused, messages),) = await answered(lake, "north")
        assert refused.reward is None and "from 0 to 3" in messages[0]["content"]
        path = await answered(lake, *(f"I go {number}" for number in (1, 1, 2, 2, 1, 2)))  # 1 is down, 2 is right
        reward = await lake.reward()
    assert [step.reward for step, _ in path] == [0.0] * 5 + [1.0]
    assert [step.done for step, _ in path] == [False] * 5 + [True]
    assert reward is not None and reward.value == 0.0, "the turns have it"


async def test_what_cannot_be_played_in_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="Pendulum-v1"):
        async with session("gymnasium:Pendulum-v1") as pendulum:
            await pendulum.reset()
