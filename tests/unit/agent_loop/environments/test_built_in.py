"""The built-in environments: users, and the customer of the preset `order`."""

import importlib
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.built_in import CUT, NOT_UNDERSTOOD, WISHES, log_cut_turns
from rl_async.agent_loop.environments.environment_registry import get_environment
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import KINDS, ToyTask
from rl_async.configs.schema.rollout import UserConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.messages import LeasedGroup, Trajectory
from rl_async.reward_loop.model_client import forget_api_keys
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config
from tests.unit.reward_loop.outside import Answer, Outside

ROLE = "You want {wish}. Say so, and write [DONE] once you have it."
WISH = {"wish": "tea"}


def says(text: str, finish_reason: str = "stop") -> Answer:
    return Answer({"choices": [{"message": {"content": text}, "finish_reason": finish_reason}]})


def with_user(**user: Any) -> RunConfig:
    settings = UserConfig(**{"system": ROLE, "backoff_s": 0.01, **user})
    return run_config(environment="simulated_user", user=settings, max_turns=6, max_tokens=250)


async def play(
    config: RunConfig, renderer: ChatRenderer, answers: Sequence[str], group: LeasedGroup | None = None
) -> tuple[Trajectory, ScriptedEngine]:
    engine = ScriptedEngine(renderer, answers)
    runner = EpisodeRunner(config, renderer, engine)
    try:
        (row,) = await runner.run(group or leased(extra=WISH), 0)
    finally:
        await runner.close()
    return row, engine


async def test_a_script_is_said_whatever_the_answers(renderer: ChatRenderer) -> None:
    group = leased(extra={"user_turns": ["and 3+3?", "and 4+4?"]})
    row, _ = await play(run_config(environment="scripted_user"), renderer, ["5", "6", "8"], group)
    assert [turn.text for turn in row.turns] == ["what is 2+3?", "5", "and 3+3?", "6", "and 4+4?", "8"]
    assert row.finish_reason == "stop"
    with pytest.raises(DataError, match=r"extra_info\.user_turns"):
        await play(run_config(environment="scripted_user"), renderer, ["5"], leased())


async def test_a_model_outside_plays_the_user_and_scores(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER_KEY", "sk-very-secret")
    async with Outside(
        Answer("later", status=503), says("green tea"), says("thanks! [DONE] bye"), says("I say 8")
    ) as it:
        config = with_user(url=f"{it.url}/v1", model="m", api_key_env="USER_KEY", score="How was the {wish}? 0 to 10")
        row, _ = await play(config, renderer, ["which?", "here"])
    forget_api_keys(config)
    assert [(turn.role, turn.text) for turn in row.turns] == [
        *(("user", "what is 2+3?"), ("assistant", "which?"), ("user", "green tea"), ("assistant", "here")),
    ]
    assert row.reward_parts == {
        "environment": 0.8,
        "environment/raw": 8.0,
        "environment/user_turns": 2.0,
        "environment/stopped": 1.0,
        "environment/cut_turns": 0.0,
    }
    last = it.asked[-1].body["messages"]
    assert [message["role"] for message in last] == ["system", *["user", "assistant"] * 3, "user"]
    assert last[0]["content"].startswith("You want tea.") and last[-1]["content"] == "How was the tea? 0 to 10"
    assert [message["content"] for message in last[2:5]] == ["what is 2+3?", "which?", "green tea"]
    assert {asked.authorization for asked in it.asked} == {"Bearer sk-very-secret"}
    assert "USER_KEY" not in os.environ


async def test_a_message_of_the_user_that_was_cut_says_so(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    log_cut_turns.cache_clear()
    cut = [says(text, "length") for text in ("green te", " ", "that is all [DONE] and fur")]
    async with Outside(*cut) as it:
        row, _ = await play(with_user(url=f"{it.url}/v1", model="m", max_tokens=7), renderer, ["which?", "so?", "here"])
    assert [turn.text for turn in row.turns if turn.role == "user"][1:] == [f"green te\n{CUT}", CUT]
    # The user itself reads its own words.
    assert it.asked[1].body["messages"][4]["content"] == "green te"
    assert row.reward_parts["environment/cut_turns"] == 2.0
    (logged,) = [record.getMessage() for record in caplog.records if "agent.user.max_tokens" in record.getMessage()]
    assert "after 7 tokens" in logged


async def test_a_user_does_not_see_past_calls(renderer: ChatRenderer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    asked = [{"role": "user", "content": "1+2?"}, *called, {"role": "assistant", "content": "3. And now?"}]
    async with Outside(says("[DONE]")) as it:
        await play(with_user(url=f"{it.url}/v1", model="m"), renderer, ["5"], leased(prompt=asked, extra=WISH))
    said = [message["content"] for message in it.asked[0].body["messages"][2:]]
    assert said == ["1+2?", "3. And now?", "5"]


async def test_a_user_who_cannot_be_asked_fails_the_sample_without_the_key(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER_KEY", "sk-very-secret")
    async with Outside(Answer("no such key: sk-very-secret", status=401)) as it:
        config = with_user(url=f"{it.url}/v1", model="m", api_key_env="USER_KEY")
        with pytest.raises(EnvironmentFailed, match=r"agent\.user.*401") as failed:
            await play(config, renderer, ["which?"])
        assert "very-secret" not in str(failed.value)
        monkeypatch.delenv("USER_KEY")
        with pytest.raises(ConfigError, match=r"agent\.user\.api_key_env"):
            EpisodeRunner(config, renderer, ScriptedEngine(renderer, []))


@pytest.mark.parametrize("answer", [says("eleven, no, 11"), says("Of the 3 things that I", "length")])
async def test_a_score_that_is_none_fails_the_sample(renderer: ChatRenderer, answer: Answer) -> None:
    async with Outside(says("[DONE]"), answer) as it:
        config = with_user(url=f"{it.url}/v1", model="m", score="0 to 10?")
        with pytest.raises(EnvironmentFailed, match=r"agent\.user\.score"):
            await play(config, renderer, ["which?"])


async def test_the_policy_plays_the_user_and_trains_only_as_itself(renderer: ChatRenderer) -> None:
    """The engine says, in turn: the policy, the user, the policy, the user who has enough."""
    row, engine = await play(with_user(stop="[enough]"), renderer, ["7", "more", "8", "[enough]"])
    assert [(turn.role, turn.text) for turn in row.turns][1:] == [
        ("assistant", "7"),
        ("user", "more"),
        ("assistant", "8"),
    ]
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == "7<|im_end|>8<|im_end|>"
    assert row.reward_parts["environment"] == 1.0
    asked = renderer.decode(engine.requests[3].token_ids)
    assert "<|im_start|>system" in asked and asked.index("<|im_start|>assistant\nmore") < asked.index("user\n8")
    assert len(set(engine.sessions)) == 3, "the policy's own conversation is one"


async def test_a_user_begins_where_the_task_does_not(renderer: ChatRenderer) -> None:
    group = leased(extra=WISH)
    task = msgspec.structs.replace(group.task, prompt=[{"role": "system", "content": "be kind"}])
    group = msgspec.structs.replace(group, task=task)
    row, _ = await play(with_user(stop="[enough]"), renderer, ["tea", "7", "[enough]"], group)
    assert [turn.text for turn in row.turns] == ["be kind", "tea", "7"]


async def test_a_column_that_is_missing_is_named(renderer: ChatRenderer) -> None:
    with pytest.raises(DataError, match="wish"):
        await play(with_user(), renderer, [], leased(extra={}))


LEMONS = ToyTask("i want 3 lime", "3 lime red friday", {"count": 3, "item": "lime", "colour": "red", "day": "friday"})


async def play_order(renderer: ChatRenderer, sample: ToyTask, says: list[str]) -> Trajectory:
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
        row = await play_order(
            orders, sample, [message["content"] for message in demo if message["role"] == "assistant"]
        )
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
    row = await play_order(orders, LEMONS, says)
    assert row.reward_parts["environment"] == score
    assert [turn.text for turn in row.turns if turn.role == "user"][1:] == answers


async def test_a_task_without_wishes_is_refused(orders: ChatRenderer) -> None:
    for wish in WISHES:
        state = {key: value for key, value in LEMONS.state.items() if key != wish}
        with pytest.raises(DataError, match=wish):
            await play_order(orders, LEMONS._replace(state=state), [])


async def test_an_answer_is_worth_the_mean_score_of_the_conversations_that_go_on_from_it(
    renderer: ChatRenderer,
) -> None:
    """The user outside answers by what it reads; the policy's answers are "2", then "3", "4" and "5" in futures."""
    asked = list[list[str]]()

    def user(body: dict[str, Any]) -> Answer:
        heard = [message["content"] for message in body["messages"]]
        asked.append(heard)
        if heard[-1] == "How good?":
            # The number that the policy said last.
            return says(heard[-3])
        return says("more?" if heard[-1] != "9" else "[DONE]")

    engine = ScriptedEngine(renderer, ["2", "4", "6", "9"])
    async with Outside(*[user] * 12) as server:
        options = {"samples": 2, "turns": 2, "word_penalty": 0.01}
        settings = UserConfig(
            system=ROLE, backoff_s=0.01, url=f"{server.url}/v1", model="m", score="How good?", max_concurrent=1
        )
        config = run_config(
            environment="collaborative_user", environment_options=options, user=settings, max_turns=2, max_tokens=250
        )
        runner = EpisodeRunner(config, renderer, engine)
        try:
            (row,) = await runner.run(leased(extra=WISH), 0)
        finally:
            await runner.close()
    first, second = (turn for turn in row.turns if turn.role == "assistant")
    assert (first.text, second.text) == ("2", "9")
    # Two futures say 4 and 6 after the first answer, two words each; the second one ends all that follow.
    assert first.reward == pytest.approx((0.4 + 0.6) / 2 - 0.02)
    assert second.reward == pytest.approx(0.9 - 0.01)
    assert [turn.text for turn in row.turns] == ["what is 2+3?", "2", "more?", "9"]
    assert row.loss_mask.sum() == sum(turn.end - turn.start for turn in (first, second))


@pytest.mark.parametrize("options", [{"samples": 0}, {"turns": 0}, {"word_penalty": -1.0}, {"future": 1}])
async def test_options_of_futures_are_checked(renderer: ChatRenderer, options: dict[str, Any]) -> None:
    config = run_config(
        environment="collaborative_user", environment_options=options, user=UserConfig(system=ROLE), max_turns=2
    )
    with pytest.raises(ConfigError, match=r"agent\.environment_options"):
        await play(config, renderer, ["5"])


# verl's interactions and tools run unchanged, chosen by a task's names and by nothing else that a task says.
#
# ``contracts/environments/of_verl.py`` has tools of verl's own classes.


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


async def play_verl(renderer: ChatRenderer, file: Path, says: list[str], **kwargs: object) -> Trajectory:
    engine = ScriptedEngine(renderer, says)
    runner = EpisodeRunner(run_config(environment=f"verl:{file}", max_turns=4), renderer, engine)
    (row,) = await runner.run(leased(extra={"interaction_kwargs": kwargs}), 0)
    return row


async def test_an_interaction_answers_scores_and_ends(renderer: ChatRenderer, file: Path) -> None:
    given = {"name": "grade", "query": "?", "ground_truth": "5", "other_rows": None}
    row = await play_verl(renderer, file, ["4", "5"], **given)
    assert [turn.text for turn in row.turns] == ["what is 2+3?", "4", "try again", "5"]
    assert row.reward_parts == {"environment": 1.0, "environment/last": 1.0}
    row = await play_verl(renderer, file, ["4"], name="plain")
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
        await play_verl(renderer, file, [], name="verl_like.Base")
    with pytest.raises(DataError, match=r"interaction_kwargs\.name"):
        await play_verl(renderer, file, [])


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
        await play_verl(renderer, path, [])


@pytest.mark.parametrize("name", ["gymnasium:", "nowhere:Thing", "chess"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.environment"):
        get_environment(name)
