"""The guessing game: demonstrations are what its episodes look like, and halving always wins."""

import random

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.data.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.data.toy_tasks import GUESSES, KINDS, ToyTask
from rl_async.agent_loop.environments.guess import reply
from rl_async.agent_loop.episodes.runner import EpisodeRunner
from rl_async.messages import Trajectory
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config


async def play(renderer: ChatRenderer, sample: ToyTask, says: list[str]) -> Trajectory:
    config = run_config(environment="guess", max_turns=GUESSES, max_tokens=128)
    group = leased(sample.prompt, ground_truth=sample.answer, extra=sample.state)
    (row,) = await EpisodeRunner(config, renderer, ScriptedEngine(renderer, says)).run(group, 0)
    return row


async def test_demonstrations_replay_through_the_real_loop() -> None:
    renderer = ChatRenderer(train_tokenizer(demos("guess", 400), 200))
    source, won = random.Random(2), 0
    for _ in range(60):
        sample = KINDS["guess"].sample(source)
        demo = [{"role": "user", "content": sample.prompt}, *KINDS["guess"].demonstrate(sample, source)]
        row = await play(renderer, sample, [message["content"] for message in demo if message["role"] == "assistant"])
        assert [(turn.role, turn.text) for turn in row.turns] == [(m["role"], m["content"]) for m in demo]
        right = demo[-1]["content"] == sample.answer
        assert row.reward_parts["environment"] == float(right)
        token_ids, mask = renderer.demo_row(demo)
        assert (row.token_ids.tolist(), row.loss_mask.tolist()) == (token_ids, mask)
        won += right
    assert 5 < won < 50, "the demonstrations leave something to learn"


def test_halving_always_wins() -> None:
    source = random.Random(3)
    for _ in range(300):
        state = KINDS["guess"].sample(source).state
        low, high, guesses = state["low"], state["high"], 0
        while True:
            guess = (low + high) // 2
            guesses += 1
            said = reply(str(guess), state["secret"])
            if said is None:
                break
            low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
        assert guesses <= GUESSES
