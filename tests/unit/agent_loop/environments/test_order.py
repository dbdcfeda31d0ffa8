"""Taking an order: demonstrations are what its episodes look like, and only questions reveal the wishes."""

import random

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.built_in import NOT_UNDERSTOOD, WISHES
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import KINDS, ToyTask
from rl_async.errors import DataError
from rl_async.messages import Trajectory
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

LEMONS = ToyTask("i want 3 lime", "3 lime red friday", {"count": 3, "item": "lime", "colour": "red", "day": "friday"})


async def play(renderer: ChatRenderer, sample: ToyTask, says: list[str]) -> Trajectory:
    config = run_config(environment="order", max_turns=4, max_tokens=128)
    group = leased(sample.prompt, ground_truth=sample.answer, extra=sample.state)
    (row,) = await EpisodeRunner(config, renderer, ScriptedEngine(renderer, says)).run(group, 0)
    return row


@pytest.fixture(scope="module")
def orders() -> ChatRenderer:
    return ChatRenderer(train_tokenizer(demos("order", 400), 200))


async def test_demonstrations_replay_through_the_real_loop(orders: ChatRenderer) -> None:
    source, met = random.Random(2), 0.0
    for _ in range(60):
        sample = KINDS["order"].sample(source)
        demo = [{"role": "user", "content": sample.prompt}, *KINDS["order"].demonstrate(sample, source)]
        row = await play(orders, sample, [message["content"] for message in demo if message["role"] == "assistant"])
        assert [(turn.role, turn.text) for turn in row.turns] == [(m["role"], m["content"]) for m in demo]
        token_ids, mask = orders.demo_row(demo)
        assert (row.token_ids.tolist(), row.loss_mask.tolist()) == (token_ids, mask)
        met += row.reward_parts["environment"]
    assert 10 < met < 40, "the demonstrations leave something to learn"


@pytest.mark.parametrize(
    ("says", "score", "answers"),
    [
        (["day?", "colour?", "order 3 lime red friday"], 1.0, ["friday", "red"]),
        (["order 3 lime red monday"], 0.5, []),
        (["what?", "day?", "order 3 lime friday"], 0.0, [NOT_UNDERSTOOD, "friday"]),
        (["order 4 lime red friday"], 0.0, []),
        (["day?", "day?", "day?", "day?"], 0.0, ["friday"] * 3),
    ],
)
async def test_an_order_is_worth_the_wishes_that_it_meets(
    says: list[str], score: float, answers: list[str], orders: ChatRenderer
) -> None:
    row = await play(orders, LEMONS, says)
    assert row.reward_parts["environment"] == score
    assert [turn.text for turn in row.turns if turn.role == "user"][1:] == answers


async def test_a_task_without_wishes_is_refused(orders: ChatRenderer) -> None:
    for wish in WISHES:
        state = {key: value for key, value in LEMONS.state.items() if key != wish}
        with pytest.raises(DataError, match=wish):
            await play(orders, LEMONS._replace(state=state), [])
