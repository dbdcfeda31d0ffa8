"""verl's interactions run unchanged, chosen by a task's name and by nothing else that a task says."""

import importlib
from pathlib import Path

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.registry import get_environment
from rl_async.agent_loop.episodes.runner import EpisodeRunner
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Trajectory
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

MODULE = '''
"""Classes with the signatures of verl's base class and of its example for GSM8K."""

from uuid import uuid4

OPEN = {}


class GradeInteraction:
    def __init__(self, config):
        self.config = config

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        OPEN[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == OPEN[instance_id]
        assert messages[-1]["role"] == "assistant" and kwargs["query"] == "?"
        return right, "yes" if right else self.config["hint"], float(right), {"seen": len(messages)}

    async def calculate_score(self, instance_id, **kwargs):
        raise AssertionError("verl calls it from generate_response alone")

    async def finalize_interaction(self, instance_id, **kwargs):
        del OPEN[instance_id]


class Base:
    def __init__(self, config):
        self.name = config["name"]

    async def start_interaction(self, instance_id=None, **kwargs):
        return str(uuid4())

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, self.name, 0.8, {}

    async def finalize_interaction(self):
        OPEN["finalized"] = True
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "verl_like.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "interactions.yaml"
    path.write_text(
        "interaction:\n"
        "  - {class_name: verl_like.GradeInteraction, config: {hint: try again}}\n"
        "  - {name: plain, class_name: verl_like.Base, config: {}}\n"
    )
    return path


async def play(renderer: ChatRenderer, file: Path, says: list[str], **kwargs: object) -> Trajectory:
    engine = ScriptedEngine(renderer, says)
    runner = EpisodeRunner(run_config(environment=f"verl:{file}", max_turns=4), renderer, engine)
    (row,) = await runner.run(leased(extra={"interaction_kwargs": kwargs}), 0)
    return row


async def test_an_interaction_answers_scores_and_ends(renderer: ChatRenderer, file: Path) -> None:
    given = {"name": "grade", "query": "?", "ground_truth": "5", "other_rows": None}
    row = await play(renderer, file, ["4", "5"], **given)
    assert [turn.text for turn in row.turns] == ["what is 2+3?", "4", "try again", "5"]
    assert row.reward_parts == {"environment": 1.0, "environment/last": 1.0}
    row = await play(renderer, file, ["4"], name="plain")
    assert row.reward_parts["environment"] == 0.8
    assert importlib.import_module("verl_like").OPEN == {"finalized": True}


async def test_a_task_chooses_among_what_the_file_lists(renderer: ChatRenderer, file: Path) -> None:
    with pytest.raises(DataError, match=r"interaction_kwargs\.name.*grade, plain"):
        await play(renderer, file, [], name="verl_like.Base")
    with pytest.raises(DataError, match=r"interaction_kwargs\.name"):
        await play(renderer, file, [])


@pytest.mark.parametrize(
    "text", [None, "interaction: 3", "interaction: []", "interaction: [{class_name: no_such.Thing}]"]
)
async def test_a_file_that_is_wrong_is_named(renderer: ChatRenderer, tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "wrong.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"agent\.environment.*wrong\.yaml"):
        await play(renderer, path, [])


@pytest.mark.parametrize("name", ["gymnasium:", "nowhere:Thing", "chess"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.environment"):
        get_environment(name)
