"""Which part of an answer may be sent while it is still being sampled."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from rl_async.agent_loop.chat_formats.format import Answer, Settled
from rl_async.agent_loop.gateway.dialects.chat import ChatMessage, ChatRequest
from rl_async.errors import RequestRefused

READS = 64  # an answer is read again when it has grown by one in so many tokens: reading it decodes all of it


class Reader(Protocol):
    """Reads what was sampled: the part of a chat format that answers need."""

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Answer: ...

    def settled(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Settled: ...


class Release:
    """The tokens of one answer so far, and what was sent of it. ``news`` is set when there are more."""

    def __init__(
        self, reader: Reader, prompt_ids: Sequence[int], request: ChatRequest, forced: Sequence[int] = ()
    ) -> None:
        self._reader, self._prompt_ids, self._request, self._forced = reader, prompt_ids, request, forced
        self._reasoning = self._text = ""  # as they were sent
        self._tokens: Sequence[int] = ()
        self._read = 0
        self.news = asyncio.Event()

    def hear(self, token_ids: Sequence[int]) -> None:
        """Take all tokens sampled so far."""
        self._tokens = [*self._forced, *token_ids] if self._forced else token_ids
        self.news.set()

    def more(self) -> tuple[str, str]:
        """Return the reasoning and the text that may be sent now."""
        size = len(self._tokens)
        if size - self._read < max(1, self._read // READS):
            return "", ""
        self._read = size
        found = self._reader.settled(
            self._tokens, prompt_ids=self._prompt_ids, tools=self._request.tools, stops=self._request.stops
        )
        reasoning = found.reasoning if self._request.reasoning else ""
        if not (reasoning.startswith(self._reasoning) and found.content.startswith(self._text)):
            return "", ""  # a stop string ended it before what comes behind; `check` decides at the end
        new = reasoning[len(self._reasoning) :], found.content[len(self._text) :]
        self._reasoning, self._text = reasoning, found.content
        return new

    def check(self, said: ChatMessage) -> None:
        """Release no more but the rest. Raises RequestRefused unless what was sent is the beginning of the answer."""
        self._tokens = ()
        if not (said.text.startswith(self._text) and said.reasoning.startswith(self._reasoning)):
            raise RequestRefused(
                "the end of the answer changed the text before it (bytes that are no text); send the request again",
                code="unreadable_answer",
                status=503,
            )

    def rest(self, said: ChatMessage) -> tuple[str, str]:
        """Return the reasoning and the text of the whole answer that were not sent yet."""
        return said.reasoning[len(self._reasoning) :], said.text[len(self._text) :]
