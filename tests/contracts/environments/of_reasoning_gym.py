"""reasoning-gym: a question, and its own score of the answer."""

import pytest

from rl_async.errors import ConfigError
from tests.unit.agent_loop.fakes import session

OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}


@pytest.mark.parametrize("written", ["{}", "so it is <answer>{}</answer>"])
async def test_a_question_is_scored_by_its_data_set(written: str) -> None:
    async with session("reasoning_gym:chain_sum", OPTIONS, extra={"seed": 3}) as asked:
        (first,) = await asked.reset()
        question = first["content"].rpartition(":")[2].strip(" =?")
        step, messages = await asked.step(written.format(eval(question)))
        assert step.done and messages == []
        score = await asked.reward()
    async with session("reasoning_gym:chain_sum", OPTIONS, extra={"seed": 3}) as again:
        assert (await again.reset())[0] == first
        await again.step(written.format(99))
        wrong = await again.reward()
    assert score is not None and wrong is not None and score.value == 1.0 > wrong.value


@pytest.mark.parametrize(("name", "answer"), [("coin_flip", "1e999"), ("game_of_life", "{}"), ("boxnet", "42")])
async def test_an_answer_that_its_data_set_cannot_read_earns_nothing(name: str, answer: str) -> None:
    async with session(f"reasoning_gym:{name}", {}, extra={"seed": 3}) as asked:
        await asked.reset()
        assert (await asked.step(answer))[0].done
        score = await asked.reward()
    assert score is not None and score.value == 0.0


@pytest.mark.parametrize(
    ("name", "options"), [("no_such", {}), ("chain_sum", {"no_such": 1}), ("chain_sum", {"min_terms": -1})]
)
async def test_what_does_not_exist_is_refused(name: str, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=name):
        async with session(f"reasoning_gym:{name}", options) as asked:
            await asked.reset()
