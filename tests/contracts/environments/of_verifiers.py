"""verifiers: its own rollout and rubric, with the policy in the place of its client."""

from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import verifiers

from rl_async.reward_loop.api import Score
from tests.unit.agent_loop.fakes import answered, session


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "modules"))  # verifiers imports environments by name


async def play(name: str, *answers: str, **options: Any) -> tuple[list[tuple[list[str], bool]], Score]:
    row = verifiers.load_environment(name, **options).get_dataset()[0]
    task = {"prompt": row["prompt"], "ground_truth": row["answer"], "extra": {"index": 0}}
    async with session(f"verifiers:{name}", options, **task) as world:
        assert await world.reset() == [], "the prompt is the task's"
        said = [
            ([message["content"] for message in messages], step.done)
            for step, messages in await answered(world, *answers)
        ]
        reward = await world.reward()
    assert reward is not None
    return said, reward


async def test_a_single_turn_is_judged_by_the_rubric() -> None:
    answer = reasoning_gym.create_dataset("basic_arithmetic", size=4, seed=0)[0]["answer"]
    said, right = await play("arithmetic-env", f"<answer>{answer}</answer>")
    _, wrong = await play("arithmetic-env", "no idea")
    assert said == [([], True)]
    assert (right.value, right.extra["check_answer_reward_func"]) == (1.0, 1.0)
    assert wrong.value < 0.5


async def test_several_turns_until_a_stop_condition() -> None:
    said, reward = await play("retry-env", "4", "6", "5")
    assert said == [(["wrong 1"], False), (["wrong 2"], False), ([], True)]
    assert reward.value == pytest.approx(1.0 + 0.5 / 3)
    assert reward.extra["correct"] == 1.0 and reward.extra["few_errors"] == pytest.approx(1 / 3)


async def test_its_own_bound_on_turns_ends_it() -> None:
    said, reward = await play("retry-env", "4", "6", max_turns=2)
    assert said == [(["wrong 1"], False), ([], True)]
    assert reward.value == pytest.approx(0.5 / 2)


async def test_an_episode_that_we_end_is_judged_as_it_stands() -> None:
    said, reward = await play("retry-env", "4")
    assert said == [(["wrong 1"], False)] and reward.extra["correct"] == 0.0
