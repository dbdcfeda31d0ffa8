"""The game of examples/relay.py: what is heard, and what each role earns."""

import random
from pathlib import Path

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.userload import load_user_object
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

RELAY = f"{Path(__file__).parents[4]}/examples/relay.py"


@pytest.mark.parametrize(
    ("said", "heard", "written", "speaker", "listener"),
    [
        ("four seven two", "four seven two", "472", 1.0, 1.0),
        ("four seven one", "four seven one", "471", 2 / 3, 1.0),  # it heard well what was said wrongly
        ("four seven two", "four seven two", "402", 2 / 3, 2 / 3),
        ("4 7 two", "  two", "2", 0.0, 1.0),  # digits are not heard
        ("472", "nothing", "472", 1.0, 0.0),
        ("four seven two", "four seven two", "4720", 0.0, 0.0),
    ],
)
async def test_a_game(
    renderer: ChatRenderer, said: str, heard: str, written: str, speaker: float, listener: float
) -> None:
    engine = ScriptedEngine(renderer, [said, written])
    config = run_config(environment=f"{RELAY}:Relay", max_turns=1)
    rows = await EpisodeRunner(config, renderer, engine).run(leased(ground_truth="472"), 0)
    assert [(turn.role, turn.text) for turn in rows[1].turns][:2] == [("system", "listener"), ("user", heard)]
    assert [row.reward_parts["environment"] for row in rows] == pytest.approx([speaker, listener])


def test_some_demonstrations_of_either_role_are_wrong() -> None:
    demonstration, draw = load_user_object(f"{RELAY}:demonstration", "test"), random.Random(0)
    talks = [[message["content"] for message in demonstration("472", draw)] for _ in range(200)]
    for role, right in (("speaker", "four seven two"), ("listener", "472")):
        of_role = [talk[2] for talk in talks if talk[0] == role]
        assert 0.2 < of_role.count(right) / len(of_role) < 0.6
