"""The dialects of agent programs: requests become chat messages, answers become bodies and events."""

import json
import logging
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.gateway import anthropic, openai
from rl_async.agent_loop.gateway import chat as chat_dialect
from rl_async.agent_loop.gateway import responses as responses_requests
from rl_async.agent_loop.gateway.anthropic import MessageStream
from rl_async.agent_loop.gateway.chat import (
    MOST_VALUES,
    ChatMessage,
    ChatRequest,
    Completion,
    FunctionCall,
    UnobeyedFields,
)
from rl_async.agent_loop.gateway.openai import ChatStream
from rl_async.errors import RequestRefused

HELLO = {"role": "user", "content": "hello"}
CALLING = Completion(
    3, ChatMessage("assistant", "so", (FunctionCall("f", '{"a": 1}'), FunctionCall("g", "{}"))), "stop", 5, 7
)
SPEAKING = Completion(0, ChatMessage("assistant", "hi"), "length", 5, 7)


def chat(**fields: Any) -> Any:
    return openai.read_request(msgspec.json.encode({"messages": [HELLO], **fields}))._replace(size=0)


def chunks(done: Completion, *, usage: bool = False) -> list[dict[str, Any]]:
    return streamed(ChatStream(done.number, "ep", "m", usage=usage), done)


def events_of(done: Completion) -> list[dict[str, Any]]:
    return streamed(MessageStream(done.number, "ep", "m", done.prompt_tokens), done)


def streamed(stream: Any, done: Completion) -> list[dict[str, Any]]:
    """The events of an answer of which nothing was sent before its end."""
    return [*stream.begin(), *stream.end(done, done.message.reasoning, done.message.text)]


def messages(**fields: Any) -> Any:
    return anthropic.read_request(msgspec.json.encode({"messages": [HELLO], "max_tokens": 9, **fields}))._replace(
        size=0
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"5": 1}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"response_format": {"type": "grammar"}},
        {"parallel_tool_calls": False},
        {"tool_choice": "required"},
        {"top_k": 5},
        {"guided_regex": ".*"},
        {"reasoning_effort": "low"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_the_run_does_not_obey_is_named(fields: dict[str, Any]) -> None:
    assert chat(**fields).unobeyed == fields and chat(**fields)._replace(unobeyed={}) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"best_of": 2},
        {"logprobs": True},
        {"top_logprobs": 3},
        {"modalities": ["audio"]},
        {"functions": [{"name": "f"}]},
        {"web_search_options": {}},
        {"continue_final_message": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_would_change_the_meaning_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match=next(iter(fields))) as refused:
        chat(**fields)
    body = openai.error_body(refused.value)["error"]
    assert (body["param"], body["code"], refused.value.status) == (next(iter(fields)), "unsupported_value", 400)


def test_what_changes_nothing_is_accepted() -> None:
    neutral = {"n": 1, "logit_bias": {}, "presence_penalty": 0.0, "response_format": {"type": "text"}, "seed": 5}
    neutral |= {
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1.0,
        "best_of": 1,
        "functions": [],
        "metadata": {"a": "b"},
        "verbosity": "medium",
        "chat_template_kwargs": {"enable_thinking": None},
    }
    neutral |= {"function_call": "none", "skip_special_tokens": True, "stop_token_ids": [], "parallel_tool_calls": True}
    request = chat(**neutral, tool_choice="auto", logprobs=None, user="me", stream_options={"include_usage": True})
    assert request == chat(stream_options={"include_usage": True})
    assert request.usage and not request.stream and request.temperature is None


@pytest.mark.parametrize("kind", ["web_search", "custom", "code_interpreter"])
def test_a_tool_that_is_no_function_of_the_program_is_refused_by_its_type(kind: str) -> None:
    with pytest.raises(RequestRefused, match=kind) as refused:
        chat(tools=[{"type": kind, kind: {"name": "x"}}])
    assert (refused.value.code, refused.value.param) == ("unsupported_value", "tools")
    for broken in ({}, {"type": "function"}, {"function": {"name": 5}}, {"function": {"name": ""}}):
        with pytest.raises(RequestRefused) as refused:
            chat(tools=[broken])
        assert (refused.value.code, refused.value.param) == ("invalid_request", "tools")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        ({"audio": {"id": "a"}}, "messages[1].audio"),
    ],
    ids=["function_call", "audio"],
)
def test_what_an_assistant_said_elsewhere_is_refused_by_name(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        chat(messages=[HELLO, {"role": "assistant", "content": None, **message}, HELLO])
    assert (refused.value.code, refused.value.param) == ("unsupported_value", param)
    name = param.partition(".")[2]
    said = chat(messages=[HELLO, {"role": "assistant", "content": "a", name: None}, HELLO]).messages[1]
    assert said == ChatMessage("assistant", "a")


def test_a_refusal_in_the_history_is_what_the_assistant_said() -> None:
    said = {"role": "assistant", "content": None, "refusal": "I will not"}
    assert chat(messages=[HELLO, said, HELLO]).messages[1] == ChatMessage("assistant", "I will not")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": 5}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "name": "f", "content": "7"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", 7]}, "stop[1]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [HELLO, {"role": "user", "content": []}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a" * 1001]}, "stop"),
        ({f"x{number}": 1 for number in range(300)}, None),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_field_that_is_not_understood_is_named(fields: dict[str, Any], param: str | None) -> None:
    for read, rename in ((openai.read_request, "stop"), (anthropic.read_request, "stop_sequences")):
        given = {name.replace("stop", rename): value for name, value in fields.items()}
        body = {"messages": [HELLO], "max_tokens": 9, **given}
        with pytest.raises(RequestRefused) as refused:
            read(msgspec.json.encode(body))
        assert (refused.value.code, refused.value.param) == ("invalid_request", param and param.replace("stop", rename))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"role": "tool", "tool_call_id": "c", "content": None}, "messages[0].content"),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "input": {}}]},
            "messages[0].content[0].name",
        ),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, "messages[0].content[0].input"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_call_or_result_without_its_parts_is_refused(message: dict[str, Any], param: str) -> None:
    read = messages if "tool_use" in str(message) else chat
    with pytest.raises(RequestRefused) as refused:
        read(messages=[message, HELLO])
    assert (refused.value.code, refused.value.param) == ("invalid_request", param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"messages": 5}',
        b'{"messages": [{"role": "robot", "content": ""}]}',
        b'{"messages": [], "model": "\xff"}',
        b'{"messages": ' + b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:60]),
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    for read in (openai.read_request, anthropic.read_request, anthropic.read_count):
        with pytest.raises(RequestRefused) as refused:
            read(body)
        assert (refused.value.status, refused.value.code) == (400, "invalid_request")


def test_limits_and_stops() -> None:
    assert chat(max_tokens=9, max_completion_tokens=5).max_tokens == 5
    assert (chat(stop="a").stops, chat(stop=["a", "", "b"]).stops, chat().stops) == (["a"], ["a", "b"], [])
    with pytest.raises(RequestRefused):
        chat(max_tokens=0)


def test_messages_become_one_form() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "call_0", "content": "1"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert request.messages == [
        ChatMessage("system", "be\nbrief"),
        ChatMessage("assistant", "", (FunctionCall("f", '{"a": 1}', "call_0"),)),
        ChatMessage("tool", "1", answers="call_0"),
    ]
    assert len(request.tools) == 1
    with pytest.raises(RequestRefused, match="input_audio"):
        chat(messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])


@pytest.mark.parametrize("arguments", ["{", "[1]", "7", "null", '"x"', "{} {}", '{"a":' * 5000 + "1" + "}" * 5000])
def test_arguments_that_are_no_json_object_are_refused(arguments: str) -> None:
    calls = [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(RequestRefused) as refused:
        chat(messages=[HELLO, {"role": "assistant", "content": "", "tool_calls": calls}, HELLO])
    place = "messages[1].tool_calls[0].function.arguments"
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_request", place)


def test_without_tools_nothing_of_them_is_in_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools, tool_choice="none").tools == [] and chat(tools=tools).tools == tools


def test_a_completion_has_calls_text_and_usage() -> None:
    body = openai.completion(CALLING, "ep", "m")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "so"
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["call_3_0", "call_3_1"]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    spoken = openai.completion(SPEAKING, "ep", "m")["choices"][0]
    assert (spoken["finish_reason"], spoken["message"]["content"]) == ("length", "hi")
    assert "tool_calls" not in spoken["message"]


def test_a_call_keeps_the_id_that_the_model_gave_it() -> None:
    done = CALLING._replace(message=ChatMessage("assistant", "", (FunctionCall("f", "{}", "functions.f:0"),)))
    (call,) = openai.completion(done, "ep", "m")["choices"][0]["message"]["tool_calls"]
    (block,) = anthropic.message(done, "ep", "m")["content"]
    assert call["id"] == block["id"] == "functions.f:0"


def test_an_answer_comes_back_as_the_message_that_was_recorded() -> None:
    for done in (CALLING, SPEAKING):
        echoed = openai.completion(done, "ep", "m")["choices"][0]["message"]
        assert chat(messages=[HELLO, echoed]).messages[1].identity() == done.message.identity()
        blocks = anthropic.message(done, "ep", "m")["content"]
        echoed = {"role": "assistant", "content": blocks}
        assert messages(messages=[HELLO, echoed]).messages[1].identity() == done.message.identity()


def test_reasoning_is_apart_from_the_text_and_need_not_be_sent_back() -> None:
    said = ChatMessage("assistant", "hi", reasoning="so")
    done = SPEAKING._replace(message=said)
    message = openai.completion(done, "ep", "m")["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("hi", "so")
    deltas = [part["choices"][0]["delta"] for part in chunks(done)]
    assert {"reasoning_content": "so"} in deltas and {"content": "hi"} in deltas
    assert "reasoning_content" not in openai.completion(SPEAKING, "ep", "m")["choices"][0]["message"]
    assert said.identity() == ChatMessage("assistant", "hi").identity()


def test_chunks_add_up_to_the_completion() -> None:
    *parts, last, usage = chunks(CALLING, usage=True)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content", "") for delta in deltas) == "so"
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", [])] == ["f", "g"]
    assert last["choices"][0]["finish_reason"] == "tool_calls" and usage["usage"]["total_tokens"] == 12
    assert len(chunks(CALLING)) == len(parts) + 1


def test_anthropic_messages_become_the_same_form() -> None:
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "1"}]}
    request = messages(
        system=[{"type": "text", "text": "be brief"}],
        messages=[
            HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        stop_sequences=["x"],
    )
    assert request.messages == [
        ChatMessage("system", "be brief"),
        ChatMessage("user", "hello"),
        ChatMessage("assistant", "", (FunctionCall("f", '{"a":1}', "x"),)),
        ChatMessage("tool", "1", answers="x"),
        ChatMessage("user", "go on"),
    ]
    assert request.tools[0]["function"] == {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert (request.max_tokens, request.stops) == (9, ["x"])


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"output_config": {"effort": "medium"}},
        {"frobnicate": "x"},
    ],
    ids=str,
)
def test_anthropic_fields_that_the_run_does_not_obey_are_named(fields: dict[str, Any]) -> None:
    assert messages(**fields).unobeyed == fields and messages(**fields)._replace(unobeyed={}) == messages()


def test_anthropic_fields_that_change_nothing_are_accepted() -> None:
    neutral = {
        "mcp_servers": [],
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "x"},
        "container": None,
    }
    assert messages(**neutral, tool_choice={"type": "auto", "disable_parallel_tool_use": False}) == messages()
    tools = [
        {"name": "f", "input_schema": {}, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}
    ]
    assert messages(tools=tools) == messages(tools=[{"name": "f", "input_schema": {}}])
    assert messages(tools=tools, tool_choice={"type": "none", "disable_parallel_tool_use": True}).tools == []


@pytest.mark.parametrize("kind", ["web_search_20250305", "bash_20250124", "computer_20250124"])
def test_anthropic_tools_of_the_vendor_are_refused_by_their_type(kind: str) -> None:
    with pytest.raises(RequestRefused, match=kind) as refused:
        messages(tools=[{"type": kind, "name": "x"}])
    assert (refused.value.code, refused.value.param) == ("unsupported_value", "tools")
    with pytest.raises(RequestRefused, match="mcp_servers"):
        messages(mcp_servers=[{"type": "url", "url": "x", "name": "y"}])
    with pytest.raises(RequestRefused, match="input_schema"):
        messages(tools=[{"name": "f"}])


def test_a_conversation_that_the_server_is_to_keep_is_refused_as_the_client_expects() -> None:
    with pytest.raises(RequestRefused) as refused:
        messages(thread={"type": "create"})
    body = anthropic.error_body(refused.value)
    assert body["error"]["details"]["error_code"] == "thread_unsupported_request" and refused.value.status == 400


def test_thinking_is_shown_if_it_was_asked_for_and_may_come_back() -> None:
    assert [messages(thinking=t).reasoning for t in (None, {"type": "disabled"}, {"type": "adaptive"})] == [
        False,
        False,
        True,
    ]
    done = SPEAKING._replace(message=ChatMessage("assistant", "hi", reasoning="so"))
    thought, said = anthropic.message(done, "ep", "m")["content"]
    assert (thought["type"], thought["thinking"], bool(thought["signature"])) == ("thinking", "so", True)
    events = events_of(done)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["thinking_delta", "signature_delta", "text_delta"]
    assert deltas[1]["signature"] == thought["signature"]
    hidden = {"type": "redacted_thinking", "data": "x"}
    history = [HELLO, {"role": "assistant", "content": [thought, hidden, said]}, HELLO]
    assert messages(messages=history, thinking={"type": "enabled"}).messages[1].identity() == done.message.identity()


def test_anthropic_system_messages_may_come_later_and_what_differs_in_each_request_is_left_out() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=abc;"}
    told = {"role": "system", "content": [{"type": "text", "text": "now", "cache_control": {"type": "ephemeral"}}]}
    request = messages(
        system=[billing, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}], messages=[HELLO, told]
    )
    assert request.messages == [
        ChatMessage("system", "a\nb"),
        ChatMessage("user", "hello"),
        ChatMessage("system", "now"),
    ]
    assert messages(system=[billing]) == messages()


def test_a_document_is_refused_in_words_and_an_error_is_a_result() -> None:
    def result(content: Any, **more: Any) -> Any:
        block = {"type": "tool_result", "tool_use_id": "x", "content": content, **more}
        return messages(messages=[HELLO, {"role": "user", "content": [block]}])

    with pytest.raises(RequestRefused, match="document") as refused:
        result([{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}])
    assert (refused.value.status, refused.value.code) == (400, "unsupported_value")
    assert result("no such file", is_error=True).messages[1] == ChatMessage("tool", "no such file", answers="x")


def test_a_stop_sequence_is_reported() -> None:
    done = SPEAKING._replace(finish_reason="stop", stop="END")
    answer = anthropic.message(done, "ep", "m")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert events_of(done)[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "END",
    }
    assert anthropic.message(CALLING._replace(stop="END"), "ep", "m")["stop_reason"] == "tool_use"
    assert anthropic.message(SPEAKING, "ep", "m")["stop_sequence"] is None


def test_anthropic_events_add_up_to_the_message() -> None:
    events = events_of(CALLING)
    assert [event["type"] for event in events[:2]] == ["message_start", "content_block_start"]
    inputs = [json.loads(e["delta"]["partial_json"]) for e in events if e.get("delta", {}).get("partial_json")]
    assert inputs == [{"a": 1}, {}]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-1] == {"type": "message_stop"}
    assert anthropic.message(SPEAKING, "ep", "m")["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("openai_choice", "anthropic_choice", "forces"),
    [
        ("required", {"type": "any"}, ""),
        ({"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f"}, "f"),
        ("auto", {"type": "auto"}, None),
        ("none", {"type": "none"}, None),
        (None, None, None),
    ],
)
def test_a_call_of_an_offered_function_may_be_forced(openai_choice: Any, anthropic_choice: Any, forces: Any) -> None:
    one = chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice=openai_choice)
    two = messages(tools=[{"name": "f", "input_schema": {}}], tool_choice=anthropic_choice)
    assert (one.forces, one.unobeyed) == (two.forces, two.unobeyed) == (forces, {})


def test_what_of_a_choice_cannot_be_obeyed_is_named() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}, 7):
        assert chat(tools=tools, tool_choice=choice).unobeyed == {"tool_choice": choice}
    single = {"type": "any", "disable_parallel_tool_use": True}
    request = messages(tools=[{"name": "f", "input_schema": {}}], tool_choice=single)
    assert (request.forces, request.unobeyed) == ("", {"tool_choice": {"disable_parallel_tool_use": True}})


@pytest.mark.parametrize("name", ["", "g"])
@pytest.mark.parametrize("offered", [[], ["f"]])
def test_forcing_a_function_that_is_not_offered_is_refused(name: str, offered: list[str]) -> None:
    with pytest.raises(RequestRefused) as one:
        tools = [{"type": "function", "function": {"name": name}} for name in offered]
        chat(tools=tools, tool_choice={"type": "function", "function": {"name": name}})
    with pytest.raises(RequestRefused) as two:
        tools = [{"name": name, "input_schema": {}} for name in offered]
        messages(tools=tools, tool_choice={"type": "tool", "name": name})
    assert one.value.status == two.value.status == 400
    assert openai.error_body(one.value)["error"]["param"] == "tool_choice"
    assert anthropic.error_body(two.value)["error"]["type"] == "invalid_request_error"
    assert (two.value.code, two.value.param) == ("invalid_request", "tool_choice")


GREETING = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def formatted_chat(**fields: Any) -> ChatRequest:
    return openai.read_request(msgspec.json.encode({"messages": [GREETING], **fields}))


def responses(**fields: Any) -> ChatRequest:
    kept = responses_requests.KeptResponses()
    return responses_requests.read_request(msgspec.json.encode({"input": "hello", **fields}), kept).chat


def formatted_messages(**fields: Any) -> ChatRequest:
    return anthropic.read_request(msgspec.json.encode({"messages": [GREETING], "max_tokens": 9, **fields}))


FORMATS = [
    (
        formatted_chat(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
        ),
        "response_format",
        "response_format.json_schema.schema",
    ),
    (
        responses(text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}),
        "text.format",
        "text.format.schema",
    ),
    (
        formatted_messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": None}),
        "output_config.format",
        "output_config.format.schema",
    ),
    (
        formatted_messages(output_format={"type": "json_schema", "schema": SCHEMA}),
        "output_format",
        "output_format.schema",
    ),
]


@pytest.mark.parametrize(("request_", "field", "place"), FORMATS, ids=[field for _, field, _ in FORMATS])
def test_a_schema_is_read(request_: ChatRequest, field: str, place: str) -> None:
    assert request_.format is not None and request_.unobeyed == {}
    assert json.loads(request_.format.schema) == SCHEMA
    assert (request_.format.field, request_.format.place) == (field, place)
    assert request_.format.given["type"] == "json_schema"
    assert request_.format.refused("x").param == place


def test_any_object_is_a_schema_too() -> None:
    for request in (
        formatted_chat(response_format={"type": "json_object"}),
        responses(text={"format": {"type": "json_object"}}),
    ):
        assert request.format is not None and json.loads(request.format.schema) == {"type": "object"}
        assert request.unobeyed == {}


def test_a_format_without_a_schema_is_that_of_any_object() -> None:
    for request, field in [
        (formatted_chat(response_format={"type": "json_schema"}), "response_format"),
        (formatted_chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "response_format"),
        (responses(text={"format": {"type": "json_schema", "name": "x"}}), "text.format"),
        (formatted_messages(output_config={"format": {"type": "json_schema"}}), "output_config.format"),
    ]:
        assert request.format is not None and json.loads(request.format.schema) == {"type": "object"}
        assert request.format.field == field and request.unobeyed == {}


def test_formats_of_strings_that_only_annotate_are_left_out() -> None:
    secret = {"type": "object", "properties": {"a": {"type": "string", "format": "password", "writeOnly": True}}}
    request = formatted_messages(output_format={"type": "json_schema", "schema": secret})
    assert request.format is not None
    assert json.loads(request.format.schema)["properties"] == {"a": {"type": "string", "writeOnly": True}}


def test_other_members_stay_as_what_they_are() -> None:
    request = formatted_messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"})
    assert request.format is not None and request.unobeyed == {"output_config": {"effort": "low"}}
    assert formatted_messages(output_config={"effort": "low"}).unobeyed == {"output_config": {"effort": "low"}}


def test_text_and_unknown_formats_are_none() -> None:
    assert formatted_chat().format is None and formatted_chat(response_format={"type": "text"}).unobeyed == {}
    unknown = {"type": "grammar", "grammar": "x"}
    assert formatted_chat(response_format=unknown).format is None
    assert formatted_chat(response_format=unknown).unobeyed == {"response_format": unknown}
    assert responses(text={"format": unknown}).unobeyed == {"text.format": unknown}


def test_a_format_whose_schema_is_no_object_is_refused_by_its_place() -> None:
    broken = [
        (formatted_chat, {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}),
        (responses, {"text": {"format": {"type": "json_schema", "schema": "{}"}}}),
        (formatted_messages, {"output_config": {"format": {"type": "json_schema", "schema": None}}}),
        (formatted_messages, {"output_format": {"type": "json_schema", "schema": []}}),
    ]
    for read, fields in broken:
        with pytest.raises(RequestRefused) as refused:
            read(**fields)
        (field,) = fields
        assert refused.value.code == "invalid_request" and refused.value.param.startswith(field)
        assert refused.value.param.endswith("schema") and refused.value.status == 400


MANY: dict[str, Any] = {"metadata": [[]] * MOST_VALUES}
CALL = {"name": "f", "arguments": json.dumps(MANY)}


def read_response(body: bytes) -> Any:
    return responses_requests.read_request(body, {})


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (openai.read_request, {"messages": [], **MANY}, None),
        (openai.read_prompt, {"prompt": "x", **MANY}, None),
        (anthropic.read_request, {"messages": [], "max_tokens": 1, **MANY}, None),
        (anthropic.read_count, {"messages": [], **MANY}, None),
        (read_response, {"input": "x", **MANY}, None),
        (
            openai.read_request,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": CALL}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (read_response, {"input": [{"type": "function_call", **CALL}]}, "input[0].arguments"),
    ],
    ids=["chat", "completions", "messages", "count", "responses", "arguments", "arguments of responses"],
)
def test_a_body_that_would_be_parsed_for_long_is_refused(read: Any, body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestRefused) as refused:
        read(msgspec.json.encode(body))
    assert (refused.value.status, refused.value.code, refused.value.param) == (413, "body_too_large", param)


def test_commas_and_brackets_of_a_text_are_no_values() -> None:
    assert chat(messages=[{"role": "user", "content": "[{," * MOST_VALUES}]).messages


# What a run does not obey is dropped and counted, or refused.


def test_dropped_fields_are_counted_and_logged_once_for_each_client(caplog: pytest.LogCaptureFixture) -> None:
    unobeyed = UnobeyedFields("ignore")
    with caplog.at_level(logging.INFO, logger="rl_async.gateway"):
        for client in ("a/1", "a/1", "b/2"):
            unobeyed.settle({"temperature": 0.0, "top_k": 5}, client)
        unobeyed.settle({}, "c/3")
    assert unobeyed.dropped == {
        ("a/1", "temperature"): 2,
        ("a/1", "top_k"): 2,
        ("b/2", "temperature"): 1,
        ("b/2", "top_k"): 1,
    }
    assert len(caplog.records) == 4
    assert unobeyed.listing()[0] == {"client": "a/1", "field": "temperature", "requests": 2}


def test_names_that_clients_choose_take_bounded_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_dialect, "COUNTED", 3)
    unobeyed = UnobeyedFields("ignore")
    for number in range(9):
        unobeyed.settle({f"{number}" * 500: 1}, "x" * 500)
    assert len(unobeyed.dropped) == 4 and unobeyed.dropped["others", "others"] == 6
    assert max(len(name) for key in unobeyed.dropped for name in key) == chat_dialect.SHOWN


def test_they_are_refused_by_name_if_the_run_says_so() -> None:
    unobeyed = UnobeyedFields("refuse")
    with pytest.raises(RequestRefused, match="ignore") as refused:
        unobeyed.settle({"top_p": 0.5}, "a/1")
    assert (refused.value.param, refused.value.code, refused.value.status) == ("top_p", "unsupported_value", 400)
    assert not unobeyed.dropped


@pytest.mark.parametrize("table", [chat_dialect.OPENAI, chat_dialect.ANTHROPIC])
def test_a_field_with_a_way_out_has_values_that_are_accepted(table: dict[str, chat_dialect.Field]) -> None:
    assert all(field.neutral is not None or not field.way_out for field in table.values())
