"""JSON formats, as each dialect's requests name them."""

import json
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.gateway import anthropic, openai
from rl_async.agent_loop.gateway import responses as responses_requests
from rl_async.agent_loop.gateway.chat import ChatRequest
from rl_async.errors import RequestRefused

HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> ChatRequest:
    return openai.read_request(msgspec.json.encode({"messages": [HELLO], **fields}))


def responses(**fields: Any) -> ChatRequest:
    kept = responses_requests.KeptResponses()
    return responses_requests.read_request(msgspec.json.encode({"input": "hello", **fields}), kept).chat


def messages(**fields: Any) -> ChatRequest:
    return anthropic.read_request(msgspec.json.encode({"messages": [HELLO], "max_tokens": 9, **fields}))


FORMATS = [
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}),
        "response_format",
        "response_format.json_schema.schema",
    ),
    (
        responses(text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}),
        "text.format",
        "text.format.schema",
    ),
    (
        messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": None}),
        "output_config.format",
        "output_config.format.schema",
    ),
    (messages(output_format={"type": "json_schema", "schema": SCHEMA}), "output_format", "output_format.schema"),
]


@pytest.mark.parametrize(("request_", "field", "place"), FORMATS, ids=[field for _, field, _ in FORMATS])
def test_a_schema_is_read(request_: ChatRequest, field: str, place: str) -> None:
    assert request_.format is not None and request_.unobeyed == {}
    assert json.loads(request_.format.schema) == SCHEMA
    assert (request_.format.field, request_.format.place) == (field, place)
    assert request_.format.given["type"] == "json_schema"
    assert request_.format.refused("x").param == place


def test_any_object_is_a_schema_too() -> None:
    for request in (chat(response_format={"type": "json_object"}), responses(text={"format": {"type": "json_object"}})):
        assert request.format is not None and json.loads(request.format.schema) == {"type": "object"}
        assert request.unobeyed == {}


def test_a_format_without_a_schema_is_that_of_any_object() -> None:
    for request, field in [
        (chat(response_format={"type": "json_schema"}), "response_format"),
        (chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}), "response_format"),
        (responses(text={"format": {"type": "json_schema", "name": "x"}}), "text.format"),
        (messages(output_config={"format": {"type": "json_schema"}}), "output_config.format"),
    ]:
        assert request.format is not None and json.loads(request.format.schema) == {"type": "object"}
        assert request.format.field == field and request.unobeyed == {}


def test_formats_of_strings_that_only_annotate_are_left_out() -> None:
    secret = {"type": "object", "properties": {"a": {"type": "string", "format": "password", "writeOnly": True}}}
    request = messages(output_format={"type": "json_schema", "schema": secret})
    assert request.format is not None
    assert json.loads(request.format.schema)["properties"] == {"a": {"type": "string", "writeOnly": True}}


def test_other_members_stay_as_what_they_are() -> None:
    request = messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"})
    assert request.format is not None and request.unobeyed == {"output_config": {"effort": "low"}}
    assert messages(output_config={"effort": "low"}).unobeyed == {"output_config": {"effort": "low"}}


def test_text_and_unknown_formats_are_none() -> None:
    assert chat().format is None and chat(response_format={"type": "text"}).unobeyed == {}
    unknown = {"type": "grammar", "grammar": "x"}
    assert chat(response_format=unknown).format is None
    assert chat(response_format=unknown).unobeyed == {"response_format": unknown}
    assert responses(text={"format": unknown}).unobeyed == {"text.format": unknown}


def test_a_format_whose_schema_is_no_object_is_refused_by_its_place() -> None:
    broken = [
        (chat, {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}),
        (responses, {"text": {"format": {"type": "json_schema", "schema": "{}"}}}),
        (messages, {"output_config": {"format": {"type": "json_schema", "schema": None}}}),
        (messages, {"output_format": {"type": "json_schema", "schema": []}}),
    ]
    for read, fields in broken:
        with pytest.raises(RequestRefused) as refused:
            read(**fields)
        (field,) = fields
        assert refused.value.code == "invalid_request" and refused.value.param.startswith(field)
        assert refused.value.param.endswith("schema") and refused.value.status == 400
