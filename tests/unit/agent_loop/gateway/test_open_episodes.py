"""A gateway's episodes against a queue in memory: leased on demand, ended once, given up when late."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway import open_episodes
from rl_async.agent_loop.gateway.chat import ChatMessage, ChatRequest
from rl_async.agent_loop.gateway.episode import GatewayEpisode
from rl_async.agent_loop.gateway.open_episodes import Ending, OpenEpisodes
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.errors import EngineLost, QueueLost, RequestRefused
from rl_async.messages import Done, Leased, LeasedGroup, Refused, SampleKey, Trajectory
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config


class FakeQueue:
    """Has the given groups, and says that the run is over when told to."""

    def __init__(self, groups: Sequence[LeasedGroup] = ()) -> None:
        self.groups = list(groups)
        self.rows: list[tuple[Trajectory, ...]] = []
        self.failures: list[tuple[int, int, str]] = []
        self.over = asyncio.Event()
        self.answer: Done | Refused = Done()
        self.failed = asyncio.Event()
        self.renewed: list[list[SampleKey]] = []
        self.renewal = asyncio.Event()

    async def lease(self, max_groups: int, wait_s: float, *, idle_s: float | None = None) -> Leased:
        if max_groups and self.groups:
            taken, self.groups = self.groups[:max_groups], self.groups[max_groups:]
            return Leased(groups=taken)
        await self.over.wait()
        return Leased(groups=[], finished=True)

    async def renew(self, held: list[SampleKey]) -> Done:
        self.renewed.append(held)
        self.renewal.set()
        return Done()

    async def put(self, *rows: Trajectory) -> Done | Refused:
        self.rows.append(rows)
        return self.answer

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused:
        self.failures.append((group_id, sample, error))
        self.failed.set()
        return Done()


class Gone:
    """An engine that is never there."""

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        raise EngineLost("no engine answered")


@asynccontextmanager
async def gateway(
    queue: FakeQueue, renderer: ChatRenderer, engine: Any, rollout: Any = None, **agent: Any
) -> AsyncIterator[OpenEpisodes]:
    config = run_config(rollout, **agent)
    async with RewardService(RewardConfig()) as rewards:
        episodes = OpenEpisodes(config, renderer, engine, queue, rewards)
        running = asyncio.create_task(episodes.run())
        yield episodes
        queue.over.set()
        await asyncio.wait_for(running, 10)


def ask(*texts: str, **changes: Any) -> ChatRequest:
    messages = [ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    plain = ChatRequest(messages, [], [], None, None, None, False, False, "")
    return plain._replace(**changes)


async def begin(episodes: OpenEpisodes) -> GatewayEpisode:
    episode = await episodes.begin(5.0)
    assert episode is not None
    return episode


async def test_samples_are_leased_when_asked_for_and_named_by_secrets(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=2), leased(samples=1)])
    async with gateway(queue, renderer, Gone()) as episodes:
        await asyncio.sleep(0)
        assert len(queue.groups) == 2
        first, second = await begin(episodes), await begin(episodes)
        assert len(queue.groups) == 1 and (first.sample, second.sample) == (0, 1)
        assert len({first.id, second.id}) == 2 and len(first.id) >= 22
        waiting = asyncio.create_task(begin(episodes))
        assert (await waiting).sample == 0
        assert await episodes.begin(0.01) is None and not episodes.finished
        late = asyncio.create_task(episodes.begin(30.0))
        await asyncio.sleep(0)
        queue.over.set()
        assert await late is None and episodes.finished


async def test_all_rows_are_put_at_once_with_the_programs_reward(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    engine = ScriptedEngine(renderer, ["1", "2", "3"], versions=[3, 4, 5])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        first = await episode.complete(ask("a?"))
        assert (first.message.text, first.finish_reason, first.sampled_tokens) == ("1", "stop", 2)
        await episode.complete(ask("a?", "1", "b?"))
        await episode.complete(ask("a?", "1", "c?"))
        ended = await episodes.end(episode.id, Ending(reward=0.5, parts={"x": 1.0}))
        assert (ended.accepted, ended.rows, ended.reward) == (True, 2, 0.5)
    ((one, two),) = queue.rows
    assert [row.segment for row in (one, two)] == [0, 1] and one.episode_id == two.episode_id == "7.0.1"
    assert [(row.reward, row.reward_parts) for row in (one, two)] == [(0.5, {"x": 1.0})] * 2
    assert [run.version.step for row in (one, two) for run in row.versions] == [3, 4, 5]
    assert [int(row.loss_mask.sum()) for row in (one, two)] == [4, 2]
    assert queue.failures == [] and set(engine.sessions) == {"7.0.1"}


async def test_a_second_end_is_not_accepted_and_a_repeated_one_gets_its_answer(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["4"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("2+2"))
        ending = Ending(reward=0.5, idempotency_key="k")
        ended = await episodes.end(episode.id, ending)
        assert ended.accepted and ended == await episodes.end(episode.id, ending)
        for second in (
            Ending(reward=1.0),
            Ending(reward=0.5),
            Ending(error="x"),
            Ending(),
            Ending(idempotency_key="l"),
        ):
            late = await episodes.end(episode.id, second)
            assert (late.accepted, late.rows, late.reward) == (False, 1, 0.5) and "0.5" in late.reason
    assert len(queue.rows) == 1 and queue.failures == []


async def test_a_reward_after_the_deadline_is_not_accepted(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["4"]), episode_timeout_s=0.05) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("2+2"))
        async with asyncio.timeout(30):
            await queue.failed.wait()
            late = await episodes.end(episode.id, Ending(reward=1.0))
    assert (late.accepted, late.rows, late.reward) == (False, 0, None) and "agent.episode_timeout_s" in late.reason


async def test_an_error_without_words_fails_the_sample(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["4"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("2+2"))
        assert (await episodes.end(episode.id, Ending(error=""))).rows == 0
    assert queue.rows == [] and len(queue.failures) == 1


def test_an_error_of_null_is_no_ending() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"error": null}', type=Ending)


async def test_a_reward_with_an_error_is_refused(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["4"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("2+2"))
        for both in (Ending(reward=1.0, error="x"), Ending(parts={"a": 1.0}, error="x")):
            with pytest.raises(RequestRefused) as refused:
                await episodes.end(episode.id, both)
            assert (refused.value.status, refused.value.param) == (400, "error") and "reward" in str(refused.value)
        assert (await episodes.end(episode.id, Ending(reward=1.0))).accepted, "the episode stays open"
    assert queue.failures == []


async def test_an_end_that_could_not_be_handed_over_may_be_posted_again(renderer: ChatRenderer) -> None:
    class Deaf(FakeQueue):
        """Loses the first of everything that it is told."""

        lost = 0

        async def put(self, *rows: Trajectory) -> Done | Refused:
            self.lost += 1
            if self.lost == 1:
                raise QueueLost("no answer")
            return await super().put(*rows)

    queue = Deaf([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["4"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("2+2"))
        with pytest.raises(QueueLost):
            await episodes.end(episode.id, Ending(reward=1.0))
        ended = await episodes.end(episode.id, Ending(reward=1.0))
        assert (ended.accepted, ended.rows, ended.reward) == (True, 1, 1.0)
    assert len(queue.rows) == 1


async def renewal(queue: FakeQueue) -> None:
    queue.renewed.clear()
    queue.renewal.clear()
    async with asyncio.timeout(10):
        await queue.renewal.wait()


async def test_renewals_list_open_episodes_and_samples_that_no_program_has(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_episodes, "RENEWALS_PER_LEASE", 1500)
    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, Gone()) as episodes:
        episode = await begin(episodes)
        await renewal(queue)
        assert sorted(queue.renewed[0]) == [(7, 0, 1), (7, 1, 1)]
        await episodes.end(episode.id, Ending(error="given up"))
        await renewal(queue)
        assert queue.renewed[0] == [(7, 1, 1)]


async def test_without_a_reward_the_runs_functions_score_the_last_answer(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["4", "5"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?"))
        await episode.complete(ask("what is 2+3?"))
        assert (await episodes.end(episode.id, Ending())).reward == 1.0
    ((one, two),) = queue.rows
    assert [(row.reward, row.scored, row.reward_parts) for row in (one, two)] == [
        (1.0, True, {"exact_answer": 1.0})
    ] * 2


async def test_a_refusal_leaves_the_episode_open(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"])) as episodes:
        episode = await begin(episodes)
        with pytest.raises(RequestRefused) as refused:
            await episodes.end(episode.id, Ending(reward=1.0))
        assert refused.value.code == "no_answers"
        await episode.complete(ask("a?"))
        for ending in (
            Ending(reward=float("inf")),
            Ending(reward=1e39),
            Ending(reward=1.0, parts={"x": float("nan")}),
            Ending(parts={"x": 1}),
        ):
            with pytest.raises(RequestRefused):
                await episodes.end(episode.id, ending)
        assert (await episodes.end(episode.id, Ending(reward=1.0))).accepted
        with pytest.raises(RequestRefused) as refused:
            episodes.get(episode.id)
        assert refused.value.code == "episode_ended"
        with pytest.raises(RequestRefused) as refused:
            await episodes.end("guessed", Ending(reward=1.0))
        assert refused.value.code == "unknown_episode"
    assert len(queue.rows) == 1


async def test_what_the_queue_does_not_want_any_more_is_said(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    queue.answer = Refused(code="fenced", reason="too late")
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?"))
        ended = await episodes.end(episode.id, Ending(reward=1.0))
    assert (ended.accepted, ended.reason) == (False, "too late")


async def test_a_program_may_give_up(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, Gone()) as episodes:
        episode = await begin(episodes)
        with pytest.raises(EngineLost):
            await episode.complete(ask("a?"))
        assert (await episodes.end(episode.id, Ending(error="sandbox"))).accepted
    assert queue.failures == [(7, 0, "the agent program: sandbox")] and queue.rows == []


async def test_episodes_without_an_end_and_samples_without_a_program_are_given_up(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=3)])
    async with gateway(queue, renderer, Gone(), episode_timeout_s=0.05) as episodes:
        episode = await begin(episodes)
        async with asyncio.timeout(10):
            while len(queue.failures) < 3:
                queue.failed.clear()
                await queue.failed.wait()
        with pytest.raises(RequestRefused) as refused:
            episodes.get(episode.id)
        assert refused.value.code == "episode_ended"
    assert sorted(sample for _, sample, _ in queue.failures) == [0, 1, 2]
    assert {error.partition(":")[0] for _, _, error in queue.failures} == {
        "EpisodeTimeout",
        "no agent program requested it",
    }


async def test_an_episode_whose_program_is_silent_is_given_up_and_one_with_heartbeats_is_not(
    renderer: ChatRenderer,
) -> None:
    queue = FakeQueue([leased(samples=3)])
    async with gateway(queue, renderer, Gone(), gateway=GatewayConfig(idle_timeout_s=2.0)) as episodes:
        silent, living = await begin(episodes), await begin(episodes)
        async with asyncio.timeout(30):
            while not queue.failures:
                living.heard()
                await asyncio.sleep(0.01)
        assert episodes.get(living.id) is living
        with pytest.raises(RequestRefused):
            episodes.get(silent.id)
        async with asyncio.timeout(30):
            while len(queue.failures) < 3:  # no program is left, and nobody asks for the third sample
                queue.failed.clear()
                await queue.failed.wait()
        assert episodes.unattended_s(time.monotonic()) > 2.0
    assert "agent.gateway.idle_timeout_s" in queue.failures[0][2]


async def test_waiting_for_an_answer_is_no_silence(renderer: ChatRenderer) -> None:
    asked, answering = asyncio.Event(), asyncio.Event()
    scripted = ScriptedEngine(renderer, ["4"])

    class Slow:
        async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
            asked.set()
            await answering.wait()
            return await scripted.generate(request, session=session)

    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, Slow(), gateway=GatewayConfig(idle_timeout_s=0.2)) as episodes:
        waiting, silent = await begin(episodes), await begin(episodes)
        answer = asyncio.create_task(waiting.complete(ask("a?")))
        await asked.wait()
        async with asyncio.timeout(30):
            await queue.failed.wait()
        with pytest.raises(RequestRefused):
            episodes.get(silent.id)
        answering.set()
        assert (await answer).message.text == "4"
        assert (await episodes.end(waiting.id, Ending(reward=1.0))).accepted


async def test_open_episodes_are_listed_without_their_ids_and_ended_by_name(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?"))
        listing = episodes.listing()
        assert episode.id not in str(listing) and listing["samples_waiting"] == 1 and listing["unattended_s"] == 0
        (listed,) = listing["episodes"]
        assert (listed["episode"], listed["task_id"], listed["answers"]) == ("7.0.1", "t:0", 1)
        with pytest.raises(RequestRefused) as refused:
            await episodes.give_back("7.0.2", "x")
        assert refused.value.status == 404
        assert (await episodes.give_back("7.0.1", "x")).accepted and not episodes.listing()["episodes"]
    assert [(group, sample) for group, sample, _ in queue.failures] == [(7, 0)]


async def test_requests_can_be_kept_out_of_training(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["1", "2", "3"])) as episodes:
        episode = await begin(episodes)
        assert (await episode.complete(ask("title?"), train=False)).message.text == "1"
        assert (await episode.complete(ask("title?", model="x/policy-untrained"))).message.text == "2"
        with pytest.raises(RequestRefused) as refused:
            await episodes.end(episode.id, Ending(reward=1.0))
        assert refused.value.code == "no_answers", "there is nothing to train on"
        await episode.complete(ask("title?", "1", "a?"))
        assert (await episodes.end(episode.id, Ending(reward=1.0))).rows == 1
    ((row,),) = queue.rows
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == "3<|im_end|>"


async def test_an_end_that_comes_while_the_episode_is_given_up_is_refused(renderer: ChatRenderer) -> None:
    failing, failed = asyncio.Event(), asyncio.Event()

    class SlowQueue(FakeQueue):
        async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused:
            failing.set()
            await failed.wait()
            return await super().fail(group_id, sample, attempt, error)

    queue = SlowQueue([leased()])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"]), episode_timeout_s=0.05) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?"))
        await asyncio.wait_for(failing.wait(), 10)
        with pytest.raises(RequestRefused) as refused:
            await episodes.end(episode.id, Ending(reward=1.0))
        assert refused.value.code == "episode_ended"
        failed.set()
        await asyncio.wait_for(queue.failed.wait(), 10)
    assert queue.rows == [] and len(queue.failures) == 1


async def test_an_answer_that_comes_after_the_end_is_not_recorded(renderer: ChatRenderer) -> None:
    released = asyncio.Event()
    scripted = ScriptedEngine(renderer, ["4", "5"])

    class Slow:
        async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
            if scripted.requests:
                await released.wait()
            return await scripted.generate(request, session=session)

    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, Slow()) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?"))
        late = asyncio.create_task(episode.complete(ask("b?")))
        await asyncio.sleep(0)
        await episodes.end(episode.id, Ending(reward=0.0))
        released.set()
        with pytest.raises(RequestRefused) as refused:
            await late
        assert refused.value.code == "episode_ended"
    assert [len(rows) for rows in queue.rows] == [1]


async def test_a_task_with_unlisted_tools_fails_and_loads_nothing(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(tools=["antigravity:fly"]), leased(tools=["calculator"])])
    async with gateway(queue, renderer, Gone()) as episodes:
        assert await episodes.begin(5.0) is None and not episodes.finished
        assert [tool.name for tool in (await begin(episodes)).tools] == ["calculator"]
    ((_, _, error),) = queue.failures
    assert "data.trust_code" in error and "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ask("a?", "b"), "unsupported_value"),
        (ask(), "invalid_request"),
        (ask("a" * 300), "context_length_exceeded"),
    ],
    ids=["assistant last", "nothing", "long"],
)
async def test_requests_that_cannot_be_trained_on(renderer: ChatRenderer, request_: ChatRequest, code: str) -> None:
    queue = FakeQueue([leased()])
    engine = ScriptedEngine(renderer, ["5"])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        with pytest.raises(RequestRefused) as refused:
            await episode.complete(request_)
        assert refused.value.code == code and engine.requests == []
        await episode.complete(ask("a?"))


async def test_tools_that_the_template_does_not_print_are_refused(renderer: ChatRenderer) -> None:
    request = ask("a?")._replace(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    for unprinted in ("refuse", "allow"):
        engine = ScriptedEngine(renderer, ['<tool_call>{"arguments": {}}</tool_call>'])
        queue = FakeQueue([leased()])
        async with gateway(queue, renderer, engine, unprinted_tools=unprinted) as episodes:
            episode = await begin(episodes)
            if unprinted == "refuse":
                with pytest.raises(RequestRefused) as refused:
                    await episode.complete(request)
                assert refused.value.param == "tools" and engine.requests == []
                continue
            assert (await episode.complete(request)).message.text == engine.says[0], "a broken call is text"
            await episodes.end(episode.id, Ending(reward=0.0))
            assert [call.problem for call in queue.rows[0][0].turns[-1].tool_calls] == ["no_name"]


class WaitsForTheLoop(ChatRenderer):
    """Encodes a prompt only once the event loop has had a turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)
        self.turn = threading.Event()

    def prompt(self, *given: Any, **options: Any) -> list[int]:
        assert self.turn.wait(5.0), "the event loop was blocked"
        return super().prompt(*given, **options)


async def test_a_long_prompt_does_not_block_the_event_loop(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = WaitsForTheLoop(tokenizer)
    queue = FakeQueue([leased()])
    async with gateway(queue, renderer, Gone()) as episodes:
        episode = await begin(episodes)
        asyncio.get_running_loop().call_later(0.01, renderer.turn.set)
        with pytest.raises(RequestRefused) as refused:
            await episode.complete(ask("a" * 100_000))
    assert refused.value.code == "context_length_exceeded"


async def test_limits_of_tokens_and_answers(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    engine = ScriptedEngine(renderer, ["1+2+3+4", "1+2", "7"])
    options = {"gateway": GatewayConfig(max_answers=3), "max_tokens": 64}
    async with gateway(queue, renderer, engine, {"max_tokens": 8}, **options) as episodes:
        episode = await begin(episodes)
        done = await episode.complete(ask("a?", max_tokens=3))
        assert (done.message.text, done.finish_reason, done.sampled_tokens) == ("1+2", "length", 3)
        done = await episode.complete(ask("a?", stops=["2"]))
        assert (done.message.text, done.finish_reason, done.stop) == ("1+", "stop", "2")
        await episode.complete(ask("a?", "1+", "b?", max_tokens=99))
        assert [request.max_tokens for request in engine.requests] == [3, 8, 8]
        with pytest.raises(RequestRefused, match="max_answers"):
            await episode.complete(ask("a?"))
        await episodes.end(episode.id, Ending(reward=0.0))
    cut, stopped = queue.rows[0]
    assert (cut.finish_reason, int(cut.loss_mask.sum())) == ("length", 3)
    text = renderer.decode(stopped.token_ids[stopped.loss_mask].tolist())
    assert text == "1+27<|im_end|>", "the stop string is in the row, what came behind it is not"


async def test_held_out_tasks_are_sampled_as_evaluations_are(renderer: ChatRenderer) -> None:
    queue = FakeQueue([msgspec.structs.replace(leased(), partition="eval")])
    engine = ScriptedEngine(renderer, ["5"])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?", temperature=0.9))
        assert episode.unobeyed(ask("a?", temperature=1.0, top_p=1.0)) == {}
        assert episode.unobeyed(ask("a?", temperature=0.9, unobeyed={"top_k": 5})) == {"temperature": 0.9, "top_k": 5}
        await episodes.end(episode.id, Ending())
    assert engine.requests[0].sampling.temperature == run_config().eval.temperature
    assert queue.rows[0][0].partition == "eval"
