"""Requests of programs that speak the Responses dialect by default, in the shape in which they were seen: openai-agents
0.24.0, the AI SDK's `openai('MODEL')`, and Codex 0.169.0. Each plays a tool loop, which must be one row."""

import json
import urllib.request
from typing import Any

import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.gateway import Gateway
from tests.contracts.gateway.peers import RunningGateway

END = "<|im_end|>"
SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
CALL = '<tool_call>{"name": "%s", "arguments": {"expression": "2+3"}}</tool_call>'

Item = dict[str, Any]


def agents(history: list[Item]) -> Item:
    """What openai-agents sends."""
    tool = {"name": "calculator", "parameters": SCHEMA | {"title": "calculator_args"}, "strict": True}
    return {
        "model": "policy",
        "include": [],
        "input": [{"content": "2+3?", "role": "user"}, *history],
        "instructions": "be brief",
        "tools": [tool | {"type": "function", "description": "evaluate."}],
    }


def ai_sdk(history: list[Item]) -> Item:
    """What the AI SDK sends: of earlier answers neither ids nor status, and arguments without spaces."""
    question = {"role": "user", "content": [{"type": "input_text", "text": "2+3?"}]}
    kept = ("type", "call_id", "name", "arguments", "output")
    sent = [{key: item[key] for key in kept if key in item} for item in history]
    for item in sent:
        if "arguments" in item:
            item["arguments"] = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
    tool = {"type": "function", "name": "calculator", "description": "evaluate.", "parameters": SCHEMA}
    return {"model": "policy", "input": [question, *sent], "tools": [tool], "tool_choice": "auto"}


def codex(history: list[Item]) -> Item:
    """What Codex sends: a stream without a store, functions in a namespace, a search of OpenAI's."""

    def said(role: str, *texts: str) -> Item:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}

    def function(name: str) -> Item:
        return {"type": "function", "name": name, "description": "", "strict": False, "parameters": SCHEMA}

    agents = {"type": "namespace", "name": "agents", "description": "", "tools": [function("calculator")]}
    return {
        "model": "policy",
        "stream": True,
        "input": [
            said("developer", "be brief"),
            said("developer", "skills", "sandbox"),
            said("user", "where it runs"),
            said("user", "2+3?"),
            *history,
        ],
        "tools": [function("exec"), agents, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "client_metadata": {"turn_id": "x"},
    }


def answered(gateway: RunningGateway, body: Item) -> list[Item]:
    """The output items of the answer."""
    path = f"/episodes/{gateway.taken()}/v1/responses"
    if not body.get("stream"):
        status, answer = Gateway(gateway.url).post(path, body)
        assert status == 200, answer
        return list(answer["output"])
    return streamed(gateway, path, body)


def streamed(gateway: RunningGateway, path: str, body: Item) -> list[Item]:
    request = urllib.request.Request(gateway.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: ")]
    assert events[-1]["type"] == "response.completed"
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


@pytest.mark.parametrize(
    ("request_of", "function"), [(agents, "calculator"), (ai_sdk, "calculator"), (codex, "agents__calculator")]
)
def test_a_tool_loop_is_one_row(start: Any, renderer: ChatRenderer, request_of: Any, function: str) -> None:
    gateway = start(CALL % function, "5")
    (call,) = answered(gateway, request_of([]))
    assert call["name"] == "calculator"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    (said,) = answered(gateway, request_of([call, result]))
    assert said["content"][0]["text"] == "5"
    gateway.end()
    (rows,) = gateway.queue.rows
    texts = [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]
    assert texts == [f"{CALL % function}{END}5{END}"]
