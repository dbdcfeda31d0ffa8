"""Answers that clients read while they are sampled; the tests release the tokens."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.errors import EngineLost
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from tests.contracts.gateway.peers import CALL, RunningGateway
from tests.unit.agent_loop.fakes import leased, run_config

DIALECTS = ("chat", "responses", "completions", "messages")
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
END = "<|im_end|>"
WAIT_S = 60


class HeldEngine:
    """Samples what the test says, when the test says it: texts, then `end`, or `lose`."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._said: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.asked, self.cancelled = threading.Semaphore(0), threading.Event()

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        self._loop = asyncio.get_running_loop()
        self.asked.release()
        tokens: list[int] = []
        try:
            while (said := await self._said.get()) is not None:
                if isinstance(said, Exception):
                    raise said
                tokens = tokens + self._renderer.encode(said)
                if heard is not None:
                    heard(tokens)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        tokens = [*tokens, self._renderer.end_of_turn]
        versions = [VersionRun(Version(), 0, len(tokens))]
        return GenerateResult(token_ids=tokens, logprobs=[-0.5] * len(tokens), versions=versions, finish_reason="stop")

    def say(self, text: str) -> None:
        self._put(text)

    def end(self) -> None:
        self._put(None)

    def lose(self) -> None:
        self._put(EngineLost("the last engine is gone"))

    def _put(self, said: str | Exception | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._said.put_nowait, said)


class Client:
    """Reads the events of one streamed request over a bare socket."""

    def __init__(self, gateway: RunningGateway, dialect: str, **more: Any) -> None:
        self.dialect = dialect
        path, body = REQUESTS[dialect]
        self._connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=WAIT_S)
        self._connection.request("POST", f"/episodes/{gateway.taken()}/v1{path}", json.dumps(body | more))
        self._answer = self._connection.getresponse()  # the headers
        assert (self._answer.status, self._answer.getheader("content-type")) == (
            200,
            "text/event-stream; charset=utf-8",
        )
        self.pings = 0

    def event(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        while line := self._answer.readline():
            if line.startswith(b": ping") or line == b'data: {"type": "ping"}\n':
                self.pings += 1
            elif line.startswith(b"data: {"):
                return dict(json.loads(line[len(b"data: ") :]))
        return None

    def text(self) -> str | None:
        """The next text, whatever comes between; None at the end."""
        while (event := self.event()) is not None:
            if text := READ[self.dialect](event):
                return text
        return None

    def rest(self) -> list[dict[str, Any]]:
        return list(iter(self.event, None))

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


ASK = {"messages": [{"role": "user", "content": "a?"}], "model": "m", "stream": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", ASK),
    "responses": ("/responses", {"input": "a?", "model": "m", "stream": True}),
    "completions": ("/completions", {"prompt": "a?", "model": "m", "stream": True, "max_tokens": 100}),
    "messages": ("/messages", ASK | {"max_tokens": 100}),
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}],
    "responses": [{"type": "function", "name": "calculator", "parameters": SCHEMA}],
    "messages": [{"name": "calculator", "input_schema": SCHEMA}],
}


def delta(event: dict[str, Any]) -> dict[str, Any]:
    return dict(event["choices"][0]["delta"]) if event.get("choices") else {}


READ: dict[str, Callable[[dict[str, Any]], str]] = {
    "chat": lambda event: delta(event).get("content") or "",
    "responses": lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    "completions": lambda event: event["choices"][0]["text"],
    "messages": lambda event: event.get("delta", {}).get("text", ""),
}
LAST = {"responses": "response.completed", "messages": "message_stop"}


@pytest.fixture
def held(renderer: ChatRenderer, ending: list[RunningGateway]) -> Iterator[Callable[..., RunningGateway]]:
    started: list[RunningGateway] = []

    def begin(ping_s: float = WAIT_S, chat: ChatRenderer = renderer) -> RunningGateway:
        config = run_config({"max_tokens": 100, "max_model_len": 4000}, max_tokens=3000)
        started.append(RunningGateway(config, leased(), chat, (), engine=HeldEngine(chat), ping_s=ping_s))
        return started[-1]

    yield begin
    for gateway in started:
        gateway.ask_to_end()
        ending.append(gateway)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_comes_as_it_is_sampled(held: Any, renderer: ChatRenderer, dialect: str) -> None:
    gateway = held()
    client = Client(gateway, dialect)  # which has its headers before anything was sampled
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("1+")
    assert client.text() == "1+"
    gateway.engine.say("2")
    assert client.text() == "2"
    gateway.engine.end()
    rest = client.rest()
    assert not any(READ[dialect](event) for event in rest)
    if dialect in LAST:
        assert rest[-1]["type"] == LAST[dialect]
    gateway.end()
    ((row,),) = gateway.queue.rows
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == f"1+2{END}"
    client.close()


@pytest.mark.parametrize("dialect", sorted(TOOLS))
def test_no_text_turns_out_to_be_a_call(held: Any, dialect: str) -> None:
    gateway = held()
    client = Client(gateway, dialect, tools=TOOLS[dialect])
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("see ")
    assert client.text() == "see"
    for piece in (CALL[:15], CALL[15:]):
        gateway.engine.say(piece)
    gateway.engine.end()
    rest = client.rest()
    assert not any(READ[dialect](event) for event in rest)
    assert "expression" in json.dumps(rest)
    client.close()


def test_no_text_turns_out_to_be_a_stop_string(held: Any) -> None:
    gateway = held()
    client = Client(gateway, "chat", stop=["+3"])
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("1+2+")
    assert client.text() == "1+2"
    gateway.engine.say("3+4")
    gateway.engine.end()
    assert client.text() is None
    client.close()


def test_reasoning_comes_as_it_is_sampled(held: Any, thinking: ChatRenderer) -> None:
    gateway = held(chat=thinking)
    client = Client(gateway, "messages", thinking={"type": "enabled", "budget_tokens": 50})
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("<think>so it")
    thought = next(event["delta"] for event in iter(client.event, None) if event["type"] == "content_block_delta")
    assert thought == {"type": "thinking_delta", "thinking": "so it"}
    gateway.engine.say(" is</think>5")
    assert client.text() == "5"
    gateway.engine.end()
    client.rest()
    client.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_pings_come_while_nothing_is_sampled(held: Any, dialect: str) -> None:
    gateway = held(ping_s=0.01)
    client = Client(gateway, dialect)
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    line = b""
    while b"ping" not in line:
        line = client._answer.readline()
        assert line, "the stream ended without a ping"
    gateway.engine.say("5")
    gateway.engine.end()
    assert client.text() == "5"
    client.rest()
    client.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_engine_lost_for_good_ends_the_stream_with_an_error(held: Any, renderer: ChatRenderer, dialect: str) -> None:
    gateway = held()
    client = Client(gateway, dialect)
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("1+")
    assert client.text() == "1+"
    gateway.engine.lose()
    last = client.rest()[-1]
    assert (last["response"] if dialect == "responses" else last)["error"]["message"]
    assert last.get("type") == {"responses": "response.failed", "messages": "error"}.get(dialect)
    client.close()
    again = Client(gateway, dialect)
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("5")
    gateway.engine.end()
    assert again.text() == "5"
    again.rest()
    again.close()
    gateway.end()
    ((row,),) = gateway.queue.rows
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == f"5{END}"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_that_hangs_up_in_the_middle_leaves_no_trace(held: Any, renderer: ChatRenderer, dialect: str) -> None:
    gateway = held()
    client = Client(gateway, dialect)
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("1+")
    assert client.text() == "1+"
    client.close()
    assert gateway.engine.cancelled.wait(WAIT_S)
    again = Client(gateway, dialect)
    assert gateway.engine.asked.acquire(timeout=WAIT_S)
    gateway.engine.say("5")
    gateway.engine.end()
    again.rest()
    again.close()
    gateway.end()
    ((row,),) = gateway.queue.rows
    assert renderer.decode(row.token_ids[row.loss_mask].tolist()) == f"5{END}"


def test_what_cannot_be_served_is_refused_before_the_stream_begins(held: Any) -> None:
    gateway = held()
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=WAIT_S)
    body = json.dumps(ASK | {"messages": [{"role": "user", "content": "1+" * 3000}]})
    connection.request("POST", f"/episodes/{gateway.taken()}/v1/chat/completions", body)
    answer = connection.getresponse()
    assert answer.status == 400 and json.loads(answer.read())["error"]["code"] == "context_length_exceeded"
    connection.close()


def test_the_openai_client_reads_streams(held: Any) -> None:
    openai = pytest.importorskip("openai", reason="install the openai client: pip install openai")
    gateway = held(ping_s=0.01)
    url = f"{gateway.url}/episodes/{gateway.taken()}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        question = [{"role": "user", "content": "a?"}]
        stream = iter(client.chat.completions.create(model="m", messages=question, stream=True))
        assert next(stream).choices[0].delta.role == "assistant"
        assert gateway.engine.asked.acquire(timeout=WAIT_S)
        gateway.engine.say("1+2")
        assert next(stream).choices[0].delta.content == "1+2"
        gateway.engine.lose()
        with pytest.raises(openai.APIError, match="gone"):
            list(stream)
        with client.responses.stream(model="m", input="a?") as events:
            found = []
            for event in events:
                found.append(event.type)
                if event.type == "response.in_progress":
                    assert gateway.engine.asked.acquire(timeout=WAIT_S)
                    gateway.engine.say("1+2")
                if event.type == "response.output_text.delta":
                    gateway.engine.end()
        assert events.get_final_response().output_text == "1+2" and found[-1] == "response.completed"


def test_the_anthropic_client_reads_streams(held: Any) -> None:
    anthropic = pytest.importorskip("anthropic", reason="install the anthropic client: pip install anthropic")
    gateway = held(ping_s=0.01)
    url = f"{gateway.url}/episodes/{gateway.taken()}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "a?"}]}
        with client.messages.stream(**asked) as stream:
            assert gateway.engine.asked.acquire(timeout=WAIT_S)
            gateway.engine.say("1+2")
            assert next(iter(stream.text_stream)) == "1+2"
            gateway.engine.end()
            assert stream.get_final_text() == "1+2"
        with pytest.raises(anthropic.APIStatusError), client.messages.stream(**asked) as stream:
            assert gateway.engine.asked.acquire(timeout=WAIT_S)
            gateway.engine.lose()
            stream.until_done()
        assert client.messages.count_tokens(model="m", messages=asked["messages"]).input_tokens > 0
        assert client.models.retrieve("policy").id == "policy"
