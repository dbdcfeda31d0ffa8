"""Answers as response objects: output items, usage, status. Pure."""

import time
from typing import Any

from rl_async.agent_loop.gateway.chat import Completion
from rl_async.agent_loop.gateway.responses.requests import FunctionName, ResponsesRequest, encrypt


class ResponseHead:
    """The ids and the fields that a response has before and after it is answered."""

    def __init__(self, asked: ResponsesRequest, episode: str, number: int, model: str) -> None:
        self._asked, self._key, self._model = asked, f"{episode}_{number}", model
        self._number, self._created = number, int(time.time())
        self.id = f"resp_{self._key}"

    def response(
        self, status: str, output: list[dict[str, Any]], done: Completion | None = None, error: Any = None
    ) -> dict[str, Any]:
        """Return the response object. ``done`` has the usage."""
        body = self._asked.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "metadata": {},
            "usage": None if done is None else usage(done),
            **self._asked.echoed,
        }

    def answer(self, done: Completion) -> dict[str, Any]:
        """Return the response object of an answer."""
        return self.response(status(done), self.output(done), done)

    def output(self, done: Completion) -> list[dict[str, Any]]:
        """Return the items of an answer; one that says nothing is an empty message."""
        said = done.message
        reasoning = [self.reasoning(said.reasoning)] if said.reasoning else []
        text = [self.message(said.text, status(done))] if said.text or not said.calls else []
        return [*reasoning, *text, *(self.call(done, place) for place in range(len(said.calls)))]

    def reasoning(self, text: str) -> dict[str, Any]:
        """Return the item of reasoning."""
        item = {"id": f"rs_{self._key}", "type": "reasoning", "summary": []}
        content = [{"type": "reasoning_text", "text": text}]
        sealed = {"encrypted_content": encrypt(text)} if self._asked.encrypted else {}
        return {**item, "content": content, "status": "completed", **sealed}

    def message(self, text: str, status: str) -> dict[str, Any]:
        """Return the item of what was said."""
        return {
            "id": f"msg_{self._key}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
        }

    def call(self, done: Completion, place: int) -> dict[str, Any]:
        """Return the item of a call."""
        call = done.message.calls[place]
        name = self._asked.names.get(call.name, FunctionName(call.name))
        return {
            "id": f"fc_{self._key}_{place}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id or f"call_{self._number}_{place}",
            "name": name.name,
            "arguments": call.arguments,
            **({"namespace": name.namespace} if name.namespace else {}),
        }


def status(done: Completion) -> str:
    """Return ``incomplete`` for an answer that was cut at a limit; calls that are whole count as completed."""
    return "incomplete" if done.finish_reason == "length" and not done.message.calls else "completed"


def usage(done: Completion) -> dict[str, Any]:
    """Return the numbers of tokens."""
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": done.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.sampled_tokens,
    }
