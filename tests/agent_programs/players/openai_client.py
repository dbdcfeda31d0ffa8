"""Plays an episode with the openai client: ``python openai_client.py chat|stream|responses PROMPT``."""

import json
import sys
from typing import Any

import openai

SCHEMA = {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]}
TOOL: Any = {"name": "show", "description": "Show a digit.", "parameters": SCHEMA}
TURNS = 6


def shown(arguments: str) -> str:
    try:
        return str(json.loads(arguments)["digit"])
    except (ValueError, KeyError, TypeError):
        return "error: no digit"


def chat(client: openai.OpenAI, prompt: str, streaming: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    request: Any = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    for _ in range(TURNS):
        if streaming:
            with client.chat.completions.stream(**request) as stream:
                reply = stream.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(**request).choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply.to_dict())
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown(call.function.arguments)})
    return ""


def responses(client: openai.OpenAI, prompt: str) -> str:
    items: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(TURNS):
        reply = client.responses.create(model="policy", input=items, tools=[{"type": "function", **TOOL}])
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        items += reply.output
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": shown(call.arguments)})
    return ""


if __name__ == "__main__":
    kind, prompt = sys.argv[1:]
    client = openai.OpenAI()
    print(responses(client, prompt) if kind == "responses" else chat(client, prompt, kind == "stream"))
