"""What one episode answers and records, and what it refuses."""

import asyncio
import base64
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async import tracing
from rl_async.agent_loop.chat_formats.format import TooLong
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway import anthropic, openai, responses, server
from rl_async.agent_loop.gateway.chat import ChatMessage, ChatRequest
from rl_async.agent_loop.gateway.gateway_episode import EpisodeRecorder, GatewayEpisode
from rl_async.agent_loop.gateway.server import Ending, OpenEpisodes, Program
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE
from rl_async.agent_loop.worker import FIRST_LINES
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.errors import EngineLost, QueueLost, RequestRefused
from rl_async.messages import Done, Refused, Trajectory
from rl_async.reward_loop.api import MOST_PARTS, MOST_REASON, PART_NAME
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.transfer_queue.images import MARK, MOST_IMAGES
from tests.support.tiny_models import byte_tokenizer, drawing
from tests.unit.agent_loop.fakes import FakeQueue, Gone, ScriptedEngine, ask, begin, gateway, leased, run_config
from tests.unit.agent_loop.test_episode import vision_chat


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
    assert [one.kind for one in row.activities] == ["generate"] * 3, "the engine was busy with what is untrained too"


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


async def test_large_tools_do_not_block_the_event_loop(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = WaitsForTheLoop(tokenizer)
    tools = [{"type": "function", "function": {"name": "f", "description": "a" * 100_000}}]
    request = openai.read_request(
        msgspec.json.encode({"messages": [{"role": "user", "content": "a?"}], "tools": tools})
    )
    engine = ScriptedEngine(renderer, ["5"])
    async with gateway(FakeQueue([leased()]), renderer, engine) as episodes:
        episode = await begin(episodes)
        asyncio.get_running_loop().call_later(0.01, renderer.turn.set)
        await episode.complete(request)


def test_tools_that_cannot_fit_are_not_encoded() -> None:
    class Encodes(ChatRenderer):
        encoded = 0

        def _encode_printed(self, printed: str, limit: int) -> tuple[int, ...]:
            token_ids = super()._encode_printed(printed, limit)
            Encodes.encoded += len(token_ids)
            return token_ids

    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHAT_TEMPLATE
    renderer = Encodes(byte_tokenizer(template))
    messages = [ChatMessage("user", "a?")]
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>a" * 1000}}]
    Encodes.encoded = 0
    with pytest.raises(TooLong):
        EpisodeRecorder(renderer).prompt(messages, tools, limit=500)
    assert Encodes.encoded == 0
    assert len(EpisodeRecorder(renderer).prompt(messages, tools, limit=20_000).token_ids) > 11_000


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
        stopped_at = done.sampled_tokens
        await episode.complete(ask("a?", "1+", "b?", max_tokens=99))
        assert [request.max_tokens for request in engine.requests] == [3, 8, 8]
        with pytest.raises(RequestRefused, match="max_answers"):
            await episode.complete(ask("a?"))
        await episodes.end(episode.id, Ending(reward=0.0))
    cut, stopped = queue.rows[0]
    assert (cut.finish_reason, int(cut.loss_mask.sum())) == ("length", 3)
    text = renderer.decode(stopped.token_ids[stopped.loss_mask].tolist())
    assert text == "1+27<|im_end|>", "the stop string is in the row, what came behind it is not"
    assert stopped_at + len("7") + 1 == int(stopped.loss_mask.sum()), "usage counts what is recorded"


async def test_held_out_tasks_are_sampled_as_evaluations_are(renderer: ChatRenderer) -> None:
    queue = FakeQueue([msgspec.structs.replace(leased(), partition="eval")])
    engine = ScriptedEngine(renderer, ["5"])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?", temperature=0.9))
        assert await episode.unobeyed(ask("a?", temperature=1.0, top_p=1.0)) == {}
        assert await episode.unobeyed(ask("a?", temperature=0.9, unobeyed={"top_k": 5})) == {
            "temperature": 0.9,
            "top_k": 5,
        }
        await episodes.end(episode.id, Ending())
    assert engine.requests[0].sampling.temperature == run_config().eval.temperature
    assert queue.rows[0][0].partition == "eval"


CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": {}}}
ARGUMENTS = '{"expression":"2+3"}'


@pytest.mark.parametrize(
    ("forces", "begins", "goes_on"),
    [
        ("", "<tool_call>", '{"name": "calculator", "arguments": ' + ARGUMENTS + "}</tool_call>"),
        ("calculator", '<tool_call>\n{"name": "calculator", "arguments":', " " + ARGUMENTS + "}</tool_call>"),
    ],
)
async def test_a_forced_call_is_begun_for_the_policy_which_trains_on_what_it_sampled(
    renderer: ChatRenderer, forces: str, begins: str, goes_on: str
) -> None:
    queue, engine = FakeQueue([leased()]), ScriptedEngine(renderer, [goes_on, "5"])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        request = ask("2+3?", tools=[CALCULATOR], forces=forces)
        assert await episode.unobeyed(request) == {}
        release = episode.release(asked := await episode.prepare(request))
        release.hear(renderer.encode(goes_on))
        assert release.more() == ("", "")
        done = await episode.answer(asked)
        assert [(call.name, call.arguments) for call in done.message.calls] == [("calculator", ARGUMENTS)]
        release.check(done.message)
        assert release.rest(done.message) == ("", "")
        assert renderer.decode(engine.requests[0].token_ids).endswith("assistant\n" + begins)
        assert done.prompt_tokens == len(engine.requests[0].token_ids) == await episode.count(request)
        again = [*request.messages, done.message, ChatMessage("tool", "5")]
        await episode.complete(ask(tools=[CALCULATOR])._replace(messages=again))
        await episodes.end(episode.id, Ending(reward=1.0))
    ((row,),) = queue.rows
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == f"{goes_on}<|im_end|>5<|im_end|>"
    assert f"assistant\n{begins}{goes_on}<|im_end|>" in renderer.decode(row.token_ids.tolist())
    assert [turn.text for turn in row.turns if turn.role == "assistant"] == [begins + goes_on, "5"]
    assert row.token_ids[: len(engine.requests[1].token_ids)].tolist() == engine.requests[1].token_ids


async def test_a_call_that_cannot_be_forced_is_counted() -> None:
    thinking = ChatRenderer(byte_tokenizer("{#- </think> -#}" + CHAT_TEMPLATE, eos="<|im_end|>"))
    queue, engine = FakeQueue([leased()]), ScriptedEngine(thinking, ["5"])
    async with gateway(queue, thinking, engine) as episodes:
        episode = await begin(episodes)
        assert await episode.unobeyed(ask("2+3?", tools=[CALCULATOR], forces="")) == {"tool_choice": "required"}
        request = ask("2+3?", tools=[CALCULATOR], forces="calculator")
        assert await episode.unobeyed(request) == {"tool_choice": "calculator"}
        assert (await episode.complete(request)).message.text == "5"


@pytest.mark.parametrize(("stop", "obeyed"), [("\n", False), (': {"', False), ("END", True)])
async def test_nothing_is_forced_in_which_a_stop_string_may_begin(
    renderer: ChatRenderer, stop: str, obeyed: bool
) -> None:
    arguments = " " + ARGUMENTS + "}</tool_call>"
    whole = '<tool_call>{"name": "calculator", "arguments":' + arguments
    engine = ScriptedEngine(renderer, [arguments if obeyed else whole.replace(": {", ":{")])
    async with gateway(FakeQueue([leased()]), renderer, engine) as episodes:
        episode = await begin(episodes)
        request = ask("2+3?", tools=[CALCULATOR], forces="calculator", stops=[stop])
        assert await episode.unobeyed(request) == ({} if obeyed else {"tool_choice": "calculator"})
        done = await episode.complete(request)
        assert [(call.name, call.arguments) for call in done.message.calls] == [("calculator", ARGUMENTS)]
        assert ("<tool_call>" in renderer.decode(engine.requests[0].token_ids)) == obeyed


async def test_a_forced_call_that_the_policy_breaks_is_streamed_as_the_text_that_it_is(renderer: ChatRenderer) -> None:
    broken = "calculator(2+3)</tool_call> so"
    async with gateway(FakeQueue([leased()]), renderer, ScriptedEngine(renderer, [broken] * 2)) as episodes:
        episode = await begin(episodes)
        request = ask("2+3?", tools=[CALCULATOR], forces="")
        release = episode.release(asked := await episode.prepare(request))
        sampled, sent = renderer.encode(broken), ""
        for size in range(1, len(sampled) + 1):
            release.hear(sampled[:size])
            sent += release.more()[1]
        streamed = await episode.answer(asked)
        release.check(streamed.message)
        unstreamed = await episode.complete(request)
        assert sent + release.rest(streamed.message)[1] == unstreamed.message.text == "<tool_call>" + broken
        assert streamed.message.calls == unstreamed.message.calls == ()


async def test_a_forced_call_needs_room(renderer: ChatRenderer) -> None:
    size = len(renderer.prompt([{"role": "user", "content": "a?"}]))
    queue, engine = FakeQueue([leased()]), ScriptedEngine(renderer, ["5"])
    async with gateway(queue, renderer, engine, max_tokens=size + 1) as episodes:
        episode = await begin(episodes)
        with pytest.raises(RequestRefused) as refused:
            await episode.complete(ask("a?", tools=[CALCULATOR], forces=""))
        assert refused.value.code == "context_length_exceeded"
        await episode.complete(ask("a?", tools=[CALCULATOR]))


async def test_an_episode_with_a_trace_names_its_spans_to_the_engine(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[tuple[str, str, str]] = []  # episode, key, parent
    spans = SimpleNamespace(
        traceparent=lambda episode, key: f"{episode} {key}",
        add=lambda episode, name, key, parent, *_: added.append((episode, key, parent)),
    )
    monkeypatch.setattr(tracing, "_spans", spans)
    queue = FakeQueue([msgspec.structs.replace(leased(samples=2), traced=[1])])
    engine = ScriptedEngine(renderer, ["1", "2", "3"])
    async with gateway(queue, renderer, engine) as episodes:
        for _ in range(2):
            episode = await begin(episodes)
            await episode.complete(ask("a?"))
            await episodes.end(episode.id, Ending(reward=1.0))
    assert {row.sample: row.traced for (row,) in queue.rows} == {0: False, 1: True}
    named = {request.traceparent for request in engine.requests}
    assert named == {"", "7.1.1 7.1.1.0"}
    assert added == [
        ("7.1.1", "7.1.1.0", "invoke_agent"),
        ("7.1.1", "invoke_agent", "episode"),
        ("7.1.1", "reward ", "episode"),
    ]


# Episodes are leased on demand, listed, and given up when they are late or silent.


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


async def renewal(queue: FakeQueue) -> None:
    queue.renewed.clear()
    queue.renewal.clear()
    async with asyncio.timeout(10):
        await queue.renewal.wait()


async def test_renewals_list_open_episodes_and_samples_that_no_program_has(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RENEWALS_PER_LEASE", 1500)
    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, Gone()) as episodes:
        episode = await begin(episodes)
        await renewal(queue)
        assert sorted(queue.renewed[0]) == [(7, 0, 1), (7, 1, 1)]
        await episodes.end(episode.id, Ending(error="given up"))
        await renewal(queue)
        assert queue.renewed[0] == [(7, 1, 1)]


async def test_samples_that_another_worker_plays_end(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RENEWALS_PER_LEASE", 1500)
    queue = FakeQueue([leased(samples=3)])
    async with gateway(queue, renderer, Gone()) as episodes:
        taken, kept = await begin(episodes), await begin(episodes)
        queue.gone = {(7, taken.sample, 1), (7, 2, 1)}
        async with asyncio.timeout(10):
            await queue.failed.wait()
        await renewal(queue)
        assert queue.renewed[-1] == [(7, kept.sample, 1)]
        with pytest.raises(RequestRefused) as refused:
            episodes.get(taken.id)
        assert refused.value.code == "episode_ended"
    assert [sample for _, sample, _ in queue.failures] == [taken.sample]


@pytest.mark.usefixtures("simulated_time")
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


@pytest.mark.usefixtures("simulated_time")
async def test_an_episode_whose_program_is_silent_is_given_up_and_one_with_heartbeats_is_not(
    renderer: ChatRenderer,
) -> None:
    queue = FakeQueue([leased(samples=3)])
    async with gateway(queue, renderer, Gone(), gateway=GatewayConfig(idle_timeout_s=2.0)) as episodes:
        silent, living = await begin(episodes), await begin(episodes)
        async with asyncio.timeout(30):
            while not queue.failures:
                living.heard()
                await asyncio.sleep(1.0)
        assert episodes.get(living.id) is living
        with pytest.raises(RequestRefused):
            episodes.get(silent.id)
        async with asyncio.timeout(30):
            while len(queue.failures) < 3:  # no program is left, and nobody asks for the third sample
                queue.failed.clear()
                await queue.failed.wait()
        assert episodes.unattended_s(time.monotonic()) > 2.0
    assert "agent.gateway.idle_timeout_s" in queue.failures[0][2]


async def test_a_pause_of_the_gateway_is_no_silence_of_programs(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.1)
    queue = FakeQueue([leased(samples=2)])
    async with gateway(queue, renderer, Gone(), gateway=GatewayConfig(idle_timeout_s=1.0)) as episodes:
        episode = await begin(episodes)
        await asyncio.sleep(0.05)
        time.sleep(2.0)  # noqa: ASYNC251  the process is to stand still
        await asyncio.sleep(0.4)
        assert episodes.get(episode.id) is episode and episodes.unattended_s(time.monotonic()) == 0.0
        async with asyncio.timeout(30):
            await queue.failed.wait()


@pytest.mark.usefixtures("simulated_time")
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


async def test_failures_that_are_alike_do_not_flood_the_log(
    renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    queue = FakeQueue([leased(samples=20)])
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"])) as episodes:
        for number in range(20):
            await episodes.end((await begin(episodes)).id, Ending(error=f"browser {number} crashed"))
    assert len(queue.failures) == 20
    told = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert len(told) == FIRST_LINES + 3 and "16 times" in told[-1]


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


async def test_a_task_with_unlisted_tools_fails_and_loads_nothing(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased(tools=["antigravity:fly"]), leased(tools=["calculator"])])
    async with gateway(queue, renderer, Gone()) as episodes:
        assert await episodes.begin(5.0) is None and not episodes.finished
        assert [tool.name for tool in (await begin(episodes)).tools] == ["calculator"]
    ((_, _, error),) = queue.failures
    assert "data.trust_code" in error and "antigravity" not in sys.modules


async def test_all_rows_are_put_at_once_with_the_programs_reward(renderer: ChatRenderer) -> None:
    queue = FakeQueue([leased()])
    engine = ScriptedEngine(renderer, ["1", "2", "3"], versions=[3, 4, 5])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        first = await episode.complete(ask("a?"))
        assert (first.message.text, first.finish_reason, first.sampled_tokens) == ("1", "stop", 2)
        await episode.complete(ask("a?", "1", "b?"))
        await episode.complete(ask("a?", "1", "c?"))
        reasons = {"x": "it is", "reward": "half of it" * MOST_REASON, "y": ""}
        ended = await episodes.end(episode.id, Ending(reward=0.5, parts={"x": 1.0, "y": 0.0}, reasons=reasons))
        assert (ended.accepted, ended.rows, ended.reward) == (True, 2, 0.5)
    ((one, two),) = queue.rows
    assert [row.segment for row in (one, two)] == [0, 1] and one.episode_id == two.episode_id == "7.0.1"
    assert [(row.reward, row.reward_parts) for row in (one, two)] == [(0.5, {"x": 1.0, "y": 0.0})] * 2
    kept = {"x": "it is", "reward": ("half of it" * MOST_REASON)[:MOST_REASON]}
    assert one.reward_reasons == two.reward_reasons == kept
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


@pytest.mark.usefixtures("simulated_time")
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
        details = {"parts": {"a": 1.0}}, {"reasons": {"reward": "so"}}
        for both in (Ending(reward=1.0, error="x"), *(Ending(error="x", **one) for one in details)):
            with pytest.raises(RequestRefused) as refused:
                await episodes.end(episode.id, both)
            assert (refused.value.status, refused.value.param) == (400, "error") and "reward" in str(refused.value)
        assert (await episodes.end(episode.id, Ending(reward=1.0))).accepted, "the episode stays open"
    assert queue.failures == []


async def test_an_end_that_could_not_be_handed_over_may_be_posted_again(renderer: ChatRenderer) -> None:
    class Deaf(FakeQueue):
        """Loses the first of everything that it is told."""

        lost = 0

        async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done | Refused:
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
            Ending(reward=1.0, parts={str(i): 0.0 for i in range(MOST_PARTS + 1)}),
            Ending(reward=1.0, parts={"n" * (PART_NAME + 1): 0.0}),
            Ending(parts={"x": 1}),
            Ending(reasons={"reward": "so"}),
            Ending(reward=1.0, parts={"x": 1.0}, reasons={"y": "not a part"}),
        ):
            with pytest.raises(RequestRefused) as refused:
                await episodes.end(episode.id, ending)
            blamed = "reasons" if ending.reward and ending.reasons else "parts" if ending.reward == 1.0 else "reward"
            assert refused.value.param == blamed
        most = {str(i).ljust(PART_NAME): 0.0 for i in range(MOST_PARTS)}
        assert (await episodes.end(episode.id, Ending(reward=1.0, parts=most))).accepted
        with pytest.raises(RequestRefused) as refused:
            episodes.get(episode.id)
        assert refused.value.code == "episode_ended"
        with pytest.raises(RequestRefused) as refused:
            await episodes.end("guessed", Ending(reward=1.0))
        assert refused.value.code == "unknown_episode"
    assert len(queue.rows) == 1


@pytest.mark.parametrize(
    ("code", "give_back", "played_again"),
    [
        (0, (75,), False),
        (0, "all", False),
        (1, (75,), False),
        (1, (), False),
        (1, "all", True),
        (75, (75,), True),
        (75, (), False),
        (-9, (), True),
        (137, (), True),
        (255, (), False),
    ],
)
async def test_only_failures_that_are_not_the_policys_are_played_again(
    renderer: ChatRenderer, code: int, give_back: Any, played_again: bool
) -> None:
    queue = FakeQueue([leased()])
    options = {"gateway": GatewayConfig(give_back=give_back)}
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["5"]), **options) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("a?"))
        ending = Ending(program=Program(code, "it said 5"), idempotency_key="once")
        ended = await episodes.end(episode.id, ending)
        assert ended.accepted != played_again
        assert await episodes.end(episode.id, ending) == ended
    assert (len(queue.failures), len(queue.rows)) == ((1, 0) if played_again else (0, 1))
    assert all((str(code) in row.error) == bool(code) and row.scored for (row,) in queue.rows)


async def test_a_program_that_failed_since_no_engine_answered_is_played_again(renderer: ChatRenderer) -> None:
    class Lost:
        lost = False

        async def generate(self, request: Any, **given: Any) -> Any:
            return await (Gone() if self.lost else engine).generate(request, **given)

    queue, engine, lost = FakeQueue([leased(samples=2)]), ScriptedEngine(renderer, ["5"] * 5), Lost()
    async with gateway(queue, renderer, lost) as episodes:
        for recovers in (False, True):
            episode, lost.lost = await begin(episodes), False
            await episode.complete(ask("a?"))
            lost.lost = True
            with pytest.raises(EngineLost):
                await episode.complete(ask("a?", "5", "b?"))
            lost.lost = False
            if recovers:
                await episode.complete(ask("a?", "5", "b?"))
            assert (await episodes.end(episode.id, Ending(program=Program(1)))).accepted == recovers
    assert len(queue.failures) == len(queue.rows) == 1


async def test_reward_functions_see_how_the_program_ended(renderer: ChatRenderer) -> None:
    class Scorer:
        async def score(self, task: Any, row: Trajectory, *others: Trajectory) -> None:
            row.reward = float(task.extra["program"] == {"exit_code": 2, "output": "so far"}) + task.extra["own"]

    queue = FakeQueue([leased(extra={"own": 7})])
    config = run_config()
    episodes = OpenEpisodes(config, renderer, ScriptedEngine(renderer, ["5"]), queue, Scorer())
    running = asyncio.create_task(episodes.run())
    episode = await begin(episodes)
    await episode.complete(ask("a?"))
    assert (await episodes.end(episode.id, Ending(program=Program(2, "so far")))).reward == 8.0
    queue.over.set()
    await asyncio.wait_for(running, 10)


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


@pytest.mark.usefixtures("simulated_time")
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


class SlowQueue(FakeQueue):
    """Takes rows only when told to."""

    def __init__(self) -> None:
        super().__init__([leased()])
        self.putting, self.taken = asyncio.Event(), asyncio.Event()

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done | Refused:
        self.putting.set()
        await self.taken.wait()
        return await super().put(*rows)


@pytest.mark.parametrize("train", [True, False])
async def test_an_episode_that_is_being_ended_samples_nothing(renderer: ChatRenderer, train: bool) -> None:
    queue, engine = SlowQueue(), ScriptedEngine(renderer, ["4", "5"])
    async with gateway(queue, renderer, engine) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("2+2"))
        prepared = await episode.prepare(ask("3+3"))
        ending = asyncio.create_task(episodes.end(episode.id, Ending(reward=1.0)))
        await queue.putting.wait()
        for late in (
            episode.prepare(ask("3+3")),
            episode.count(ask("3+3")),
            episode.answer(prepared, train=train),
            episode.complete(ask("3+3"), train=train),
        ):
            with pytest.raises(RequestRefused) as refused:
                await late
            assert (refused.value.code, refused.value.status) == ("episode_ended", 404)
        assert len(engine.requests) == 1
        queue.taken.set()
        assert (await ending).rows == 1


async def test_of_two_rewards_at_once_the_first_counts(renderer: ChatRenderer) -> None:
    queue = SlowQueue()
    async with gateway(queue, renderer, ScriptedEngine(renderer, ["4"])) as episodes:
        episode = await begin(episodes)
        await episode.complete(ask("2+2"))
        first = asyncio.create_task(episodes.end(episode.id, Ending(reward=1.0, idempotency_key="k")))
        await queue.putting.wait()
        again = asyncio.create_task(episodes.end(episode.id, Ending(reward=1.0, idempotency_key="k")))
        second = asyncio.create_task(episodes.end(episode.id, Ending(reward=0.0)))
        await asyncio.sleep(0)
        queue.taken.set()
        assert (await first).accepted and await again == await first
        assert not (await second).accepted and (await second).reward == 1.0
    assert [[row.reward for row in rows] for rows in queue.rows] == [[1.0]]


# Images in the gateway's dialects: the same message of each, rows with their media, and refusals in words.


PNG, OTHER = drawing(1), drawing(2)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}}


def chat(content: Any, role: str = "user") -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, {"role": role, "content": content}]}
    return openai.read_request(msgspec.json.encode(body))


def items(*given: dict[str, Any]) -> ChatRequest:
    return responses.read_request(msgspec.json.encode({"input": given}), responses.KeptResponses()).chat


def messages(*given: dict[str, Any], **fields: Any) -> ChatRequest:
    return anthropic.read_request(msgspec.json.encode({"max_tokens": 9, "messages": given, **fields}))


def test_each_dialect_gives_the_same_message() -> None:
    said = ChatMessage("user", f"see {MARK}!", images=(PNG,))
    part = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": url(PNG), "detail": "low"}}]
    assert chat([*part, {"type": "text", "text": "!"}]).messages[-1] == said
    part = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": url(PNG)}]
    content = [*part, {"type": "input_text", "text": "!"}]
    assert items({"role": "user", "content": content}).messages == [said]
    content = [{"type": "text", "text": "see "}, block(PNG), {"type": "text", "text": "!"}]
    assert messages({"role": "user", "content": content}).messages == [said]
    assert said.identity() != msgspec.structs.replace(said, images=(OTHER,)).identity()


def test_tool_results_show_images() -> None:
    said = ChatMessage("tool", MARK, answers="c", images=(PNG,))
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block(PNG)]}
    assert messages({"role": "user", "content": [result]}).messages == [said]
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": url(PNG)}],
    }
    assert items(output).messages == [said]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "not fetched"),
        ([{"type": "image_url", "image_url": {"url": "/etc/hostname"}}], "only data sets"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}], "not base64"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}], "not an image"),
        ([{"type": "image_url"}], "an image is"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
        ([{"type": "image_url", "image_url": {"url": url(PNG)}}, {"type": "text", "text": MARK}], "U\\+FFFC"),
    ],
)
def test_other_images_are_refused_in_words(content: Any, named: str) -> None:
    with pytest.raises(RequestRefused, match=named) as caught:
        chat(content)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("messages[1].content")


def test_the_assistant_shows_no_images() -> None:
    with pytest.raises(RequestRefused, match="image"):
        chat([{"type": "image_url", "image_url": {"url": url(PNG)}}], role="assistant")
    with pytest.raises(RequestRefused, match="image"):
        messages({"role": "assistant", "content": [block(PNG)]})
    with pytest.raises(RequestRefused, match="image"):
        messages({"role": "user", "content": "x"}, system=[block(PNG)])


def request(*said: ChatMessage) -> ChatRequest:
    return chat("x")._replace(messages=list(said))


async def test_a_conversation_with_images_becomes_one_row(tmp_path: Path) -> None:
    renderer = vision_chat("qwen2_5_vl", tmp_path)
    engine = ScriptedEngine(renderer, ["first", "second"])
    episode = GatewayEpisode(leased(), 0, config=run_config(), chat=renderer, generator=engine, max_answers=9)
    asked = ChatMessage("user", f"{MARK}?", images=(PNG,))
    done = await episode.complete(request(asked))
    more = ChatMessage("user", f"and {MARK}?", images=(OTHER,))
    await episode.complete(request(asked, done.message, more))
    ((row,), _) = episode.trajectories(None)
    assert [episode.images[medium.sha256] for medium in row.media] == [PNG, OTHER]
    for medium in row.media:
        tokens = renderer.pictures.encode(episode.images[medium.sha256]).tokens
        assert row.token_ids[medium.position : medium.position + len(tokens)].tolist() == tokens
    assert [[image.data for image in request.images] for request in engine.requests] == [[PNG], [PNG, OTHER]]
    for sent in engine.requests:
        assert sent.token_ids == row.token_ids[: len(sent.token_ids)].tolist()


@pytest.mark.parametrize(
    ("images", "named"), [((PNG[:40],), "damaged"), ((PNG,) * (MOST_IMAGES + 1), "more than 64 images")]
)
async def test_images_that_cannot_be_shown_are_refused(tmp_path: Path, images: Any, named: str) -> None:
    renderer = vision_chat("qwen2_5_vl", tmp_path)
    episode = GatewayEpisode(
        leased(), 0, config=run_config(), chat=renderer, generator=ScriptedEngine(renderer, []), max_answers=9
    )
    with pytest.raises(RequestRefused, match=named) as caught:
        await episode.complete(request(ChatMessage("user", MARK * len(images), images=images)))
    assert caught.value.status == 400
