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
from rl_async.agent_loop.environments.host_pool import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_FAILURES,
    Give,
    HostPlan,
    Prepare,
    Refuse,
    StartHost,
    StopHost,
)
from rl_async.agent_loop.environments.session import Session, joined, without_escapes
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.tools.tool import Observation, Step, Tool
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


# Who gets which environment, and which host is replaced when: decided without processes, on a clock of the test's.


def started(*, prepares: bool = True, hosts: int = 1, most: int = 8, ready: int = 0, starting: int = 8) -> HostPlan:
    """A plan whose hosts 0, 1, ... are up."""
    plan = HostPlan(hosts=hosts, most=most, ready=ready, starting=starting)
    assert plan.decide(0.0) == [StartHost(host) for host in range(hosts)]
    for host in range(hosts):
        plan.host_started(host, prepares=prepares)
    return plan


def test_what_is_prepared_ahead_is_given_at_once_and_replaced() -> None:
    plan = started(ready=2)
    assert plan.decide(0.0) == [Prepare(0, 0), Prepare(0, 1)]
    plan.prepared(0)
    plan.prepared(1)
    assert plan.decide(0.0) == []
    plan.ask(5)
    assert plan.decide(0.0) == [Give(5, 0, 0), Prepare(0, 2)]


def test_nothing_is_prepared_ahead_unless_it_is_asked_for() -> None:
    plan = started()
    assert plan.decide(0.0) == []
    plan.ask(5)
    assert plan.decide(0.0) == [Prepare(0, 0)]
    assert plan.decide(0.0) == []
    plan.prepared(0)
    assert plan.decide(0.0) == [Give(5, 0, 0)]


def test_without_preparation_an_episode_gets_the_right_to_open_one() -> None:
    plan = started(prepares=False, starting=2)
    for ticket in range(3):
        plan.ask(ticket)
    assert plan.decide(0.0) == [Give(0, 0, 0), Give(1, 0, 1)]
    plan.opened(0)
    assert plan.decide(0.0) == [Give(2, 0, 2)]


def test_no_more_start_at_once_and_live_at_once_than_allowed() -> None:
    plan = started(most=3, ready=1, starting=2)
    for ticket in range(3):
        plan.ask(ticket)
    assert plan.decide(0.0) == [Prepare(0, 0), Prepare(0, 1)]
    plan.prepared(0)
    plan.prepared(1)
    assert plan.decide(0.0) == [Give(0, 0, 0), Give(1, 0, 1), Prepare(0, 2)]
    plan.prepared(2)
    assert plan.decide(0.0) == [Give(2, 0, 2)], "no room to prepare one more"
    plan.ending(0)
    assert plan.decide(0.0) == [], "one that is being closed still lives"
    plan.ended(0)
    assert plan.decide(0.0) == [Prepare(0, 3)]


def test_environments_are_spread_over_the_hosts() -> None:
    plan = started(hosts=2, ready=4)
    assert [action.host for action in plan.decide(0.0) if isinstance(action, Prepare)] == [0, 1, 0, 1]


def test_who_waits_no_longer_gets_none() -> None:
    plan = started()
    plan.ask(1)
    plan.ask(2)
    plan.withdraw(1)
    assert plan.decide(0.0) == [Prepare(0, 0)]
    plan.prepared(0)
    assert plan.decide(0.0) == [Give(2, 0, 0)]
    plan.withdraw(2)  # too late, and no harm


def test_a_lost_host_is_replaced_at_once_and_what_it_prepared_is_prepared_again() -> None:
    plan = started(ready=1)
    assert plan.decide(0.0) == [Prepare(0, 0)]
    plan.prepared(0)
    plan.decide(0.0)
    plan.host_lost(0, "killed", 1.0)
    assert plan.decide(1.0) == [StartHost(1)]
    plan.host_started(1, prepares=True)
    assert plan.decide(1.0) == [Prepare(1, 1)]
    for late in (plan.prepared, plan.opened, plan.ending, plan.ended):
        late(0)  # of an environment that was lost with its host
    plan.prepare_failed(0, "late", 1.0)


def test_a_host_that_ends_again_and_again_is_started_after_growing_pauses() -> None:
    plan, now, pauses = started(), 0.0, []
    for host in range(12):
        plan.host_lost(host, "killed", now)
        at = plan.wake_at(now)
        pauses.append((at or now) - now)
        assert (at is None) == (host == 0)
        assert host == 0 or plan.decide(now) == []
        now = at or now
        assert plan.decide(now) == [StartHost(host + 1)]
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_who_waits_is_told_when_no_host_can_be_started() -> None:
    plan, now = HostPlan(hosts=1, most=8, ready=0, starting=8), 0.0
    plan.ask(3)
    for host in range(MOST_FAILURES):
        assert not any(isinstance(action, Refuse) for action in plan.decide(now)), host
        plan.host_lost(host, "exploded", now)
        now = plan.wake_at(now) or now
    assert Refuse(3, "exploded") in plan.decide(now)


def test_a_success_forgets_earlier_failures() -> None:
    plan = started(prepares=False)
    plan.host_lost(0, "killed", 0.0)
    plan.decide(0.0)
    plan.host_started(1, prepares=False)
    plan.ask(0)
    assert plan.decide(0.0) == [Give(0, 1, 0)]
    plan.opened(0)
    plan.host_lost(1, "killed", 5.0)
    assert plan.decide(5.0) == [StartHost(2)], "without a pause"


def test_a_failed_preparation_is_told_to_one_who_waits() -> None:
    plan = started()
    plan.ask(1)
    plan.ask(2)
    assert plan.decide(0.0) == [Prepare(0, 0), Prepare(0, 1)]
    plan.prepare_failed(0, "no image", 0.0)
    assert plan.decide(0.0) == [Refuse(1, "no image")]
    plan.ended(0)
    plan.prepared(1)
    assert plan.decide(0.0) == [Give(2, 0, 1)]


def test_preparing_ahead_pauses_after_failures_but_not_for_those_who_wait() -> None:
    plan, now = started(ready=1), 0.0
    for instance in range(3):
        assert plan.decide(now) == [Prepare(0, instance)]
        plan.prepare_failed(instance, "no image", now)
        plan.ended(instance)
        now = plan.wake_at(now) or now
    assert now == 3 * FIRST_PAUSE_S
    before = now - FIRST_PAUSE_S
    assert plan.decide(before) == []
    plan.ask(1)
    assert plan.decide(before)[0] == Prepare(0, 3)


def test_a_host_with_a_call_that_never_returns_is_replaced_and_ends_when_the_others_are_through() -> None:
    plan = started(prepares=False)
    plan.ask(0)
    plan.ask(1)
    plan.decide(0.0)
    plan.ended(0, stuck=True)
    assert plan.decide(0.0) == [StartHost(1)]
    plan.host_started(1, prepares=False)
    plan.ask(2)
    assert plan.decide(0.0) == [Give(2, 1, 2)], "the stuck host gets nothing new"
    plan.ended(1)
    assert plan.decide(0.0) == [StopHost(0)]
    plan.host_lost(0, "was replaced", 0.0)
    assert plan.decide(0.0) == [], "it was no loss"


def test_what_a_draining_host_has_prepared_is_used_first() -> None:
    plan = started(hosts=2, ready=2)
    plan.decide(0.0)
    plan.prepared(0)
    plan.prepared(1)
    plan.ask(0)
    assert Give(0, 0, 0) in plan.decide(0.0)
    plan.prepared(2)  # at host 0
    plan.ask(1)
    assert Give(1, 1, 1) in plan.decide(0.0)
    plan.prepared(3)
    plan.ended(1, stuck=True)
    for action in plan.decide(0.0):
        assert action == StartHost(2)
    plan.ask(2)
    assert Give(2, 1, 3) in plan.decide(0.0)


def test_a_stuck_environment_still_takes_room() -> None:
    plan = started(prepares=False, most=2)
    for ticket in range(3):
        plan.ask(ticket)
    assert plan.decide(0.0) == [Give(0, 0, 0), Give(1, 0, 1)]
    plan.ended(0, stuck=True)
    assert plan.decide(0.0) == [StartHost(1)]
    plan.host_started(1, prepares=False)
    assert plan.decide(0.0) == []
    plan.ended(1)
    assert plan.decide(0.0) == [StopHost(0), Give(2, 1, 2)]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_everyone_is_served_or_told_and_no_limit_is_broken(seed: int) -> None:
    draw = random.Random(seed)
    prepares, ready, starting, most = draw.random() < 0.7, draw.randrange(3), draw.randrange(1, 4), draw.randrange(3, 7)
    plan = HostPlan(hosts=draw.randrange(1, 3), most=most, ready=ready, starting=starting)
    now, tickets = 0.0, 0
    waiting, starting_hosts, hosts = set[int](), set[int](), set[int]()
    preparing, opening, in_use, ending = (dict[int, int]() for _ in range(4))  # environments and their hosts
    prepared = dict[int, int]()

    def lose(host: int) -> None:
        starting_hosts.discard(host)
        hosts.discard(host)
        for group in (preparing, opening, in_use, ending, prepared):
            for instance in [instance for instance, at in group.items() if at == host]:
                del group[instance]

    for step in range(1000):
        ask = step < 300
        for action in plan.decide(now):
            match action:
                case StartHost(host):
                    starting_hosts.add(host)
                case StopHost(host):
                    assert host not in {at for g in (preparing, opening, in_use, ending) for at in g.values()}
                    lose(host)
                case Prepare(host, instance):
                    assert host in hosts and prepares
                    preparing[instance] = host
                case Give(ticket, host, instance):
                    assert host in hosts
                    assert (prepared.pop(instance) == host) if prepares else instance not in in_use | opening
                    waiting.remove(ticket)
                    opening[instance] = host
                case Refuse(ticket, _):
                    waiting.remove(ticket)
        assert len(preparing | opening | in_use | ending | prepared) <= most
        assert len(preparing if prepares else opening) <= starting
        choices = ["wait", "host up", "prepared", "open", "end", "ended"]
        choices += ["ask", "ask", "lose", "prepare fails", "stuck", "withdraw"] if ask else []
        match draw.choice(choices) if ask else choices[step % len(choices)]:
            case "wait":
                now = plan.wake_at(now) or now
            case "ask":
                waiting.add(tickets)
                plan.ask(tickets)
                tickets += 1
            case "withdraw" if waiting:
                ticket = draw.choice(sorted(waiting))
                waiting.remove(ticket)
                plan.withdraw(ticket)
            case "host up" if starting_hosts:
                host = starting_hosts.pop()
                hosts.add(host)
                plan.host_started(host, prepares=prepares)
            case "lose" if hosts | starting_hosts:
                host = draw.choice(sorted(hosts | starting_hosts))
                lose(host)
                plan.host_lost(host, "lost", now)
            case "prepared" if preparing:
                instance, host = preparing.popitem()
                prepared[instance] = host
                plan.prepared(instance)
            case "prepare fails" if preparing:
                instance, ending[instance] = (taken := preparing.popitem())[0], taken[1]
                plan.prepare_failed(instance, "failed", now)
            case "open" if opening:
                instance, in_use[instance] = (taken := opening.popitem())[0], taken[1]
                plan.opened(instance)
            case "end" if in_use:
                instance, ending[instance] = (taken := in_use.popitem())[0], taken[1]
                plan.ending(instance)
            case "ended" | "stuck" as how if ending:
                instance, _ = ending.popitem()
                plan.ended(instance, stuck=how == "stuck")
    assert not waiting, "nothing is lost in the last steps, which serve all who had waited"
