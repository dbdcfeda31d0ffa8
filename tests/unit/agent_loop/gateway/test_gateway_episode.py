"""What one episode answers and records, and what it refuses."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from rl_async import tracing
from rl_async.agent_loop.chat_formats.format import TooLong
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway import openai
from rl_async.agent_loop.gateway.chat import ChatMessage, ChatRequest
from rl_async.agent_loop.gateway.gateway_episode import EpisodeRecorder
from rl_async.agent_loop.gateway.server import Ending
from rl_async.agent_loop.tiny_tokenizer import CHAT_TEMPLATE
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.errors import RequestRefused
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from tests.support.tiny_models import byte_tokenizer
from tests.unit.agent_loop.fakes import ScriptedEngine, leased, run_config
from tests.unit.agent_loop.gateway.fakes import FakeQueue, Gone, ask, begin, gateway


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
