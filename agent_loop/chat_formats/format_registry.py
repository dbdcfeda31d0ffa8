"""The chat formats by name, and which of them a tokenizer's chat template has.

Mistral's format is here, too: calls after ``[TOOL_CALLS]``, as a JSON list (until v7) or as names with ``[ARGS]`` (from
v11). Its prompts follow the tokenizer's own chat template, which wants results after the calls that they answer, by ids
of nine letters and digits.
"""

import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import (
    HERMES,
    NO_CALLS,
    Answer,
    CallSyntax,
    ChatFormat,
    Message,
    ParsedCall,
    SampledTurn,
    Settled,
    read_object,
)
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import INSTALL, LibraryFormat, installed
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.schema.rollout import LIBRARY_NAMES, AgentConfig, ChatFormatName
from rl_async.errors import ConfigError
from rl_async.files import DAMAGE, GENERATION_CONFIG, UNDECODABLE
from rl_async.messages import CallProblem
from rl_async.pictures import PictureProcessor
from rl_async.template_tokens import read_tokenizer

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


log = logging.getLogger("rl_async.agent_loop")


class _Generation(msgspec.Struct):
    """The part of a ``generation_config.json`` that is read here."""

    eos_token_id: int | list[int] | None = None


# The syntaxes of formats that follow the template.
SYNTAXES: dict[str, CallSyntax] = {"plain": NO_CALLS, "hermes": HERMES}
OWN: dict[str, Callable[[PreTrainedTokenizerFast], ChatFormat]] = {"gpt-oss": HarmonyFormat, "mistral": MistralFormat}


def choose(tokenizer: PreTrainedTokenizerFast, name: ChatFormatName = "auto") -> ChatFormat:
    """Return the chat format ``name``, or with ``auto`` the one of the tokenizer's chat template.

    Raises ValueError if the tokenizer does not go with it, and ConfigError if the package that has it is missing.
    """
    if name == "auto":
        return _detect(tokenizer)
    if name in OWN:
        return OWN[name](tokenizer)
    if name in SYNTAXES:
        return ChatRenderer(tokenizer, name=name, syntax=SYNTAXES[name])
    chat = LibraryFormat(tokenizer, name)
    if not chat.fits:
        log.warning("chat format %s does not print all messages as the model's own chat template does", name)
    return chat


def _detect(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    """Return Hermes' format if the template writes such calls, or knows no tools and models may learn these.

    Else return gpt-oss's or Mistral's if it writes calls as these do, or the first family that prints the same as the
    template, or a format without calls.
    """
    try:
        own = ChatRenderer(tokenizer)
    except ValueError:
        if (family := _family(tokenizer)) is None:
            raise
        return family
    printed = own.printed_call()
    if any(call.name == "probe" for call in HERMES.parse(printed)):
        return own
    if "probe" not in printed and not own.prints_tools:
        return own
    if "to=functions.probe" in printed and "<|call|>" in printed:
        return HarmonyFormat(tokenizer)
    if "probe" in printed and CALLS in printed:
        return MistralFormat(tokenizer)
    return _family(tokenizer) or ChatRenderer(tokenizer, name="plain", syntax=NO_CALLS)


def _family(tokenizer: PreTrainedTokenizerFast) -> LibraryFormat | None:
    for name in LIBRARY_NAMES if installed() else ():
        try:
            found = LibraryFormat(tokenizer, name)
        # The tokenizer lacks the family's special tokens.
        except ValueError:
            continue
        if found.fits:
            return found
    return None


def load_format(model_path: str, agent: AgentConfig) -> ChatFormat:
    """Make the chat format of a model folder.

    Raises ConfigError if the model's tokenizer or chat template cannot be used, and if the config has tools that the
    template does not print or whose calls cannot be read.
    """
    try:
        chat = choose(read_tokenizer(model_path), agent.chat_format)
    except (OSError, ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"model.path: {model_path} has no usable tokenizer with a chat template: {error}") from error
    chat.pictures = PictureProcessor.load(model_path)
    chat.stop_token_ids = sorted({*chat.stop_token_ids, *end_tokens(Path(model_path))})
    if chat.name == "mistral" and agent.past_reasoning != "keep":
        raise ConfigError(
            f"agent.past_reasoning={agent.past_reasoning}: Mistral's templates take no results after a broken call, so "
            "conversations cannot be rendered again; set keep"
        )
    if not (agent.tools or agent.environment or agent.mcp):
        return chat
    if chat.name == "plain":
        known = ", ".join([*SYNTAXES, *OWN, *LIBRARY_NAMES])
        hint = "" if installed() else f", or install more formats: `{INSTALL}`"
        raise ConfigError(
            f"agent.chat_format: nothing known reads the calls that the chat template of {model_path} asks for; name "
            f"the format if it is one of {known}{hint}"
        )
    if not chat.prints_tools and agent.unprinted_tools == "refuse":
        raise ConfigError(
            f"agent.tools: the chat template of {model_path} prints no tools, so the model would not know of them; "
            "use a model whose template does, or set agent.unprinted_tools=allow if this one learned to call them"
        )
    return chat


def end_tokens(model: Path) -> list[int]:
    """Return the tokens that end a turn by the model's ``generation_config.json``, where chat models often name more of
    them than their tokenizer does. Raises ConfigError if the file cannot be read."""
    file = model / GENERATION_CONFIG
    if not file.is_file():
        return []
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Generation).eos_token_id
    except DAMAGE as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}") from error
    return [found] if isinstance(found, int) else list(found or [])
