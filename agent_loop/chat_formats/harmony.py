"""gpt-oss's format, harmony: a turn is messages in channels, and a call is a message to a function.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>    or
    <|start|>assistant<|channel|>final<|message|>...<|return|>

Prompts follow the tokenizer's own chat template. The package renderers has this family, too, but it downloads the
vocabulary and does not escape untrusted text.
"""

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2
import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import (
    Answer,
    CannotBridge,
    Message,
    ParsedCall,
    SampledTurn,
    Settled,
    Tools,
    before_stops,
    without_beginnings,
)
from rl_async.agent_loop.chat_formats.render import TokenizerFormat, nested
from rl_async.files import UNDECODABLE
from rl_async.messages import CallProblem

_TOKENS = ("start", "channel", "message", "end", "call", "return")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_FUNCTIONS = "functions."
_USER: Message = {"role": "user", "content": "x"}


class HarmonyFormat(TokenizerFormat):
    """The format of gpt-oss. Raises ValueError for a tokenizer without its special tokens.

    A turn that ended with ``<|return|>`` is printed with ``<|end|>`` once the conversation goes on, and without its
    reasoning; `bridge` keeps what was sampled.
    """

    name = "gpt-oss"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        known = tokenizer.get_vocab()
        if missing := [token for token in map("<|{}|>".format, _TOKENS) if token not in known]:
            raise ValueError(f"the tokenizer is not of the family {self.name}: it has no {', '.join(missing)}")
        ids = {name: known[f"<|{name}|>"] for name in _TOKENS}
        super().__init__(tokenizer)
        self._ids = ids
        self.stop_token_ids = sorted((ids["return"], ids["call"]))

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Decode an assistant's sampled tokens without ``<|return|>``; ``<|call|>`` is a part of the call."""
        ended = bool(token_ids) and token_ids[-1] == self._ids["return"]
        return self.decode(token_ids[:-1] if ended else token_ids)

    def parse(self, turn: SampledTurn) -> Answer:
        reasoning, said, calls = list[str](), list[str](), list[ParsedCall]()
        for number, part in enumerate(self._parts(turn.token_ids)):
            recipient, channel = _RECIPIENT.search(part.header), _CHANNEL.search(part.header)
            if recipient is not None:
                calls.append(_call(recipient[1], part))
            # Text instead of a channel, or a header that was cut off.
            elif part.body is None:
                said += [part.header] if number == 0 and channel is None else []
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(part.body)
            else:
                said.append(part.body)
        content = before_stops("".join(said).strip(), turn.stops)
        text = "\n".join([*filter(None, [content]), *(call.raw for call in calls)])
        return Answer(text, content, calls, "".join(reasoning).strip())

    def settled(self, turn: SampledTurn) -> Settled:
        """Settle the texts of channels, as far as no stop string may come; calls are in other channels."""
        # The turn ends at a stop string, which may be in any channel.
        if any(stop in self.turn_text(turn.token_ids) for stop in turn.stops):
            return Settled()
        reasoning, said = list[str](), list[str]()
        parts = list(self._parts(turn.token_ids))
        for number, part in enumerate(parts):
            channel = _CHANNEL.search(part.header)
            if _RECIPIENT.search(part.header) is not None:
                continue
            if part.body is not None:
                (reasoning if channel is not None and channel[1] == "analysis" else said).append(part.body)
            elif number == 0 and channel is None and (part.ended or len(parts) > 1):
                said.append(part.header)
        thought, text = ("".join(texts).lstrip() for texts in (reasoning, said))
        return Settled(without_beginnings(thought, turn.stops), without_beginnings(text, turn.stops))

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode the text from the turn sampled after a prompt, over ``messages``, to the next turn's opening.

        A turn that was cut short is ended first. Raises TooLong unless these are fewer than ``limit`` tokens, and
        CannotBridge for a message that the template prints at the beginning, or as the assistant's.
        """
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        closing = [] if ended else [self._ids["end"]]
        return closing + self._within(limit - len(closing), messages, (messages, "bridge"), self._render_messages)

    def keeps_past(
        self, messages: Sequence[Message], place: int, tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> bool:
        """Whether ``prompt`` still prints the turn sampled at ``place``, and all before it, as when it was sampled.

        The template prints a turn without a call with another end, and without its reasoning.
        """
        if not self._read(messages[place]["content"]).calls:
            return False
        return super().keeps_past(messages, place, tools, sampled=sampled)

    def check(
        self, messages: Sequence[Message], token_ids: Sequence[int], tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> int | None:
        """Compare as any format does, but only conversations that the template prints as they were sampled.

        It leaves out past reasoning, writes calls in its own spelling, and other ends of turns that are past.
        """
        answers = [self._read(messages[place]["content"]) for place in sampled]
        if len(answers) != 1 or answers[0].reasoning or answers[0].calls:
            return None
        return super().check(messages, token_ids, tools, sampled=sampled)

    def row(self, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[bool]]:
        """Encode a demonstration; return (token_ids, loss_mask). The mask is true on the assistant's tokens.

        Raises ValueError if the template prints a turn differently once the conversation goes on.
        """
        given, offered = self._escaped(messages, ()), self.template_tokens.escape([*tools])
        last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        whole, done = self._render(given[: last + 1], offered, generate=False), 0
        token_ids, mask = list[int](), list[bool]()
        for place, message in enumerate(messages[: last + 1]):
            if message["role"] != "assistant":
                continue
            before = self._render(given[:place], offered, generate=True)
            after = self._render(given[: place + 1], offered, generate=False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the template prints message {place} differently once the conversation goes on (without its "
                    "reasoning, and with another end); make a line of each assistant turn, with what comes before it"
                )
            for text, spoken in ((whole[done : len(before)], False), (whole[len(before) : len(after)], True)):
                piece = self.template_tokens.encode(text)
                token_ids += piece
                mask += [spoken] * len(piece)
            done = len(after)
        return token_ids, mask

    def _parts(self, token_ids: Sequence[int]) -> "Iterator[_Part]":
        """Cut a turn, whose first header the prompt has opened, into its messages."""
        header: list[int] = []
        body: list[int] | None = None

        def part(ended: bool) -> "_Part":
            return _Part(self.decode(header), None if body is None else self.decode(body), ended)

        for token in token_ids:
            ends = token in (self._ids["end"], self._ids["call"], self._ids["return"])
            if ends or token == self._ids["start"]:
                if header or body is not None:
                    yield part(ends)
                header, body = [], None
            elif token == self._ids["message"] and body is None:
                body = []
            else:
                (header if body is None else body).append(token)
        if header or body is not None:
            yield part(ended=False)

    def _read(self, said: str) -> Answer:
        return self.parse(SampledTurn(self.encode(said)))

    def _render_messages(self, messages: list[Message], _: str, limit: int) -> tuple[int, ...]:
        """Encode each message as the template prints it after a message that it may follow, and a turn's opening."""
        printed = ""
        for message in self._escaped(messages, ()):
            before = [_USER]
            if message["role"] == "tool":
                call = {"type": "function", "function": {"name": message.get("name", ""), "arguments": {}}}
                before.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif message["role"] != "user":
                raise CannotBridge(f"{self.name} cannot go on with a message of the {message['role']}")
            start = self._render(before, (), generate=False)
            printed += self._render([*before, message], (), generate=False).removeprefix(start)
        start = self._render([_USER], (), generate=False)
        return self._encode_printed(printed + self._render([_USER], (), generate=True).removeprefix(start), limit)

    def _written(self, message: Message, *, sampled: bool) -> Message:
        if message["role"] != "assistant":
            return message
        if not sampled:
            calls = [nested(call) for call in message.get("tool_calls") or ()]
            return _assistant(message.get("content") or "", message.get("reasoning_content") or "", calls)
        answer = self._read(message["content"])
        if any(call.problem for call in answer.calls):
            return _assistant(answer.text, answer.reasoning, [])
        made = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls
        ]
        return _assistant(answer.content, answer.reasoning, made)


class _Part(NamedTuple):
    """A message of a turn. Text outside a message has no body."""

    header: str
    body: str | None
    ended: bool


def _assistant(content: str, reasoning: str, calls: list[Any]) -> Message:
    """Write a turn for the template, which takes one call, with either the reasoning or the text before the call."""
    if len(calls) > 1:
        raise jinja2.TemplateError("gpt-oss makes one call in a turn")
    if calls:
        return {"role": "assistant", "content": "", "thinking": reasoning or content, "tool_calls": calls}
    said: Message = {"role": "assistant", "content": content}
    return said | ({"thinking": reasoning} if reasoning else {})


def _call(recipient: str, part: _Part) -> ParsedCall:
    name, raw = recipient.removeprefix(_FUNCTIONS), part.body or ""
    problem: CallProblem | None = None
    arguments: Any = None
    if not part.ended or part.body is None:
        problem = "unclosed"
    else:
        try:
            arguments = msgspec.json.decode(raw)
        except UNDECODABLE:
            problem = "bad_json"
    if problem is None and not name:
        problem = "no_name"
    if problem is None and not isinstance(arguments, dict):
        problem = "bad_arguments"
    return ParsedCall(name, None if problem else arguments, raw, problem)
