"""verl's interactions and tools run unchanged, chosen by a task's names and by nothing else that a task says.

``contracts/environments/of_verl.py`` has tools of verl's own classes.
"""

import importlib
import sys
from pathlib import Path

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.environment_registry import get_environment
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
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


class Schema:
    def model_dump(self, **options):
        return {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class AddTool:
    def __init__(self, config, tool_schema):
        self.name, self.tool_schema, self.config = config.get("name", "add"), Schema(), config

    async def create(self, instance_id=None, **kwargs):
        OPEN[instance_id] = kwargs["start"]
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        OPEN[instance_id] += parameters["number"]
        return str(OPEN[instance_id]), None, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(OPEN[instance_id])

    async def release(self, instance_id, **kwargs):
        del OPEN[instance_id]
        OPEN["released"] = True
        if self.config.get("breaks"):
            raise ValueError("cannot be released")
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "verl_like.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verl_like", raising=False)
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


CALL = '<tool_call>\n{"name": "add", "arguments": {"number": 2}}\n</tool_call>'


async def play_with_tools(
    renderer: ChatRenderer, file: Path, *, name: str = "add", breaks: bool = False, **extra: object
) -> Trajectory:
    tools = file.with_name("tools.yaml")
    tools.write_text(
        f"tools: [{{class_name: verl_like.AddTool, config: {{type: native, name: {name}, breaks: {breaks}}}}}]\n"
    )
    runner = EpisodeRunner(
        run_config({"max_model_len": 2048}, environment=f"verl:{tools},{file}", max_turns=4, max_tokens=2048),
        renderer,
        ScriptedEngine(renderer, [CALL.replace("add", name)] * 2 + ["5"]),
    )
    kwargs = {name: {"create_kwargs": {"start": 1}}, "of_other_rows": None}
    (row,) = await runner.run(leased(extra={"tools_kwargs": kwargs, **extra}), 0)
    return row


async def test_tools_and_an_interaction_in_one_episode(renderer: ChatRenderer, file: Path) -> None:
    said = {"name": "grade", "query": "?", "ground_truth": "5"}
    row = await play_with_tools(renderer, file, interaction_kwargs=said)
    assert [turn.text for turn in row.turns if turn.role == "tool"] == ["3", "5"]
    assert row.reward_parts == {
        "environment": 6.0,
        "environment/tool_add": 5.0,
        "environment/calls": 0.0,
        "environment/last": 1.0,
    }


@pytest.mark.parametrize("name", ["score", "calls", "last"])
async def test_the_name_of_a_tool_replaces_no_reward(renderer: ChatRenderer, file: Path, name: str) -> None:
    said = {"name": "grade", "query": "?", "ground_truth": "5"}
    row = await play_with_tools(renderer, file, name=name, interaction_kwargs=said)
    assert row.reward_parts == {
        "environment": 6.0,
        f"environment/tool_{name}": 5.0,
        "environment/calls": 0.0,
        "environment/last": 1.0,
    }


@pytest.mark.parametrize("answer", ["None, 0.5, {}", "'3', 'much', {}", "'3', 0.5"])
async def test_what_a_tool_may_not_return_is_the_result_of_the_call(
    renderer: ChatRenderer, file: Path, answer: str
) -> None:
    module = file.with_name("verl_like.py")
    module.write_text(module.read_text().replace("return str(OPEN[instance_id]), None, {}", f"return {answer}"))
    row = await play_with_tools(renderer, file, interaction_kwargs={"name": "plain"})
    assert all(call.error for turn in row.turns for call in turn.tool_calls)
    assert row.reward_parts["environment/calls"] == 0.0


async def test_what_breaks_at_the_end_leaves_nothing_open(renderer: ChatRenderer, file: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="cannot be released"):
        await play_with_tools(renderer, file, breaks=True, interaction_kwargs={"name": "plain"})
    assert importlib.import_module("verl_like").OPEN == {"released": True, "finalized": True}


async def test_a_task_selects_tools_that_there_are(renderer: ChatRenderer, file: Path) -> None:
    with pytest.raises(DataError, match=r"tool_selection"):
        await play_with_tools(renderer, file, tool_selection=["subtract"], interaction_kwargs={"name": "plain"})


async def test_a_task_chooses_among_what_the_file_lists(renderer: ChatRenderer, file: Path) -> None:
    with pytest.raises(DataError, match=r"interaction_kwargs\.name.*grade, plain"):
        await play(renderer, file, [], name="verl_like.Base")
    with pytest.raises(DataError, match=r"interaction_kwargs\.name"):
        await play(renderer, file, [])


@pytest.mark.parametrize(
    "text",
    [
        None,
        "interaction: 3",
        "interaction: []",
        "interaction: [{class_name: no_such.Thing}]",
        "tools: [{class_name: no_such.Tool, config: {type: mcp}}]",
    ],
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
