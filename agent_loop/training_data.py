"""Conversations and preference pairs to fine-tune on, and their tokens.

Reads conversations from JSONL or Parquet, and pairs for a reward model; every error names the file, the line and the
fix. ``ChatEncoder`` turns a conversation into tokens and the mask of those that the model is trained on.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from rl_async.agent_loop.chat_formats.format import flat_calls
from rl_async.agent_loop.chat_formats.format_registry import choose
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import LibraryFormat
from rl_async.agent_loop.chat_formats.render import ChatRenderer, PrintedParts, nested, takes_arguments_as_text
from rl_async.configs.derived import files_of
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.rollout import ChatFormatName
from rl_async.errors import ConfigError, DataError
from rl_async.files import UNDECODABLE
from rl_async.messages import Media
from rl_async.pictures import PictureProcessor
from rl_async.rollout_server.api import Image
from rl_async.template_tokens import MISFITS, TemplateTokens
from rl_async.transfer_queue.chat_messages import (
    for_templates,
    is_number,
    refuse_lost,
    refuse_media,
    to_messages,
    with_images,
)
from rl_async.transfer_queue.dataset import ParquetRows, as_messages, fill, filled_lines, json_row, open_rows
from rl_async.transfer_queue.images import as_parts, images_of, mime_of

Message = dict[str, Any]

# Keys of a message that say whether its turn is learned.
_WEIGHTS = ("weight", "train", "trainable", "loss", "loss_mask", "loss_weight")
SUFFIXES = (".jsonl", ".parquet")


class Chat(NamedTuple):
    """One conversation. ``tools`` are JSON schemas; ``place`` is its file and line, for errors."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    place: str


def read_chats(source: DataSource) -> Iterator[Chat]:
    """Yield the conversations of a data set (``files_of``) with a column ``messages`` and, optionally, ``tools``.

    Raises DataError for the first that cannot be trained on, and for a data set that is missing or empty.
    """
    empty = True
    for file in files_of(source.path):
        for place, row in _rows(file):
            empty = False
            chat = to_chat(row, place, file.parent)
            messages = _templated(chat.messages, row, source, place)
            refuse_lost(row, messages, place)
            yield chat._replace(messages=messages)
    if empty:
        raise DataError(f"{source.path}: no conversations in it; write one JSON object with `messages` on each line")


def to_chat(row: dict[str, Any], place: str, folder: Path | None = None) -> Chat:
    """Convert a row: tool-call arguments become mappings, as most chat templates need, and missing content is empty.

    Images that are files lie in ``folder``.
    """
    if row.get("functions"):
        raise DataError(f"{place}: functions is OpenAI's old form; write tools")
    messages = row.get("messages")
    if messages is None and row.get("chosen") is not None:
        raise DataError(f"{place}: a preference pair, not a conversation; `rl-async dpo` trains on pairs")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: needs `messages`, a list of {{role, content}}, got {messages!r:.80}")
    chat = for_templates(with_images(to_messages(messages, place, folder=folder), row, place, folder))
    spoken = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
    for number in spoken:
        if key := next((key for key in _WEIGHTS if chat[number].get(key, 1) != 1), None):
            raise DataError(f"{place}, message {number}: {key} is not supported; make a row that ends before the turn")
    if not spoken:
        raise DataError(f"{place}: no assistant turn, so there is nothing to learn; leave the line out")
    if spoken[0] == 0:
        raise DataError(f"{place}: begins with the assistant; put a user message before it")
    return Chat(chat, _tools(row.get("tools"), place), place)


def _templated(messages: list[Message], row: dict[str, Any], source: DataSource, place: str) -> list[Message]:
    """Return the conversation with the data set's system message and its template of the last user message.

    ``{column}`` is another column of the row, and ``{prompt}`` what the user said. Raises DataError naming the column.
    """
    if not (source.prompt or source.system):
        return messages
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
    columns = {name: value for name, value in row.items() if name != "messages"}
    if last is not None:
        columns["prompt"] = messages[last]["content"]
    elif source.prompt:
        raise DataError(f"{place}: its data set has a template of the user's message, and it has no user; add one")
    changed = [*messages]
    if last is not None and source.prompt:
        changed[last] = messages[last] | {"content": fill(source.prompt, columns, place)}
    if source.system:
        own = {"role": "system", "content": fill(source.system, columns, place)}
        changed = [own, *(message for message in changed if message["role"] != "system")]
    return changed


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not file.is_file():
        raise DataError(f"data.path: no file {file}; paths are relative to the working directory")
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file}: unknown kind of file; give {' or '.join(SUFFIXES)}, with a column `messages`")
    if file.suffix == ".jsonl":
        return _lines(file)
    return ((f"{file}, row {number}", row) for number, row in enumerate(ParquetRows(file)))


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file with their line, counted from 1; blank lines are skipped."""
    with file.open("rb") as opened:
        for number, line in filled_lines(opened):
            place = f"{file}, line {number}"
            yield place, json_row(line, place)


def _tools(value: Any, place: str) -> list[dict[str, Any]]:
    # Parquet files tend to have tools as text.
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except UNDECODABLE as error:
            raise DataError(f"{place}: tools are not JSON: {error}") from error
    if value is None:
        return []
    if not isinstance(value, list) or not all(_is_named(tool) for tool in value):
        raise DataError(f"{place}: tools are a list of JSON schemas of functions with names, got {value!r:.80}")
    return value


def _is_named(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(name := function.get("name"), str) and bool(name)


class Pair(NamedTuple):
    """Two conversations, the first better than the second. ``margin`` may be None; ``place`` is file and row."""

    chosen: list[Message]
    rejected: list[Message]
    margin: float | None
    place: str
    tools: list[dict[str, Any]]

    @property
    def prompt(self) -> str:
        """Everything before the first answer, which identifies pairs of one prompt."""
        return repr(_asked(self.chosen))


def read_pairs(path: str) -> list[Pair]:
    """Read all pairs of a file. Raises DataError for the first row that is not a pair."""
    rows = open_rows(path)
    if rows.generated:
        raise DataError(f"{path}: preference pairs come from a Parquet or JSONL file")
    return [to_pair(row, f"{rows.name}, row {number}") for number, row in enumerate(rows)]


def to_pair(row: dict[str, Any], place: str) -> Pair:
    """Convert a row.

    The columns ``chosen`` and ``rejected`` are messages or the assistant's text. The ``prompt`` is put before both
    unless they begin with it; whole conversations need none. The ``margin`` is an optional number.
    """
    refuse_media(row, place)
    if row.get("images"):
        raise DataError(f"{place}: has images, and pairs are text only; leave the row out")
    given = row.get("prompt")
    prompt = [] if given is None else as_messages(given, place, "prompt")
    chosen, rejected = (_conversation(row.get(column), prompt, place, column) for column in ("chosen", "rejected"))
    refuse_lost(row, chosen, place)
    if _asked(chosen) != _asked(rejected):
        raise DataError(f"{place}, column rejected: answers another prompt than chosen; compare answers to one prompt")
    if chosen == rejected:
        raise DataError(f"{place}, column rejected: the same as chosen; leave the row out")
    margin, tools = row.get("margin"), _tools(row.get("tools"), place)
    if margin is None:
        return Pair(chosen, rejected, None, place, tools)
    if not is_number(margin):
        raise DataError(f"{place}, column margin: needs a finite number, got {margin!r:.80}")
    return Pair(chosen, rejected, float(margin), place, tools)


def _conversation(value: Any, prompt: list[Message], place: str, column: str) -> list[Message]:
    if isinstance(value, str) and not prompt:
        raise DataError(f"{place}, column {column}: a text needs a column prompt; or give whole conversations")
    said = as_messages(value, place, column, role="assistant")
    if prompt and said[: len(prompt)] != prompt:
        if prompt[-1]["role"] != "assistant" and said[0]["role"] in ("system", "developer", "user"):
            raise DataError(f"{place}, column {column}: does not begin with the prompt; leave column prompt out")
        said = [*prompt, *said]
    if said[-1]["role"] != "assistant":
        raise DataError(
            f"{place}, column {column}: ends with the {said[-1]['role']}, and not with an answer to compare"
        )
    if images_of(said):
        raise DataError(f"{place}, column {column}: has images, and pairs are text only; leave the row out")
    return for_templates(said)


def _asked(conversation: list[Message]) -> list[Message]:
    """Return everything before the first answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", conversation))


def _illustrated(tokens: "ChatTokens", images: Sequence[bytes], pictures: PictureProcessor, place: str) -> "ChatTokens":
    """Put the tokens of images in place of their marks. Raises DataError, naming ``place``, as ``expand_row`` does."""
    try:
        ids, learned, positions = pictures.expand_row(tokens.ids.tolist(), tokens.learned.tolist(), images)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error
    shown = [Image.of(data, mime_of(data), at) for data, at in zip(images, positions, strict=True)]
    return ChatTokens(np.array(ids, np.int32), np.array(learned, bool), shown)


_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokens(NamedTuple):
    """A conversation's token ids (int32), the mask of those that are trained on (bool), both [T], and its images."""

    ids: np.ndarray
    learned: np.ndarray
    images: Sequence[Image] = ()

    @property
    def media(self) -> list[Media]:
        """References to the images, as rows of the queue have them."""
        return [Media(sha256=image.sha256, mime=image.mime, position=image.position) for image in self.images]


class ChatEncoder:
    """Encodes with one tokenizer.

    Raises ConfigError if its chat template neither marks turns nor ends them with a special token, and if the tokenizer
    does not go with ``chat_format``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat_format: ChatFormatName = "auto",
        pictures: PictureProcessor | None = None,
    ) -> None:
        self._pictures = pictures
        self._tokenizer, self._tokens = tokenizer, TemplateTokens(tokenizer)
        self._encode: Callable[[Chat], ChatTokens] = self._marked
        self._print: Callable[[Chat], str] = self._render
        self._takes_text = takes_arguments_as_text(self._print_past)
        self._parts = PrintedParts(lambda messages, tools: self._print(Chat(messages, tools, "")))
        if _MARKER.search(str(tokenizer.get_chat_template())):
            return
        self._encode = self._by_prefixes
        try:
            chat = choose(tokenizer, chat_format)
        except (ValueError, jinja2.TemplateError) as error:
            if chat_format != "auto":
                raise ConfigError(f"agent.chat_format={chat_format}: {error}; use auto or another one") from error
            raise ConfigError(
                f"model.path: the end of an assistant's turn cannot be determined: {error}; put {{% generation %}} and "
                "{% endgeneration %} around what the assistant says in the chat template"
            ) from error
        if isinstance(chat, LibraryFormat | HarmonyFormat):
            self._family, self._encode = chat, self._by_family
            self._print = lambda printed: self._family.decode(self._family.row(printed.messages, printed.tools)[0])
            return
        assert isinstance(chat, ChatRenderer)
        self._renderer = chat
        # Only these know the marks that they put into what is printed.
        self._tokens = chat.template_tokens
        self._end = self._renderer.decode([self._renderer.end_of_turn])

    def encode(self, chat: Chat) -> ChatTokens:
        """Encode a conversation.

        Raises DataError, naming it, if the assistant's tokens cannot be determined, or if the template leaves a part
        out, and for images that the model cannot read.
        """
        images = images_of(chat.messages)
        if images and self._pictures is None:
            raise DataError(f"{chat.place}: has images, and the model of model.path reads text only; leave the row out")
        parts = [as_parts(message) for message in chat.messages]
        try:
            tokens = self._encode(chat._replace(messages=parts))
            # Texts alone have marks of their images in them.
            texts = [{key: part for key, part in message.items() if key != "images"} for message in chat.messages]
            self._parts.check(texts, chat.tools, chat.place)
            if self._pictures is not None and images:
                tokens = _illustrated(tokens, images, self._pictures, chat.place)
        except (jinja2.TemplateError, *MISFITS) as error:
            raise DataError(f"{chat.place}: the model's chat template refuses it: {error}") from error
        if not tokens.learned.any():
            raise DataError(f"{chat.place}: the chat template marks nothing of it as the assistant's")
        return tokens

    def _marked(self, chat: Chat) -> ChatTokens:
        chat = self._escaped(chat)
        special: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        rendered: Any = render_jinja_template(
            conversations=[self._given(chat.messages)],
            tools=[*chat.tools] or None,
            chat_template=str(self._tokenizer.get_chat_template()),
            return_assistant_tokens_mask=True,
            **special,
        )
        (printed,), (spans,) = rendered
        pieces, done = list[tuple[str, bool]](), 0
        for start, end in spans:
            pieces += [(printed[done:start], False), (printed[start:end], True)]
            done = end
        ids, learned = self._tokens.encode_pieces([*pieces, (printed[done:], False)])
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _by_family(self, chat: Chat) -> ChatTokens:
        ids, learned = self._family.row(chat.messages, chat.tools)
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _by_prefixes(self, chat: Chat) -> ChatTokens:
        ids: list[int] = []
        learned: list[bool] = []
        encode, after = self._renderer.encode_printed, ""
        for before, spoken in self._turns(chat):
            given = encode(before, after)
            both = encode(before + spoken, after)
            # The text of a turn may join the text before it in a token, which an engine could not be given.
            joined = both[: len(given)] != given
            said = self._tokens.encode_continued(spoken) if joined else both[len(given) :]
            ids += [*given, *said]
            learned += [False] * len(given) + [True] * len(said)
            after = self._end
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _turns(self, chat: Chat) -> Iterator[tuple[str, str]]:
        """Yield for each of the assistant's turns the text since the one before, and the text of the turn."""
        chat = self._escaped(chat)
        whole, done = self._render(chat), 0
        for number, message in enumerate(chat.messages):
            place = f"{chat.place}, message {number}"
            if message["role"] != "assistant":
                continue
            if self._end in json.dumps(message, ensure_ascii=False):
                raise DataError(f"{place}: contains {self._end}, which ends a turn; take it out")
            before = self._render(chat, number)
            if not whole.startswith(before) or len(before) < done:
                raise DataError(
                    f"{place}: the chat template prints what comes before this turn differently once the conversation "
                    "goes on (reasoning of earlier turns left out, say), so the model would learn what it never sees; "
                    "make a line of each assistant turn, with what comes before it, or mark the template with "
                    "{% generation %}"
                )
            end = whole.find(self._end, len(before))
            if end < 0:
                raise DataError(f"{place}: the chat template does not end this turn with {self._end}")
            end += len(self._end)
            yield whole[done : len(before)], whole[len(before) : end]
            done = end

    def _escaped(self, chat: Chat) -> Chat:
        """Escape all but the assistant's turns: it may have to learn the special tokens in these."""
        messages = [m if m["role"] == "assistant" else self._tokens.escape(m) for m in chat.messages]
        return chat._replace(messages=messages, tools=[self._tokens.escape(tool) for tool in chat.tools])

    def _render(self, chat: Chat, count: int | None = None) -> str:
        """Render all messages, or the first ``count`` of them and the opening of an assistant's turn."""
        return str(
            self._tokenizer.apply_chat_template(
                self._given(chat.messages[:count]),
                tools=[*chat.tools] or None,
                tokenize=False,
                add_generation_prompt=count is not None,
            )
        )

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the arguments of calls in the form that the template takes."""
        if not self._takes_text:
            return list(messages)
        return [
            m | {"tool_calls": [nested(call, as_text=True) for call in flat_calls(m)]} if m.get("tool_calls") else m
            for m in messages
        ]

    def _print_past(self, messages: list[Message]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except MISFITS as error:
            raise jinja2.TemplateError(str(error)) from error
