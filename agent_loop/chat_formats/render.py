"""Chat messages to token ids, one turn at a time, so that what was sampled is never tokenised again.

The prompt is rendered by the tokenizer's chat template. A tool result is rendered after a placeholder conversation, and
only the text that it adds is encoded, so the tokens sampled before it stay as they are.
"""

import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jinja2
import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.encoded import CACHE_BYTES, TokenizerFormat
from rl_async.agent_loop.chat_formats.format import Answer, Message, Settled, before_stops, without_beginnings
from rl_async.agent_loop.chat_formats.hermes import HERMES
from rl_async.agent_loop.chat_formats.syntax import THINK_END, THINK_START, CallSyntax, split_reasoning

_MARK = "rendermark"  # the assistant's text in the placeholder conversation
_PROBE, _PROBE_ID = "probe", "callid012"  # a function that is called to see how, and its call's id
_KEY = "probekey"
_NAME = re.compile(r"[\w.-]{0,256}")  # of functions, that no template would have to escape
_TAIL = 16  # tokens of a prompt in which an open <think> is looked for


class ChatRenderer(TokenizerFormat):
    """The chat format that follows a tokenizer's own chat template, with calls in ``syntax``.

    Raises ValueError for a template that alters an assistant's text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        name: str = "hermes",
        syntax: CallSyntax = HERMES,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(tokenizer, cache_bytes)
        self.name, self._syntax = name, syntax
        self._thinks = "</think>" in str(tokenizer.chat_template)
        self.plain_turns = not self._thinks
        self._takes_text = takes_arguments_as_text(self._print_past)
        self._printed_call = self.printed_call()
        self._prints_calls = _PROBE in self._printed_call
        closing = self._after_mark([])
        first = self.encode(closing.lstrip())[:1]
        if not first or first[0] not in tokenizer.added_tokens_decoder:
            raise ValueError(f"the chat template ends an assistant's turn with {closing!r}, not with a special token")
        self.end_of_turn: int = first[0]
        self._end_text = tokenizer.added_tokens_decoder[first[0]].content
        # Llama 2's template prints a space before the token that ends a turn.
        self._closing = closing[: closing.index(self._end_text)] + self._end_text
        self.stop_token_ids = sorted({self.end_of_turn, tokenizer.eos_token_id or self.end_of_turn})

    def printed_call(self) -> str:
        """Return what the template prints of an assistant's call; nothing if it accepts none."""
        return _print_call(self._print_past, "{}" if self._takes_text else {})

    def _print_past(self, messages: list[Message]) -> str:
        return self._render(messages, (), generate=False)

    def calls_for_template(self, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Convert `flat_calls` to the form that the template takes."""
        return [nested(call, as_text=self._takes_text) for call in calls]

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Return what ``messages`` append to a prompt and the turn sampled after it, up to the next turn's opening.

        A turn that was cut short is ended first. Raises TooLong unless these are fewer than ``limit`` tokens.
        """
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        closing = [] if ended else [self.end_of_turn]
        return closing + self.delta(messages, sampled=sampled, limit=limit - len(closing))

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Answer:
        """Read a sampled turn up to the first of the texts ``stops``. ``tools`` make no difference to this format."""
        text, reasoning = before_stops(self.turn_text(token_ids), stops), ""
        if self._thinks:
            reasoning, text = split_reasoning(text, opened=self._opened(prompt_ids))
        calls = self._syntax.parse(text)
        return Answer(text, text.partition(self._syntax.call_start)[0].rstrip() if calls else text, calls, reasoning)

    def settled(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Settled:
        """Settle what comes before anything that may become a stop string, the end of reasoning, or with ``tools`` a
        call."""
        text, reasoning = without_beginnings(before_stops(self.turn_text(token_ids), stops), stops), ""
        if self._thinks:
            begun = text.lstrip()
            if THINK_START.startswith(begun):
                return Settled()
            if begun.startswith(THINK_START) or self._opened(prompt_ids):
                if THINK_END not in begun:
                    return Settled(without_beginnings(begun.removeprefix(THINK_START), [THINK_END]).lstrip())
                reasoning, text = split_reasoning(text, opened=True)
        start = self._syntax.call_start
        if tools and start:
            text = without_beginnings(text.partition(start)[0], [start])
        return Settled(reasoning, text)

    def call_opening(self, name: str = "") -> list[int]:
        """Return how a turn begins that calls ``name`` (empty: any function), as the template would write it.

        Nothing for templates that know reasoning: a call comes behind it.
        """
        if self._thinks or not self._syntax.call_start or not _NAME.fullmatch(name):
            return []
        if not name:
            return self.encode(self._syntax.call_start)
        written = self._printed_call if self._prints_calls else self._syntax.render(_PROBE, "{}")
        _, start, call = written.rpartition(self._syntax.call_start)  # earlier ones are the template's instructions
        opening, arguments, _ = call.partition("{}")
        opening = opening.partition(_PROBE_ID)[0]  # the policy chooses the id
        if not arguments or opening.count(_PROBE) != 1:
            return []
        token_ids = self.encode(start + opening.replace(_PROBE, name).rstrip())
        return [] if set(self.stop_token_ids) & set(token_ids) else token_ids

    def _opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt has opened the turn's reasoning."""
        return self.decode(prompt_ids[-_TAIL:]).rstrip().endswith(THINK_START)

    def delta(
        self, messages: Sequence[Message], *, sampled: Collection[int] = (), limit: int = sys.maxsize
    ) -> list[int]:
        """Encode what ``messages`` add after a finished assistant turn, up to the opening of the next one.

        Raises TooLong unless these are fewer than ``limit`` tokens.
        """
        return self._within(limit, messages, (messages, sorted(sampled)), self._render_delta)

    def demo_row(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Tokenise a demonstration turn by turn, as an episode would; return (token_ids, loss_mask).

        The mask is true on the assistant's tokens and on the tokens that end its turns.
        """
        token_ids: list[int] = []
        mask: list[bool] = []
        context: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                context.append(message)
                continue
            opening = self.delta(context) if token_ids else self.prompt(context)
            spoken = [*self.encode(message["content"]), self.end_of_turn]
            token_ids += opening + spoken
            mask += [False] * len(opening) + [True] * len(spoken)
            context = []
        return token_ids, mask

    def _render_prompt(
        self, messages: list[Message], tools: list[Any], sampled: list[int], limit: int
    ) -> tuple[int, ...]:
        printed = self._render(self._escaped(messages, sampled), self._tokens.escape(tools), generate=True)
        return self._encode_printed(printed, limit)

    def _render_delta(self, messages: list[Message], sampled: list[int], limit: int) -> tuple[int, ...]:
        text = self._after_mark(self._escaped(messages, sampled), generate=True)
        if not text.startswith(self._closing):
            return self._encode_printed(text, limit)
        return self._encode_printed(text.removeprefix(self._closing), limit, after=self._end_text)

    def _written(self, message: Message, *, sampled: bool) -> Message:
        """Give calls to a template that prints them; else write them the way the model would have written them."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self._prints_calls:
            return message | {"tool_calls": self.calls_for_template(calls)}
        texts = [self._syntax.render(call["name"], call["arguments"]) for call in calls]
        return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *texts])}

    def _after_mark(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Return what the template prints after an assistant's text when ``messages`` follow it."""
        placeholder = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        text = self._render([*placeholder, *messages], (), generate=generate)
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise ValueError("the chat template does not print the assistant's text")
        return after


def takes_arguments_as_text(render: Callable[[list[Message]], str]) -> bool:
    """Whether a template needs the arguments of calls as JSON text: it refuses mappings, or prints them as Python does.

    ``render`` prints messages, and raises jinja2.TemplateError if it cannot.
    """
    printed = _print_call(render, {_KEY: "1"})
    return f"'{_KEY}'" in printed or (not printed and bool(_print_call(render, "{}")))


def _print_call(render: Callable[[list[Message]], str], arguments: Any) -> str:
    call = {"id": _PROBE_ID, "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        return render([{"role": "user", "content": "x"}, said])
    except jinja2.TemplateError:
        return ""


def nested(call: dict[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """Convert one of `flat_calls` to the form that most templates take, or ``as_text`` to OpenAI's own."""
    arguments = call["arguments"] if as_text else msgspec.json.decode(call["arguments"])
    made = {"type": "function", "function": {"name": call["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") else made
