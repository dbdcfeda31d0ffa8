"""Chat completions and messages as streams of events. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from rl_async.agent_loop.gateway import anthropic, openai
from rl_async.agent_loop.gateway.chat import Completion
from rl_async.errors import RequestRefused

Event = dict[str, Any]
COMMENT = b": ping\n\n"


class ChatStream:
    """The chunks of a chat completion. ``usage``: whether the last one has it."""

    named, ping, last = False, COMMENT, b"data: [DONE]\n\n"

    def __init__(self, number: int, episode: str, model: str, *, usage: bool) -> None:
        self._head = openai.head(number, episode, model, "chat.completion.chunk")
        self._usage = usage

    def begin(self) -> Iterator[Event]:
        """Say who speaks."""
        yield self._chunk({"role": "assistant", "content": ""})

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Append to the reasoning, then to the text."""
        if reasoning:
            yield self._chunk({"reasoning_content": reasoning})
        if text:
            yield self._chunk({"content": text})

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of reasoning and text, then calls and why the answer ended."""
        yield from self.more(reasoning, text)
        for place, call in enumerate(openai.calls(done)):
            yield self._chunk({"tool_calls": [{"index": place, **call}]})
        yield self._chunk({}, openai.finish_reason(done))
        if self._usage:
            yield self._head | {"choices": [], "usage": openai.usage(done)}

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the error."""
        yield openai.error_body(error)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._head | {"choices": [choice]}


class MessageStream:
    """The events of a message in Anthropic's dialect."""

    named, ping, last = True, b'event: ping\ndata: {"type": "ping"}\n\n', b""

    def __init__(self, number: int, episode: str, model: str, prompt_tokens: int) -> None:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        self._head = anthropic.head(number, episode, model) | {"content": [], "usage": usage}
        self._index, self._open = 0, ""  # the type of the open block

    def begin(self) -> Iterator[Event]:
        """Send the message without content."""
        yield {"type": "message_start", "message": self._head}

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Append to the block of reasoning, then to that of text."""
        if reasoning:
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": reasoning})
        if text:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of reasoning and text, then calls and why the answer ended."""
        yield from self.more(reasoning, text)
        for place, block in enumerate(anthropic.blocks(done)):
            if block["type"] == "tool_use":  # its id may be the policy's own word, and be said twice
                yield from self._switch(f"call {place}", block | {"input": {}})
                arguments = msgspec.json.encode(block["input"]).decode()
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield from self._close()
        usage = {"output_tokens": done.sampled_tokens}
        yield {"type": "message_delta", "delta": anthropic.stop(done), "usage": usage}
        yield {"type": "message_stop"}

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the error."""
        yield anthropic.error_body(error)

    def _switch(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        """Open a block, unless it is the open one."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": anthropic.SIGNATURE})
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
            self._index, self._open = self._index + 1, ""

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
