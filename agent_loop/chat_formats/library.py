"""Families of models whose chat format comes from the package `renderers`, which is an optional dependency.

The package renders and parses. Untrusted text is escaped before, as for a chat template, and the tokenizer that the
package gets encodes escaped text as plain text, so that here, too, only the format itself writes special tokens.
"""

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import (
    Answer,
    CannotBridge,
    Message,
    ParsedCall,
    SampledTurn,
    TooLong,
    Tools,
    before_stops,
    text_size,
)
from rl_async.agent_loop.chat_formats.render import TOOL, TokenizerFormat, nested
from rl_async.errors import ConfigError
from rl_async.messages import CallProblem
from rl_async.template_tokens import TemplateTokens

INSTALL = "python -m pip install 'rl-async[renderers]'"
_PROBLEMS: dict[str, CallProblem] = {
    "invalid_json": "bad_json",
    "unclosed_block": "unclosed",
    "missing_name": "no_name",
    "malformed_structure": "bad_structure",
}
_CALL = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": {"x": "1"}}}
_USER, _SYSTEM = {"role": "user", "content": "x"}, {"role": "system", "content": "y"}
_CALLED: list[Message] = [
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "z", "name": "probe", "tool_call_id": "callprobe"},
]
PROBES: list[tuple[list[Message], list[Any]]] = [
    ([_USER], []),
    ([_SYSTEM, _USER], []),
    ([_USER], [TOOL]),
    (_CALLED, [TOOL]),
    ([_USER, {"role": "assistant", "content": "w", "reasoning_content": "r"}, _USER], []),
]
# The probe with a system message, which some models do not take.
_OPTIONAL = 1


def installed() -> bool:
    """Whether the package is here, with httpx, which it needs and does not ask for."""
    return find_spec("renderers") is not None and find_spec("httpx") is not None


class LibraryFormat(TokenizerFormat):
    """The format of a family, with the options that make it print the same as the tokenizer's chat template.

    Past reasoning stays where it was sampled. Raises ConfigError if the package is missing, and ValueError if the
    tokenizer is not of that family.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
        if not installed():
            raise ConfigError(f"agent.chat_format: {name} needs the package renderers; run `{INSTALL}`")
        super().__init__(tokenizer)
        self.name = name
        adapter = _Tokenizer(tokenizer, self.template_tokens)
        self._renderer, self.agreed = max(self._candidates(adapter), key=lambda found: found[1])
        self.stop_token_ids = sorted({*self._renderer.get_stop_token_ids()})
        self._opening: list[int] = self._renderer.render_ids([_USER], add_generation_prompt=True)

    @property
    def fits(self) -> bool:
        """Whether the family prints the probes exactly as the tokenizer's chat template does."""
        return self.agreed == len(PROBES)

    def _candidates(self, adapter: "_Tokenizer") -> Iterator[tuple[Any, int]]:
        """Yield renderers of the family with each of its modes, and on how many probes they agree with the template."""
        from renderers import create_renderer
        from renderers.configs import config_from_name

        wanted = [self._wanted(*probe) for probe in PROBES]
        kind = type(config_from_name(self.name))
        for options in _modes(kind, str(wanted[0])):
            try:
                renderer = create_renderer(adapter, kind(thinking_retention="all", **options))
            except (AssertionError, KeyError) as error:
                raise ValueError(f"the tokenizer is not of the family {self.name}: {error}") from error
            yield renderer, agreement([self._printed(renderer, *probe) for probe in PROBES], wanted)

    def _wanted(self, messages: list[Message], tools: list[Any]) -> str | None:
        for written in (messages, [_with_text_arguments(message) for message in messages]):
            try:
                return self._render(written, tools, generate=True)
            except jinja2.TemplateError:
                continue
        return None

    def _printed(self, renderer: Any, messages: list[Message], tools: list[Any]) -> str | None:
        try:
            return self.decode(renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))
        except (ValueError, TypeError, KeyError):
            return None

    def parse(self, turn: SampledTurn) -> Answer:
        prompt, tools = [*turn.prompt_ids] or None, [*turn.tools] or None
        found = self._renderer.parse_response(list(turn.token_ids), tools=tools, prompt_ids=prompt)
        offered = {tool.get("function", tool).get("name") for tool in turn.tools}
        calls = [_call(call, offered) for call in found.tool_calls]
        content = before_stops(found.content, turn.stops)
        text = "\n".join([*filter(None, [content]), *(call.raw for call in calls)])
        return Answer(text, content, calls, found.reasoning_content or "")

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

        Raises TooLong unless these are fewer than ``limit`` tokens, and CannotBridge after a turn that ended within its
        reasoning, or for a message of the assistant.
        """
        least = text_size(messages) // self.template_tokens.longest_token
        if least >= limit:
            raise TooLong(least)
        before = [*prompt_ids, *sampled_ids]
        given, offered = self._escaped(messages, sampled), self.template_tokens.escape([*tools])
        with _refusals(self.name):
            found = self._renderer.bridge_to_next_turn(list(prompt_ids), list(sampled_ids), given, tools=offered)
        if found is None or found.token_ids[: len(before)] != before:
            raise CannotBridge(f"{self.name} cannot go on after this turn")
        added: list[int] = found.token_ids[len(before) :]
        if len(added) >= limit:
            raise TooLong(len(added))
        return added

    def check(
        self, messages: Sequence[Message], token_ids: Sequence[int], tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> int | None:
        """Compare as any format does, but only conversations that templates print as they were sampled.

        Templates leave out past reasoning and write calls in their own spelling.
        """
        answers = [self._parse_text(messages[place]["content"]) for place in sampled]
        if any(answer.reasoning or answer.calls for answer in answers):
            return None
        # Some templates print the token that ends a turn only with the next message.
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return super().check(messages, token_ids[:-1] if ended else token_ids, tools, sampled=sampled)

    def _parse_text(self, text: str) -> Answer:
        """Read a turn sampled earlier; in some families its prompt opened the reasoning, as each prompt does."""
        return self.parse(SampledTurn(self.encode(text), self._opening))

    def row(self, messages: Sequence[Message], tools: Tools) -> tuple[list[int], list[bool]]:
        """Encode a demonstration; return (token_ids, loss_mask). The mask is true on the assistant's tokens.

        Raises ValueError if a turn comes after other tokens than those that an engine would be given before it.
        """
        spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        escaped = [m if place in spoken else self.template_tokens.escape(m) for place, m in enumerate(messages)]
        given = self.template_tokens.escape([*tools]) or None
        found = self._renderer.render(escaped, tools=given)
        for place in spoken:
            before = self._renderer.render_ids(escaped[:place], tools=given, add_generation_prompt=True)
            if found.token_ids[: len(before)] != before:
                raise ValueError(
                    f"it prints what comes before message {place} differently once the conversation goes on (reasoning "
                    "of earlier turns left out, say); make a line of each assistant turn, with what comes before it"
                )
        return found.token_ids, found.sampled_mask

    def _render_prompt(
        self, messages: list[Message], tools: list[Any], sampled: list[int], limit: int
    ) -> tuple[int, ...]:
        given = self._escaped(messages, sampled)
        with _refusals(self.name):
            ids = self._renderer.render_ids(
                given, tools=self.template_tokens.escape(tools) or None, add_generation_prompt=True
            )
        return tuple(ids)

    def _written(self, message: Message, *, sampled: bool) -> Message:
        if not sampled:
            calls = message.get("tool_calls")
            return message | {"tool_calls": [nested(call) for call in calls]} if calls else message
        answer = self._parse_text(message["content"])
        if any(call.problem for call in answer.calls):
            return {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning}
        made = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            | ({"id": c.id} if c.id else {})
            for c in answer.calls
        ]
        said = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
        return said | ({"tool_calls": made} if made else {})


def agreement(printed: Sequence[str | None], wanted: Sequence[str | None]) -> int:
    """Count the probes that are printed as ``wanted``. Only the optional one counts if neither side prints it."""
    pairs = enumerate(zip(printed, wanted, strict=True))
    return sum(text == other and (text is not None or place == _OPTIONAL) for place, (text, other) in pairs)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Convert the package's errors about messages that it cannot print to a template's, jinja2.TemplateError."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise jinja2.TemplateError(f"{name}: {error}") from error


class _Tokenizer:
    """A tokenizer for the package. Without offsets it prints the same tokens, and no attribution of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tokens: TemplateTokens) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens
        # From a name the package would guess the options that `_candidates` tries.
        self.name_or_path = ""
        self.unk_token_id, self.eos_token_id = tokenizer.unk_token_id, tokenizer.eos_token_id

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokens.encode(text)

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokenizer.convert_tokens_to_ids(tokens)


def _modes(kind: Any, first: str) -> Iterator[dict[str, Any]]:
    """Yield the options of a family that change its output: thinking or not, and the date that the template prints."""
    fields = kind.model_fields
    if "date_string" in fields and "Today Date: " in first:
        yield {"date_string": first.partition("Today Date: ")[2].partition("\n")[0]}
    if "enable_thinking" in fields:
        yield {"enable_thinking": True}
        yield {"enable_thinking": False}
    else:
        yield {}


def _with_text_arguments(message: Message) -> Message:
    """Write the arguments of calls as JSON text, as some templates need them."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _call(call: Any, offered: Collection[Any]) -> ParsedCall:
    problem = _PROBLEMS.get(str(call.status))
    # Values do not fit the parameters' types, which are unknown for a function that was not offered.
    if isinstance(call.arguments, dict) and problem == "bad_json":
        problem = "bad_arguments" if call.name in offered else None
    if problem is None and not isinstance(call.arguments, dict):
        problem = "bad_arguments"
    return ParsedCall(call.name or "", None if problem else call.arguments, call.raw, problem, call.id or "")
