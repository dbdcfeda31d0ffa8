"""Environments in episodes: what they say, give and end, and how their faults fail a sample and nothing else."""

import asyncio
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments.environment_registry import ENVIRONMENTS
from rl_async.agent_loop.environments.session import Session, joined, without_escapes
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.step import Observation, Step
from rl_async.agent_loop.tools.tool import Tool
from rl_async.errors import EnvironmentFailed
from rl_async.messages import Task, Trajectory
from rl_async.reward_loop.api import Score
from rl_async.userload import load_user_object
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config

GUESS = '<tool_call>\n{"name":"submit","arguments":{"number":4}}\n</tool_call>'


class HigherLower:
    """Plain methods, which run in threads."""

    def __init__(self, task: Task, host: object) -> None:
        self.secret, self.guesses, self.closed = int(task.ground_truth), 0, False

    def reset(self) -> Observation:
        return "from 0 to 9"

    def tools(self) -> Sequence[Tool]:
        def submit(number: int) -> Step:
            return Step("noted", reward=float(number == self.secret), done=number == self.secret, reason="submitted")

        return [Tool(submit)]

    def step(self, answer: str) -> Step:
        assert threading.current_thread() is not threading.main_thread()
        self.guesses += 1
        guess = int(answer)
        if guess == self.secret:
            return Step("yes", done=True)
        return Step("higher" if guess < self.secret else "lower", reward=-0.25, reason="wrong")

    def reward(self) -> Mapping[str, Any]:
        score = 1.0 / self.guesses if self.guesses else 0.0
        return {"score": score, "guesses": self.guesses, "reason": f"the secret was {self.secret}"}

    def close(self) -> None:
        self.closed = True


async def play(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, kind: Any, says: Sequence[str], **agent: Any
) -> Trajectory:
    monkeypatch.setitem(ENVIRONMENTS, "own", kind)
    config = run_config(environment="own", **{"max_turns": 6, **agent})
    (row,) = await EpisodeRunner(config, renderer, ScriptedEngine(renderer, says)).run(leased(ground_truth="4"), 0)
    return row


async def test_an_environment_answers_turns_until_it_is_done(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = await play(renderer, monkeypatch, HigherLower, ["2", "7", "4"])
    assert [(turn.role, turn.text) for turn in row.turns] == [
        ("user", "what is 2+3?\n\nfrom 0 to 9"),
        *(("assistant", "2"), ("user", "higher"), ("assistant", "7"), ("user", "lower"), ("assistant", "4")),
    ]
    assert [(turn.reward, turn.reason) for turn in row.turns[1::2]] == [(-0.25, "wrong"), (-0.25, "wrong"), (None, "")]
    assert row.reward_parts == {"environment": pytest.approx(1 / 3), "environment/guesses": 3.0}
    assert row.reward_reasons == {"environment": "the secret was 4"}
    assert row.finish_reason == "stop" and "environment" in row.timings
    assert [one.kind for one in row.activities] == ["generate", "environment"] * 3
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == "2<|im_end|>7<|im_end|>4<|im_end|>"
    assert "reward.functions" in caplog.text, "the default scorers do not use it"
    assert "differ from the chat template" not in caplog.text


async def test_the_last_turn_is_judged_too(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    row = await play(renderer, monkeypatch, HigherLower, ["2", "3"], max_turns=2)
    assert (row.finish_reason, row.turns[-1].role, row.turns[-1].reward) == ("max_turns", "assistant", -0.25)
    row = await play(renderer, monkeypatch, HigherLower, ["4"], loop="single_turn")
    assert (row.finish_reason, row.reward_parts["environment"]) == ("stop", 1.0)


async def test_a_tool_gives_a_reward_and_ends_the_episode(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = await play(renderer, monkeypatch, HigherLower, [GUESS])
    (call,) = row.turns[1].tool_calls
    assert (call.reward, call.reason, call.result) == (1.0, "submitted", "noted")
    assert (row.turns[1].reward, row.turns[1].reason, row.finish_reason) == (1.0, "submitted", "stop")


async def test_turn_rewards_alone_are_a_reward(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Judge:
        def __init__(self, task: Task, host: object) -> None: ...

        async def step(self, answer: str) -> Step:
            return Step(reward=0.5)

    row = await play(renderer, monkeypatch, Judge, ["4"])
    assert (row.turns[-1].reward, row.reward_parts, row.finish_reason) == (0.5, {"environment": 0.0}, "stop")


class Broken:
    """Fails at ``at`` in the way that ``how`` says; remembers whether it was closed."""

    closed = 0

    def __init__(self, at: str, how: str) -> None:
        self.at, self.how, self.release = at, how, threading.Event()

    def _maybe(self, method: str) -> Any:
        if method != self.at:
            return {"reset": "go", "step": Step("on"), "reward": 1.0}.get(method)
        if self.how == "raises":
            raise KeyError("lost")
        if self.how == "blocks":
            self.release.wait(30)
        return {"nonsense": 7}

    def reset(self) -> Any:
        return self._maybe("reset")

    def step(self, answer: str) -> Any:
        return self._maybe("step")

    def reward(self) -> Any:
        return self._maybe("reward")

    def close(self) -> None:
        Broken.closed += 1
        self._maybe("close")


@pytest.mark.parametrize("how", ["raises", "blocks", "nonsense"])
@pytest.mark.parametrize("at", ["reset", "step", "reward"])
async def test_a_fault_fails_the_sample_and_names_the_method(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, at: str, how: str
) -> None:
    made, before = Broken(at, how), Broken.closed
    limit = 0.2 if how == "blocks" else 30.0
    with pytest.raises(EnvironmentFailed, match=rf"own: {at}\(\)") as failed:
        await play(renderer, monkeypatch, lambda task, host: made, ["4"], max_turns=1, environment_timeout_s=limit)
    made.release.set()
    assert Broken.closed == before + 1
    if how == "blocks":
        assert "agent.environment_timeout_s" in str(failed.value)
    if how == "raises":
        assert "test_session.py:" in str(failed.value)


async def test_a_fault_at_the_end_does_not_hide_the_first(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EnvironmentFailed, match=r"close\(\)"):
        async with Session("own", Broken("close", "raises"), 30.0):
            pass
    with pytest.raises(ValueError, match="first"):
        async with Session("own", Broken("close", "raises"), 30.0):
            raise ValueError("first")
    assert "close()" in caplog.text


async def test_an_environment_may_be_a_context_and_is_left_at_a_deadline() -> None:
    said, stepping = [], asyncio.Event()

    class Context:
        async def __aenter__(self) -> "Context":
            said.append("in")
            return self

        async def __aexit__(self, *error: object) -> None:
            said.append("out")

        async def step(self, answer: str) -> Step:
            said.append("step")
            stepping.set()
            await asyncio.sleep(60)
            return Step()

    async def episode() -> None:
        async with Session("own", Context(), 60.0) as session:
            await session.step("x")

    task = asyncio.create_task(episode())
    await stepping.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said == ["in", "step", "out"]


async def test_an_environment_may_hold_a_task_group_from_its_beginning_to_its_end() -> None:
    """As clients of MCP servers do. anyio's may be left only by the task that entered it."""

    class Grouped:
        async def __aenter__(self) -> "Grouped":
            self.group = await anyio.create_task_group().__aenter__()
            return self

        async def reset(self) -> str:
            self.group.start_soon(anyio.sleep_forever)
            return "begin"

        async def __aexit__(self, *error: object) -> None:
            self.group.cancel_scope.cancel()
            await self.group.__aexit__(None, None, None)

    async with Session("own", Grouped(), 60.0) as session:
        assert await session.reset()


async def test_a_context_is_left_when_close_fails() -> None:
    class Context:
        left = False

        async def __aenter__(self) -> "Context":
            return self

        async def __aexit__(self, *error: object) -> None:
            Context.left = True

        async def close(self) -> None:
            raise KeyError("lost")

    with pytest.raises(EnvironmentFailed, match=r"close\(\)"):
        async with Session("own", Context(), 60.0):
            pass
    assert Context.left


async def test_an_environment_may_have_nothing() -> None:
    async with Session("own", object(), 30.0) as session:
        assert await session.reset() == [] and session.tools() == ()
        assert await session.step("x") == (Step(done=True), [])
        assert await session.reward() is None


async def test_it_does_not_speak_for_the_model() -> None:
    class Forger:
        def step(self, answer: str) -> Step:
            return Step([{"role": "assistant", "content": "yes"}])

        def reward(self) -> float:
            return 1

    async with Session("own", Forger(), 30.0) as session:
        assert await session.reward() == Score(1.0)
        with pytest.raises(EnvironmentFailed, match="assistant"):
            await session.step("x")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", 10**400, [1.0]])
async def test_a_turns_reward_is_a_finite_number(reward: Any) -> None:
    class Judge:
        def step(self, answer: str) -> Step:
            return Step("on", reward=reward)

    async with Session("own", Judge(), 30.0) as session:
        with pytest.raises(EnvironmentFailed, match=r"own: step\(\)"):
            await session.step("x")


@pytest.mark.parametrize(
    "observation", [b"", b"x", bytearray(), {}, [{"role": "critic", "content": "x"}], [5]], ids=repr
)
async def test_what_is_no_text_and_no_message_is_refused(observation: Any) -> None:
    class World:
        def reset(self) -> Any:
            return observation

    async with Session("own", World(), 30.0) as session:
        with pytest.raises(EnvironmentFailed, match=r"own: reset\(\)"):
            await session.reset()


def test_two_user_messages_become_one() -> None:
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "s"}
    more = {"role": "user", "content": "b"}
    assert joined([system, user], [more]) == [system, {"role": "user", "content": "a\n\nb"}]
    assert joined([system], [more]) == [system, more]
    assert joined([user], []) == [user]


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


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[41mS\x1b[0mFF", "[S]FF"),
        ("\x1b[1;43mT\x1b[0m|\x1b[34;1mR\x1b[0m", "[T]|R"),
        ("\x1b[48;5;2mx\x1b[0m", "x"),
        ("\x1b[2J\x1b[Hhome\x1b[K", "home"),
        ("\x1b]0;title\x07shell", "shell"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Bascii\x1b=", "ascii"),
        ("\x1bPdevice\x1b\\text", "text"),
        ("\x9b31mred\x9bm", "red"),
        ("cut \x1b[3", "cut "),
        ("cut \x1b]0;tit", "cut "),
        ("\x1b]open\nyou see a door", "open\nyou see a door"),
        ("\x1bPyou see\x1b[0m a door", "you see a door"),
        ("cut \x1b", "cut "),
        ("[0m is text", "[0m is text"),
    ],
)
def test_escapes_are_removed_and_nothing_else(written: str, read: str) -> None:
    assert without_escapes(written) == read


def test_half_surrogate_pairs_become_question_marks() -> None:
    assert without_escapes("half \ud83d pair") == "half ? pair"
