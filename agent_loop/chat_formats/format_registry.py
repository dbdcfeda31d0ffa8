"""The chat formats by name, and which of them a tokenizer's chat template has."""

import logging
from collections.abc import Callable
from pathlib import Path

import jinja2
import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import HERMES, NO_CALLS, CallSyntax, ChatFormat
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import INSTALL, LibraryFormat, installed
from rl_async.agent_loop.chat_formats.mistral import CALLS, MistralFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.configs.schema.rollout import LIBRARY_NAMES, AgentConfig, ChatFormatName
from rl_async.errors import ConfigError
from rl_async.files import DAMAGE, GENERATION_CONFIG
from rl_async.pictures import PictureProcessor
from rl_async.template_tokens import read_tokenizer

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
