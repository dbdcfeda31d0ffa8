"""Answers in OpenAI's Responses dialect, whole or as typed events in the order in which OpenAI's server sends them.
Pure.
"""

import time
from collections.abc import Iterator
from typing import Any

from rl_async.agent_loop.gateway.dialects.chat import Completion
from rl_async.agent_loop.gateway.dialects.responses_requests import FunctionName, ResponsesRequest, encrypt
from rl_async.agent_loop.gateway.dialects.streams import COMMENT, Event
from rl_async.errors import RequestRefused


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


class ResponseStream:
    """The events of one response: ``begin``, ``more`` for every piece of text, then ``end`` or ``fail``."""

    named, ping, last = True, COMMENT, b""

    def __init__(self, head: ResponseHead) -> None:
        self._head, self._number = head, 0
        self._output: list[dict[str, Any]] = []  # items that are done
        self._open: _OpenText | None = None

    def begin(self) -> Iterator[Event]:
        """Announce the response."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._head.response("in_progress", []))

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Append to the reasoning, then to the text."""
        if reasoning:
            yield from self._append("reasoning", reasoning)
        if text:
            yield from self._append("message", text)

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of reasoning and text, then calls, and the whole response."""
        yield from self.more(reasoning, text)
        if not (done.message.calls or done.message.text):
            yield from self._append("message", "")
        yield from self._close(status(done))
        for place in range(len(done.message.calls)):
            yield from self._call(self._head.call(done, place))
        last = self._head.response(status(done), self._output, done)
        yield self._event(f"response.{last['status']}", response=last)

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the response that failed."""
        code = "server_error" if error.status >= 500 else error.code
        failed = {"code": code, "message": str(error)}
        yield self._event("response.failed", response=self._head.response("failed", self._output, error=failed))

    def _append(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is not None and self._open.kind != kind:
            yield from self._close("completed")
        if self._open is None:
            whole = self._head.reasoning("") if kind == "reasoning" else self._head.message("", "in_progress")
            self._open = _OpenText(kind, whole["content"][0], whole["id"])
            empty = whole | {"content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self._output), item=empty)
            yield self._event("response.content_part.added", **self._place(), part=self._open.part)
        if text:
            self._open.text += text
            yield self._event(f"response.{self._open.name}.delta", **self._place(), **self._logprobs(), delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        """End the reasoning or the message."""
        if (open := self._open) is None:
            return
        reasoning = open.kind == "reasoning"
        whole = self._head.reasoning(open.text) if reasoning else self._head.message(open.text, status)
        yield self._event(f"response.{open.name}.done", **self._place(), **self._logprobs(), text=open.text)
        yield self._event("response.content_part.done", **self._place(), part=whole["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._output), item=whole)
        self._output.append(whole)
        self._open = None

    def _call(self, item: dict[str, Any]) -> Iterator[Event]:
        place = {"output_index": len(self._output), "item_id": item["id"]}
        begun = item | {"arguments": "", "status": "in_progress"}
        said = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.output_item.added", output_index=len(self._output), item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event("response.function_call_arguments.done", **place, **said)
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.item_id, "output_index": len(self._output), "content_index": 0}

    def _logprobs(self) -> dict[str, Any]:
        assert self._open is not None
        return {} if self._open.kind == "reasoning" else {"logprobs": []}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


class _OpenText:
    """The item that text is being appended to."""

    def __init__(self, kind: str, part: dict[str, Any], item_id: str) -> None:
        self.kind, self.part, self.item_id, self.text = kind, part, item_id, ""
        self.name = "reasoning_text" if kind == "reasoning" else "output_text"
