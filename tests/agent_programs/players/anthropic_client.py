"""Plays an episode with Anthropic's client, thinking on: ``python anthropic_client.py PROMPT``."""

import sys
from typing import Any

import anthropic

SCHEMA = {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]}
TURNS = 6

client = anthropic.Anthropic()
messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
said = ""
for _ in range(TURNS):
    reply = client.messages.create(
        model="claude-sonnet-4-5",
        max_tokens=2048,
        thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[{"name": "show", "description": "Show a digit.", "input_schema": SCHEMA}],
        messages=messages,
    )
    said = "".join(block.text for block in reply.content if block.type == "text")
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input.get("digit"))} for call in calls
    ]
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
print(said)
