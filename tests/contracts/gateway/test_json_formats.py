"""JSON formats, asked for by clients as they are, of an embedded engine that follows them."""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pydantic
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.gateway import Gateway
from rl_async.messages import Version
from rl_async.rollout_server.api import EMPTY, GenerateRequest, GenerateResult, Heard, join
from tests.contracts.engines.engine_peers import Peer, running
from tests.contracts.gateway.peers import RunningGateway, make_model
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import leased, run_config

openai = pytest.importorskip("openai", reason="install the openai client: pip install openai")
pytest.importorskip("llguidance", reason="no masks of tokens here; install them: pip install 'rl-async[json]'")
QUESTION = [{"role": "user", "content": "which colour?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class Colour(pydantic.BaseModel):
    colour: Literal["red", "green"]
    sure: bool


class Engine:
    """The embedded engine in its own process, through its client."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        done, client = EMPTY, self._peer.client()
        try:
            async for part in client.stream(request, session=session):
                done = join(done, part)
                if heard is not None:
                    heard(done.token_ids)
        finally:
            await client.close()
        return done


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(train_tokenizer(demos("calculator", 300), 200))


@pytest.fixture(scope="module")
def peer(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    folder = make_model(tmp_path_factory.mktemp("model"), renderer._tokenizer)
    with running("embedded", folder, tmp_path_factory.mktemp("run")) as started:
        asyncio.run(_publish(started, Version(0, 3)))
        yield started


async def _publish(peer: Peer, version: Version) -> None:
    client = peer.client()
    await client.pause("keep")
    await client.start_update()
    await client.finish_update(version)
    await client.resume()
    await client.close()


@pytest.fixture
def start(renderer: ChatRenderer, peer: Peer) -> Iterator[Callable[..., RunningGateway]]:
    started: list[RunningGateway] = []

    def begin(**options: Any) -> RunningGateway:
        limits = {"max_tokens": 300, "max_model_len": 2000}
        config = run_config(limits, max_tokens=2000, gateway=GatewayConfig(**options))
        started.append(RunningGateway(config, leased(), renderer, (), engine=Engine(peer)))
        return started[-1]

    yield begin
    for gateway in started:
        gateway.stop()


def test_the_openai_clients_parse_what_they_asked_for(start: Any, renderer: ChatRenderer) -> None:
    gateway = start()
    episode, client = gateway.openai()
    chat = client.chat.completions.parse(model="any", messages=QUESTION, response_format=Colour)
    assert isinstance(chat.choices[0].message.parsed, Colour) and chat.choices[0].finish_reason == "stop"
    response = client.responses.parse(model="any", input="which colour?", text_format=Colour)
    assert isinstance(response.output_parsed, Colour)
    with client.chat.completions.stream(model="any", messages=QUESTION, response_format=Colour) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Colour)
    any_object = client.chat.completions.create(
        model="any", messages=QUESTION, response_format={"type": "json_object"}, max_tokens=40
    )
    assert any_object.choices[0].message.content.lstrip().startswith("{")
    assert episode.reward(1.0)["rows"] == 4
    assert gateway.dropped() == {}
    for row in gateway.queue.rows[0]:
        assert row.constrained == [(0, int(row.loss_mask.sum()))] and (row.logprobs <= 0).all()
        said = renderer.turn_text(row.token_ids[row.loss_mask].tolist())
        assert said.startswith("{") and "{" not in said[1:].partition('"')[0]


def test_only_the_answers_that_were_constrained_are_recorded_as_such(start: Any) -> None:
    gateway = start()
    episode, client = gateway.openai()
    said = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=7)
    more = [*QUESTION, {"role": "assistant", "content": said.choices[0].message.content}, *QUESTION]
    bound = client.chat.completions.parse(model="any", messages=more, response_format=Colour)
    more += [{"role": "assistant", "content": bound.choices[0].message.content}, *QUESTION]
    client.chat.completions.create(model="any", messages=more, max_tokens=5)
    assert episode.reward(1.0)["rows"] == 1
    ((row,),) = gateway.queue.rows
    free, sampled = said.usage.completion_tokens, bound.usage.completion_tokens
    assert row.constrained == [(free, free + sampled)]
    assert row.header().sampled > free + sampled


def test_anthropics_formats(start: Any) -> None:
    gateway = start()
    episode = next(Gateway(gateway.url).episodes())
    form = {"type": "json_schema", "schema": Colour.model_json_schema()}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        body = {"model": "any", "max_tokens": 300, "messages": QUESTION, **fields}
        request = urllib.request.Request(f"{episode.anthropic_base_url}/v1/messages", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            (block,) = json.load(answer)["content"]
        Colour.model_validate_json(block["text"])
    assert gateway.dropped() == {} and episode.reward(1.0)["accepted"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_refused_by_its_place(start: Any, stream: bool) -> None:
    _, client = start(unsupported="refuse").openai()
    for schema in ({"type": "wat"}, {"$ref": "#/$defs/nowhere"}, {"type": "array", "uniqueItems": True}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="any", messages=QUESTION, response_format=form, stream=stream)
        assert refused.value.param == "response_format.json_schema.schema"
        with pytest.raises(openai.BadRequestError) as refused:
            form = {"type": "json_schema", "name": "x", "schema": schema}
            client.responses.create(model="any", input="x", text={"format": form}, stream=stream)
        assert refused.value.param == "text.format.schema"
    unspeakable = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["É"]}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=QUESTION, response_format=unspeakable)
    assert refused.value.param == "response_format.json_schema.schema"


def test_a_schema_that_cannot_be_followed_is_ignored_and_counted(start: Any) -> None:
    gateway = start()
    episode, client = gateway.openai()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    client.chat.completions.create(model="any", messages=QUESTION, response_format=form, max_tokens=5)
    ((_, field),) = gateway.dropped()
    assert field == "response_format" and episode.reward(1.0)["accepted"]
    ((row,),) = gateway.queue.rows
    assert row.constrained == []


def test_what_pydantic_annotates_is_no_obstacle(start: Any) -> None:
    class Login(pydantic.BaseModel):
        name: Literal["a", "b"]
        where: Literal["x"] = pydantic.Field(json_schema_extra={"format": "path"})

    gateway = start()
    _, client = gateway.openai()
    said = client.chat.completions.parse(model="any", messages=QUESTION, response_format=Login)
    assert isinstance(said.choices[0].message.parsed, Login) and gateway.dropped() == {}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.parse(model="any", messages=QUESTION * 900, response_format=Login)
    assert refused.value.param == "messages"


def test_beside_tools_a_format_is_ignored_or_refused(start: Any) -> None:
    gateway = start()
    episode, client = gateway.openai()
    form = {"type": "json_object"}
    client.chat.completions.create(model="any", messages=QUESTION, response_format=form, tools=[TOOL], max_tokens=5)
    ((_, field),) = gateway.dropped()
    assert field == "response_format" and episode.reward(1.0)["accepted"]
    ((row,),) = gateway.queue.rows
    assert row.constrained == []
    _, client = start(unsupported="refuse").openai()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="any", messages=QUESTION, response_format=form, tools=[TOOL])
    said = client.chat.completions.parse(model="any", messages=QUESTION, response_format=Colour)
    assert isinstance(said.choices[0].message.parsed, Colour)
