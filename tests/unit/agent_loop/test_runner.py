"""Episodes of several roles: who is told what, whose tokens train, what each earns, and how a game ends."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.environment_registry import ENVIRONMENTS
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.step import Step
from rl_async.agent_loop.tools.tool import Tool
from rl_async.configs.schema.rollout import SpeakerConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.messages import Task, Trajectory, by_role
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config
from tests.unit.reward_loop.outside import Outside, says

COUNT = '<tool_call>\n{"name":"count","arguments":{"text":"plum"}}\n</tool_call>'


class Whisper:
    """The speaker is told a word and says it; the listener answers what it heard, twice, as long as it is wrong."""

    roles: Any = ("speaker", "listener")
    ended = 0

    def __init__(self, task: Task, host: object) -> None:
        self.word, self.spoken, self.wrong = task.ground_truth, False, 0

    def reset(self) -> Step:
        return Step(f"say {self.word}", to="speaker")

    def step(self, answer: str) -> Step:
        if not self.spoken:
            self.spoken = True
            return Step(answer, to="listener", reward=0.25, reason="said")
        if answer == self.word:
            return Step(done=True)
        self.wrong, self.spoken = self.wrong + 1, False
        return Step(f"no, {answer} is wrong", to="speaker", reward=-0.5, reason="wrong")

    def reward(self) -> Any:
        return {"speaker": 1.0 - self.wrong, "listener": {"score": 2.0 - self.wrong, "wrong": self.wrong}}

    def close(self) -> None:
        Whisper.ended += 1


async def play(
    renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    says: Sequence[str],
    opponents: dict[str, SpeakerConfig] | None = None,
    **agent: Any,
) -> tuple[list[Trajectory], ScriptedEngine]:
    monkeypatch.setitem(ENVIRONMENTS, "own", kind)
    config: RunConfig = run_config(environment="own", opponents=opponents or {}, **{"max_turns": 6, **agent})
    engine = ScriptedEngine(renderer, says)
    runner = EpisodeRunner(config, renderer, engine)
    try:
        return await runner.run(leased("a game", ground_truth="plum"), 0), engine
    finally:
        await runner.close()


def said(row: Trajectory) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in row.turns]


async def test_each_role_has_a_conversation_rows_and_a_reward(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = Whisper.ended
    rows, engine = await play(renderer, monkeypatch, Whisper, ["pear", "pear", "plum", "plum"])
    speaker, listener = rows
    assert [(row.role, row.segment, row.episode_id, row.finish_reason) for row in rows] == [
        ("speaker", 0, "7.0.1", "stop"),
        ("listener", 1, "7.0.1", "stop"),
    ]
    assert said(speaker) == [
        *(("user", "a game\n\nsay plum"), ("assistant", "pear")),
        *(("user", "no, pear is wrong"), ("assistant", "plum")),
    ]
    assert said(listener) == [
        *(("user", "a game\n\npear"), ("assistant", "pear"), ("user", "plum"), ("assistant", "plum")),
    ]
    assert [(turn.reward, turn.reason) for turn in speaker.turns[1::2]] == [(0.25, "said"), (0.25, "said")]
    assert [(turn.reward, turn.reason) for turn in listener.turns[1::2]] == [(-0.5, "wrong"), (None, "")]
    assert speaker.reward_parts == {"environment": 0.0}
    assert listener.reward_parts == {"environment": 1.0, "environment/wrong": 1.0}
    for row, words in ((speaker, "pear<|im_end|>plum<|im_end|>"), (listener, "pear<|im_end|>plum<|im_end|>")):
        assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == words
    assert engine.sessions == ["7.0.1.speaker", "7.0.1.listener"] * 2, "each has a prefix cache of its own"
    assert len({request.request_id for request in engine.requests}) == 4
    assert Whisper.ended == before + 1
    assert "differ from the chat template" not in caplog.text


async def test_a_role_without_turns_left_ends_the_game_for_all(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = await play(renderer, monkeypatch, Whisper, ["pear"] * 4, max_turns=2)
    assert [(row.role, row.finish_reason) for row in rows] == [("speaker", "max_turns"), ("listener", "stop")]
    assert rows[1].turns[-1].reward == -0.5, "the last turn is judged"


async def test_a_turn_that_is_cut_off_ends_the_game(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, engine = await play(renderer, monkeypatch, Whisper, ["plum", "pear " * 200])
    assert [(row.role, row.finish_reason) for row in rows] == [("speaker", "stop"), ("listener", "length")]
    assert rows[1].turns[-1].reward is None, "it was not judged"
    assert len(engine.requests) == 2


async def test_a_role_that_has_no_turn_has_no_row(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone(Whisper):
        def step(self, answer: str) -> Step:
            return Step(done=True, reward=1.0)

    rows, _ = await play(renderer, monkeypatch, Alone, ["plum"])
    assert [(row.role, row.segment) for row in rows] == [("speaker", 0)]
    with pytest.raises(EnvironmentFailed, match="listener"):
        await play(renderer, monkeypatch, Alone, ["plum"], opponents={"speaker": SpeakerConfig()})


async def test_one_reward_is_that_of_all_roles(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Together(Whisper):
        def reward(self) -> Any:
            return {"score": 0.5, "wrong": self.wrong}

    rows, _ = await play(renderer, monkeypatch, Together, ["plum", "plum"])
    assert [row.reward_parts for row in rows] == [{"environment": 0.5, "environment/wrong": 0.0}] * 2

    class Turns(Whisper):
        reward: Any = property()  # hasattr is false

    rows, _ = await play(renderer, monkeypatch, Turns, ["plum", "plum"])
    assert [row.reward_parts for row in rows] == [{"environment": 0.0}] * 2


async def test_a_role_may_begin_with_a_system_message_of_its_own(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Whisper):
        def reset(self) -> Step:
            told = [{"role": "system", "content": "you speak"}, {"role": "user", "content": "say plum"}]
            return Step(told, to="speaker")

    (speaker, listener), _ = await play(renderer, monkeypatch, Own, ["plum", "plum"])
    assert said(speaker)[:2] == [("system", "you speak"), ("user", "say plum")]
    assert said(listener)[0] == ("user", "a game\n\nplum")


class Counting(Whisper):
    def tools(self) -> Any:
        def count(text: str) -> Step:
            """Count letters."""
            return Step(str(len(text)), reward=0.125, reason="counted")

        return {"listener": [Tool(count)]}


async def test_roles_have_tools_of_their_own(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    (speaker, listener), _ = await play(renderer, monkeypatch, Counting, [COUNT, "plum", COUNT, "plum"], max_tokens=250)
    assert speaker.turns[1].tool_calls[0].error == "unknown tool"
    assert listener.turns[1].tool_calls[0].result == "4"
    assert (listener.turns[1].reward, listener.turns[1].reason) == (0.125, "counted")


async def test_an_opponent_at_a_server_plays_a_role_and_trains_nothing(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Outside(says("pear"), says("plum")) as it:
        opponents = {"speaker": SpeakerConfig(url=f"{it.url}/v1", model="m")}
        (row,), engine = await play(renderer, monkeypatch, Whisper, ["pear", "plum"], opponents=opponents)
    assert (row.role, row.segment, row.reward_parts["environment"]) == ("listener", 0, 1.0)
    assert [turn.text for turn in row.turns] == ["a game\n\npear", "pear", "plum", "plum"]
    assert [(m["role"], m["content"]) for m in it.asked[-1].body["messages"]] == [
        *(("user", "a game\n\nsay plum"), ("assistant", "pear"), ("user", "no, pear is wrong")),
    ]
    assert engine.sessions == ["7.0.1.listener"] * 2


async def test_the_policy_itself_may_be_an_opponent(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    opponents = {"listener": SpeakerConfig(temperature=0.5)}
    (row,), engine = await play(renderer, monkeypatch, Whisper, ["plum", "plum"], opponents=opponents)
    assert row.role == "speaker"
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 0.5]


async def test_an_opponent_without_turns_left_ends_the_game(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opponents = {"speaker": SpeakerConfig()}
    (row,), engine = await play(renderer, monkeypatch, Whisper, ["pear"] * 9, opponents=opponents, max_turns=2)
    assert (len(engine.requests), row.finish_reason) == (4, "stop")


@pytest.mark.parametrize(
    ("opponents", "kind", "named"),
    [
        (["umpire"], Whisper, "umpire"),
        (["speaker", "listener"], Whisper, "all roles"),
        (["listener"], Counting, "tools"),
        (["listener"], type("Plain", (Whisper,), {"roles": ()}), "no roles"),
    ],
)
async def test_opponents_that_make_no_sense_are_refused(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, opponents: list[str], kind: Any, named: str
) -> None:
    if not kind.roles:
        monkeypatch.setattr(kind, "reset", lambda self: "go")
    with pytest.raises(ConfigError, match=rf"agent\.opponents: .*{named}"):
        await play(renderer, monkeypatch, kind, ["plum"], opponents=dict.fromkeys(opponents, SpeakerConfig()))


@pytest.mark.parametrize("opponents", [["umpire"], ["one", "two"]])
def test_opponents_are_checked_against_a_class_that_names_its_roles_before_any_episode(
    renderer: ChatRenderer, tmp_path: Path, opponents: list[str]
) -> None:
    (tmp_path / "game.py").write_text('class Two:\n    roles = ("one", "two")\n')
    made = {role: SpeakerConfig() for role in opponents}
    config = run_config(environment=f"{tmp_path}/game.py:Two", opponents=made)
    with pytest.raises(ConfigError, match=r"agent\.opponents"):
        EpisodeRunner(config, renderer, ScriptedEngine(renderer, []))


@pytest.mark.parametrize("roles", ["speaker", ("speaker", "speaker"), ("a b",), ("score",), (3,), {"a": 1}])
async def test_roles_are_different_names(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, roles: Any) -> None:
    with pytest.raises(EnvironmentFailed, match="roles"):
        await play(renderer, monkeypatch, type("Odd", (Whisper,), {"roles": roles}), ["plum"])


@pytest.mark.parametrize(
    ("method", "answer", "named"),
    [
        ("reset", "say plum", r"reset\(\).*Step"),
        ("reset", Step(done=True), r"reset\(\).*first"),
        ("reset", Step("say plum"), r"reset\(\).*speaker, listener"),
        ("step", Step("hm", to="umpire"), r"step\(\).*speaker, listener"),
        ("step", Step(to="speaker"), r"step\(\).*speaker has had a turn"),
        ("step", Step([{"role": "assistant", "content": "plum"}], to="listener"), r"step\(\).*assistant"),
        ("reward", {"speaker": 1.0}, r"reward\(\).*each role"),
        ("reward", {"speaker": 1.0, "listener": "much"}, r"reward\(\).*much"),
        ("reward", {"umpire": 1.0}, r"reward\(\)"),
        ("tools", {"umpire": []}, r"tools\(\).*umpire"),
    ],
)
async def test_what_a_game_may_not_return(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, method: str, answer: Any, named: str
) -> None:
    before = Whisper.ended
    kind = type("Odd", (Whisper,), {method: lambda self, *_: answer})
    with pytest.raises(EnvironmentFailed, match=named):
        await play(renderer, monkeypatch, kind, ["plum", "plum"])
    assert Whisper.ended == before + 1, "it is closed"


async def test_what_a_loop_of_a_role_raises_fails_the_episode_as_it_is(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IndexError):  # the engine has no more to say
        await play(renderer, monkeypatch, Whisper, ["pear"])


async def test_rows_are_put_together_by_role(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = await play(renderer, monkeypatch, Whisper, ["pear", "pear", "plum", "plum"])
    assert [[row.role for row in own] for own in by_role(rows)] == [["speaker"], ["listener"]]


class Chatter(Whisper):
    """What a role is told goes on for long."""

    def step(self, answer: str) -> Step:
        return super().step(answer)._replace(observation="pear " * 9000)


@pytest.mark.parametrize("opponents", [(), ("listener",)])
async def test_words_of_a_game_that_are_too_long_end_it(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, opponents: tuple[str, ...]
) -> None:
    made = dict.fromkeys(opponents, SpeakerConfig())
    (row,), engine = await play(renderer, monkeypatch, Chatter, ["plum"], made)
    assert (row.role, row.finish_reason, len(engine.requests)) == ("speaker", "stop", 1)
    assert row.reward_parts == {"environment": 1.0}, "the game says what it was worth"


async def test_a_task_that_is_too_long_is_an_error_of_the_data(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="t:0"):
        await play(renderer, monkeypatch, Whisper, ["plum"], max_tokens=3)


@pytest.mark.parametrize("served", [False, True])
async def test_a_turn_of_an_opponent_that_is_cut_off_ends_the_game(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    async with Outside(says("pea", finish_reason="length")) as it:
        listener = SpeakerConfig(url=f"{it.url}/v1", model="m") if served else SpeakerConfig(max_tokens=4)
        (row,), _ = await play(renderer, monkeypatch, Whisper, ["plum", "pear " * 200], {"listener": listener})
    assert (row.role, row.finish_reason) == ("speaker", "stop")
    assert row.reward_parts == {"environment": 1.0}, "the wrong answer was not judged"


async def test_tools_are_asked_for_once_and_after_reset(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class Ordered(Whisper):
        def reset(self) -> Step:
            calls.append("reset")
            return super().reset()

        def tools(self) -> Any:
            calls.append("tools")
            return {}

    await play(renderer, monkeypatch, Ordered, ["plum", "plum"], {"listener": SpeakerConfig()})
    assert calls == ["reset", "tools"]


@pytest.mark.parametrize(
    ("says", "setter", "guesser"),
    [
        (["7", "3", "7"], -1.0, 1.0),
        (["7", "1", "2", "3"], 1.0, -1.0),
        (["7", "1 " * 200], 1.0, -1.0),
        (["77"], -1.0, None),
        (["plum"], -1.0, None),
        (["1 " * 200], -1.0, None),
    ],
)
async def test_the_game_of_the_documentation_pays_for_no_foul(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, says: list[str], setter: float, guesser: float | None
) -> None:
    text = (Path(__file__).parents[3] / "docs/how-to/environments.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Duel" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    rows, _ = await play(renderer, monkeypatch, lambda task, services: names["Duel"](task), says)
    rewards = {"setter": setter} | ({} if guesser is None else {"guesser": guesser})
    assert {row.role: row.reward_parts["environment"] for row in rows} == rewards
