"""A response as typed events, in the order in which OpenAI's server sends them. Pure."""

from collections.abc import Iterator
from typing import Any

from rl_async.agent_loop.gateway.chat import Completion
from rl_async.agent_loop.gateway.responses.answers import ResponseHead, status
from rl_async.errors import RequestRefused

Event = dict[str, Any]


class ResponseStream:
    """The events of one response: ``begin``, ``more`` for every piece of text, then ``end`` or ``fail``."""

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
        if self._open is None and not (done.message.calls or done.message.text):
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
