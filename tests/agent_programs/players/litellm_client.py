"""Plays an episode with litellm at temperature 0: ``python litellm_client.py PROMPT``."""

import json
import sys
from typing import Any

import litellm

SCHEMA = {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]}
TOOLS = [{"type": "function", "function": {"name": "show", "description": "Show a digit.", "parameters": SCHEMA}}]
TURNS = 6

messages: list[Any] = [{"role": "user", "content": sys.argv[1]}]
said = ""
for _ in range(TURNS):
    reply = litellm.completion(model="openai/policy", messages=messages, tools=TOOLS, temperature=0).choices[0].message
    said = reply.content or ""
    if not reply.tool_calls:
        break
    messages.append(reply.to_dict())
    for call in reply.tool_calls:
        digit = json.loads(call.function.arguments).get("digit")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(digit)})
print(said)
