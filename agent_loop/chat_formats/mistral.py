"""Mistral's format: calls after ``[TOOL_CALLS]``, as a JSON list (until v7) or as names with ``[ARGS]`` (from v11).

Prompts follow the tokenizer's own chat template, which wants results after the calls that they answer, by ids of nine
letters and digits.
"""

import hashlib
import re
from typing import Any

import jinja2
import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import (
    Answer,
    CallSyntax,
    Message,
    ParsedCall,
    SampledTurn,
    Settled,
    read_object,
)
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.files import UNDECODABLE
from rl_async.messages import CallProblem

CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"([^\[{]*)(?:\[CALL_ID\]([^\[{]*))?(?:\[ARGS\])?(.*)", re.DOTALL)
_THINK = "[THINK]"
_THOUGHT = re.compile(r"\s*\[THINK\](.*?)(?:\[/THINK\]|\Z)", re.DOTALL)
_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralFormat(ChatRenderer):
    """The format of Mistral's models, of any version. Raises ValueError for a template that alters an assistant's text.

    Past reasoning stays in the context, as it was sampled.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer, name="mistral", syntax=MISTRAL)
        self.plain_turns = self.plain_turns and _THINK not in str(tokenizer.chat_template)

    def parse(self, turn: SampledTurn) -> Answer:
        """Read a turn, whose reasoning contains no calls."""
        found = super().parse(turn)
        thought = _THOUGHT.match(found.text)
        if thought is None:
            return found
        text = found.text[thought.end() :]
        calls = parse(text)
        return Answer(text, text.partition(CALLS)[0].rstrip() if calls else text, calls, thought[1].strip())

    def settled(self, turn: SampledTurn) -> Settled:
        """Settle as other templates' formats do, but nothing if the answer may have begun with reasoning."""
        begun = self.turn_text(turn.token_ids).lstrip()[: len(_THINK)]
        if _THINK.startswith(begun):
            return Settled()
        return super().settled(turn)

    def call_opening(self, name: str = "") -> list[int]:
        """Return the opening of a turn that calls ``name``, or nothing if turns may begin with reasoning."""
        return super().call_opening(name) if self.plain_turns else []

    def _render_delta(self, messages: list[Message], sampled: list[int], limit: int) -> tuple[int, ...]:
        """Encode results after the calls that they answer, and other messages after an answer."""
        results = next((n for n, message in enumerate(messages) if message["role"] != "tool"), len(messages))
        if not results:
            return super()._render_delta(messages, sampled, limit)
        given = self._escaped(messages, sampled)
        calls = [_call(message.get("name") or "f", {}, message["tool_call_id"]) for message in given[:results]]
        before: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        start = self._render(before, (), generate=False)
        text = self._render([*before, *given], (), generate=True)
        if not text.startswith(start):
            raise jinja2.TemplateError("the chat template prints calls differently once their results are there")
        return self._encode_printed(text[len(start) :], limit)

    def _written(self, message: Message, *, sampled: bool) -> Message:
        made = self._as_sampled(message) if sampled else super()._written(message, sampled=False)
        if made["role"] == "tool":
            return made | {"tool_call_id": _id(made.get("tool_call_id", ""))}
        if calls := made.get("tool_calls"):
            return made | {"tool_calls": [call | {"id": _id(call.get("id", ""))} for call in calls]}
        return made

    def _as_sampled(self, message: Message) -> Message:
        calls = parse(message["content"])
        if not calls or any(call.problem for call in calls):
            return message
        made = [_call(call.name, call.arguments, call.id) for call in calls]
        return {"role": "assistant", "content": message["content"].partition(CALLS)[0], "tool_calls": made}


def parse(text: str) -> list[ParsedCall]:
    """Return all calls in ``text``, in order."""
    calls: list[ParsedCall] = []
    for block in text.split(CALLS)[1:]:
        body = block.strip()
        calls += _listed(body) if body.startswith("[") else [_named(body)]
    return calls


def _listed(body: str) -> list[ParsedCall]:
    try:
        found = msgspec.json.decode(body)
    except UNDECODABLE:
        return [ParsedCall("", None, body, "bad_json" if body.endswith("]") else "unclosed")]
    calls = []
    for value in found:
        call = read_object(msgspec.json.encode(value).decode())
        given = value.get("id") if isinstance(value, dict) else None
        calls.append(call._replace(id=given) if isinstance(given, str) else call)
    return calls


def _named(body: str) -> ParsedCall:
    match = _NAMED.match(body)
    assert match is not None
    name, given, raw = match[1].strip(), (match[2] or "").strip(), match[3].strip()
    problem: CallProblem | None = None
    arguments: Any = None
    try:
        arguments = msgspec.json.decode(raw)
    except UNDECODABLE:
        problem = "bad_json" if raw.endswith("}") else "unclosed"
    if problem is None and not name:
        problem = "no_name"
    if problem is None and not isinstance(arguments, dict):
        problem = "bad_arguments"
    return ParsedCall(name, None if problem else arguments, raw, problem, given)


def _call(name: str, arguments: Any, given: str) -> dict[str, Any]:
    return {"id": _id(given), "type": "function", "function": {"name": name, "arguments": arguments}}


def _id(given: str) -> str:
    """Return an id that Mistral's templates take: the same, or nine digits that stand for it."""
    return given if _ID.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]


MISTRAL = CallSyntax(parse, lambda name, arguments: f"{CALLS}{name}[ARGS]{arguments}", CALLS)
