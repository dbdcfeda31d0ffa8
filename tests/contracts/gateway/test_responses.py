"""OpenAI's Responses dialect, with OpenAI's client and its types as the judge."""

import json
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.gateway import Gateway, RemoteEpisode
from tests.contracts.gateway.peers import CALL, RunningGateway

openai = pytest.importorskip("openai", reason="install the openai client: pip install openai")
pydantic = pytest.importorskip("pydantic", reason="install it: pip install pydantic")

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = {"type": "function", "name": "calculator", "description": "Evaluate.", "parameters": PARAMETERS}
END = "<|im_end|>"


def trained(gateway: RunningGateway, renderer: ChatRenderer) -> list[str]:
    (rows,) = gateway.queue.rows
    return [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]


def ask(gateway: RunningGateway, episode: RemoteEpisode, **body: Any) -> tuple[int, dict[str, Any]]:
    return Gateway(gateway.url).post(f"/episodes/{episode.id}/v1/responses", {"model": "m", **body})


def check(response: Any) -> None:
    """The response is one by the strict reading of the client's types."""
    openai.types.responses.Response.model_validate(response.model_dump(mode="json", warnings=False))


@pytest.mark.parametrize("way", ["items", "previous", "stateless"])
def test_a_tool_loop_is_one_row(start: Any, renderer: ChatRenderer, way: str) -> None:
    gateway = start("let me see " + CALL, "5")
    episode, client = gateway.openai()
    common: dict[str, Any] = {"model": "any", "instructions": "be brief", "tools": [CALCULATOR]}
    if way == "stateless":
        common |= {"store": False, "include": ["reasoning.encrypted_content"]}
    first = client.responses.create(input="2+3?", **common)
    check(first)
    text, call = first.output
    assert (text.content[0].text, call.name, first.status) == ("let me see", "calculator", "completed")
    assert json.loads(call.arguments) == {"expression": "2+3"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    if way == "previous":
        second = client.responses.create(input=[result], previous_response_id=first.id, **common)
    else:
        said = [item.model_dump(mode="json", exclude_none=True) for item in first.output]
        second = client.responses.create(input=[{"role": "user", "content": "2+3?"}, *said, result], **common)
    check(second)
    assert second.output_text == "5"
    assert episode.reward(1.0)["rows"] == 1
    assert trained(gateway, renderer) == [f"let me see {CALL}{END}5{END}"]
    ((row,),) = gateway.queue.rows
    assert second.usage.input_tokens + second.usage.output_tokens == second.usage.total_tokens == len(row.token_ids)


def test_chat_and_responses_print_the_same_tokens(start: Any, renderer: ChatRenderer) -> None:
    gateway = start(CALL, "5")
    episode, client = gateway.openai()
    function = {"name": "calculator", "description": "Evaluate.", "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}]
    tools = [{"type": "function", "function": function}]
    first = client.chat.completions.create(model="any", messages=messages, tools=tools)
    call = first.choices[0].message.tool_calls[0]
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "2+3?"},
        {"type": "function_call", "call_id": "x", "name": "calculator", "arguments": call.function.arguments},
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "5"}]},
    ]
    client.responses.create(model="any", input=items, tools=[CALCULATOR])
    episode.reward(1.0)
    assert trained(gateway, renderer) == [f"{CALL}{END}5{END}"]  # the dialects may even be mixed


@pytest.mark.parametrize("store", [True, False])
def test_items_may_be_named(start: Any, renderer: ChatRenderer, store: bool) -> None:
    gateway = start(CALL, "5")
    episode, client = gateway.openai()
    first = client.responses.create(model="any", input="2+3?", tools=[CALCULATOR], store=store)
    named = [
        {"role": "user", "content": "2+3?"},
        {"type": "item_reference", "id": first.output[0].id},
        {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "5"},
    ]
    if not store:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="any", input=named, tools=[CALCULATOR])
        assert refused.value.param == "input"
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="any", input="x", previous_response_id=first.id)
        assert refused.value.code == "previous_response_not_found"
        return
    client.responses.create(model="any", input=named, tools=[CALCULATOR])
    episode.reward(1.0)
    assert trained(gateway, renderer) == [f"{CALL}{END}5{END}"]


def test_reasoning_goes_out_and_comes_back(start: Any, thinking: ChatRenderer) -> None:
    gateway = start("<think>two and three</think>" + CALL, "<think>so</think>5", "6", chat=thinking)
    episode, client = gateway.openai()
    common: dict[str, Any] = {"model": "any", "tools": [CALCULATOR], "store": False}
    common["include"] = ["reasoning.encrypted_content"]
    history: list[Any] = [{"role": "user", "content": "2+3?"}]
    first = client.responses.create(input=history, **common)
    check(first)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    assert first.output[0].content[0].text == "two and three"
    for item in first.output:
        history.append(item.model_dump(mode="json", exclude_none=True, exclude={"content"}))  # as SDKs do
    history.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "5"})
    second = client.responses.create(input=history, **common)
    history += [item.model_dump(mode="json", exclude_none=True) for item in second.output]
    assert [item.type for item in second.output] == ["reasoning", "message"]
    client.responses.create(input=[*history, {"role": "user", "content": "and one more?"}], **common)
    episode.reward(1.0)
    assert trained(gateway, thinking) == [f"<think>two and three</think>{CALL}{END}<think>so</think>5{END}6{END}"]


def test_an_answer_that_is_cut_is_incomplete(start: Any) -> None:
    _, client = start("1+2+3+4+5+6+7+8+9").openai()
    cut = client.responses.create(model="any", input="x", max_output_tokens=3)
    check(cut)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 3


def test_functions_in_a_namespace(start: Any, renderer: ChatRenderer) -> None:
    said = '<tool_call>{"name": "agents__spawn", "arguments": {}}</tool_call>'
    gateway = start(said, "done")
    episode, client = gateway.openai()
    spawn = {"type": "function", "name": "spawn", "description": "", "strict": False, "parameters": {"type": "object"}}
    tools: list[Any] = [{"type": "web_search", "external_web_access": False}]
    tools += [{"type": "namespace", "name": "agents", "description": "Agents.", "tools": [spawn]}]
    first = client.responses.create(model="any", input="go", tools=tools)
    (call,) = first.output
    assert (call.namespace, call.name) == ("agents", "spawn")
    back = [call.model_dump(mode="json", exclude_none=True)]
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "ok"})
    client.responses.create(model="any", input=[{"role": "user", "content": "go"}, *back], tools=tools)
    episode.reward(1.0)
    assert trained(gateway, renderer) == [f"{said}{END}done{END}"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call_output", "call_id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "arguments": "{}", "call_id": "x"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "[1]", "call_id": "x"}]}, "input[0].arguments"),
        ({"input": "x", "tools": [{"type": "custom", "name": "f"}]}, "tools"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ],
)
def test_what_cannot_be_served_is_refused(start: Any, body: dict[str, Any], param: str) -> None:
    gateway = start("5")
    episode, _ = gateway.openai()
    status, answer = ask(gateway, episode, **body)
    assert (status, answer["error"]["param"]) == (400, param)


def events_of(stream: Any) -> list[dict[str, Any]]:
    """The events, each read strictly by the client's types."""
    reader = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    found = [event.model_dump(mode="json", warnings=False) for event in stream]
    for event in found:
        assert reader.validate_python(event).type == event["type"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
REASONING = [kind.replace("output_text", "reasoning_text") for kind in TEXT]
ARGUMENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
ITEM_DONE = ["output_item.done"]


def test_the_sequence_of_events(start: Any, thinking: ChatRenderer) -> None:
    gateway = start(f"<think>hm</think>see {CALL}", "<think>hm</think>5", chat=thinking)
    _, client = gateway.openai()
    stream = client.responses.create(model="any", input="2+3?", tools=[CALCULATOR], stream=True)
    found = events_of(stream)
    kinds = [event["type"].removeprefix("response.") for event in found]
    together = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]  # the text may come in pieces
    items = [*REASONING, *ITEM_DONE, *TEXT, *ITEM_DONE, *ARGUMENTS, *ITEM_DONE]
    assert together == ["created", "in_progress", *items, "completed"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"] and len(done) == 3
    with client.responses.stream(model="any", input="2+3?", tools=[CALCULATOR]) as helped:
        events = list(helped)
        final = helped.get_final_response()
    assert (final.output_text, events[-1].type) == ("5", "response.completed")


def test_a_cut_answer_ends_its_stream_as_incomplete(start: Any) -> None:
    _, client = start("1+2+3+4+5+6+7+8+9").openai()
    found = events_of(client.responses.create(model="any", input="x", max_output_tokens=3, stream=True))
    assert found[-1]["type"] == "response.incomplete"
    assert [e["item"]["status"] for e in found if e["type"] == "response.output_item.done"] == ["incomplete"]


def test_parse_reads_the_arguments_of_strict_functions(start: Any) -> None:
    class calculator(pydantic.BaseModel):
        """Evaluate."""

        expression: str

    _, client = start(CALL).openai()
    found = client.responses.parse(
        model="any", input="2+3?", tools=[openai.pydantic_function_tool(calculator)["function"] | {"type": "function"}]
    )
    assert found.output[0].parsed_arguments is not None
