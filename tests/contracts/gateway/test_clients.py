"""The requests of agent programs as they are shipped, in the shape in which they were recorded or seen.

`recorded_clients.json` has what each program sent, with all texts and schemas replaced, what the policy said, how many
rows that makes, and which fields were ignored: those of JSON formats only where engines cannot follow them.
"""

import json
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.derived import follows_json_schemas
from rl_async.gateway import Gateway
from tests.contracts.gateway.peers import RunningGateway
from tests.unit.agent_loop.fakes import leased, run_config

RECORDED = json.loads((Path(__file__).parent / "recorded_clients.json").read_text())


def post(url: str, body: dict[str, Any], agent: str) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": agent}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("recorded", RECORDED, ids=[client["client"] for client in RECORDED])
def test_what_a_client_sends_is_accepted_and_recorded(renderer: ChatRenderer, recorded: dict[str, Any]) -> None:
    config = run_config({"max_tokens": 100, "max_model_len": 4000}, max_tokens=3000)
    gateway = RunningGateway(config, leased(), renderer, recorded["says"])
    try:
        play(gateway, recorded)
    finally:
        gateway.stop()
    (rows,) = gateway.queue.rows
    trained = [renderer.decode(row.token_ids[row.loss_mask].tolist()) for row in rows]
    assert "".join(trained) == "".join(f"{said}<|im_end|>" for said in recorded["says"])
    assert len(rows) == recorded["rows"]
    formats = [] if follows_json_schemas(config) else recorded.get("formats", [])
    assert gateway.dropped().keys() == {(recorded["user_agent"], field) for field in recorded["ignored"] + formats}


def play(gateway: RunningGateway, recorded: dict[str, Any]) -> None:
    """Send the requests in one episode, and check that the answers are whole."""
    episode = next(Gateway(gateway.url).episodes())
    for body in recorded["requests"]:
        text = post(f"{gateway.url}/episodes/{episode.id}/v1/{recorded['path']}", body, recorded["user_agent"])
        end = "message_stop" if recorded["path"] == "messages" else "[DONE]"
        assert end in text if body.get("stream") else msgspec.json.decode(text)
    assert episode.reward(1.0)["accepted"]


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
