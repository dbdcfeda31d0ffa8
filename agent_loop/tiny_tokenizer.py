"""Trains a tokenizer of a few hundred tokens on demonstrations, for models small enough to train on a laptop."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import CALL_END, CALL_START
from rl_async.errors import DataError
from rl_async.transfer_queue.chat_messages import with_images
from rl_async.transfer_queue.images import MARK, canonical, folder_of

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_START, IMAGE, IMAGE_END = VISION_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_TAGS = (CALL_START, CALL_END, "<tool_response>", "</tool_response>")
_ALPHABET = '0123456789+-*() ?.,:{}[]"\n_abcdefghijklmnopqrstuvwxyz'

# Qwen's layout: tool results are a user turn. Tool schemas are not printed; they would dwarf a tiny model's context.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

# Contents with images are in parts, and each image stands between marks.
VISION_TEMPLATE = """\
{%- macro print(content) -%}
{%- if content is string %}{{ content }}{% else -%}
{%- for part in content -%}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
""" + CHAT_TEMPLATE.replace("message.content", "print(message.content)")


def read_demos(path: str | Path) -> list[list[dict[str, Any]]]:
    """Read a file of demonstrations, with images in messages or in verl's column (``transfer_queue/images.py``).

    Raises DataError if it is missing or has no ``messages``.
    """
    try:
        names = {"messages", "images"} & {*pq.read_schema(path).names}
        rows = pq.read_table(path, columns=["messages", *(names - {"messages"})]).to_pylist()
    except FileNotFoundError as error:
        raise DataError(f"no demonstrations at {path}") from error
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        raise DataError(f"{path}: not a Parquet file with a column `messages`: {error}") from error
    if not rows:
        raise DataError(f"{path}: no demonstrations in it")
    demos = []
    for number, row in enumerate(rows):
        demo, place, folder = row["messages"], f"{path}, row {number}", folder_of(str(path))
        if not demo or any(message.get("content") is None or not message.get("role") for message in demo):
            raise DataError(f"{place}, column messages: needs messages with role and content")
        try:
            demo = [canonical(message, folder) for message in demo]
        except ValueError as error:
            raise DataError(f"{place}, column messages: a message {error}") from error
        demos.append(with_images(demo, row, place, folder))
    return demos


def train_tokenizer(
    conversations: Iterable[Sequence[dict[str, Any]]],
    vocab_size: int,
    *,
    model_max_length: int = 4096,
    vision: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer of at most ``vocab_size`` tokens, with single digits and a Qwen-style chat template.

    With ``vision`` it has marks of images, and the template prints them.

    Characters that occur neither in the conversations nor in the basic alphabet have no token and are dropped.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END, *_TAGS, *(VISION_MARKS if vision else ())],
        initial_alphabet=list(_ALPHABET),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(conversations), trainer)
    # The loop parses the tags in decoded text, so decoding must not skip them.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in _TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        chat_template=VISION_TEMPLATE if vision else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )


def _pieces(conversations: Iterable[Sequence[dict[str, Any]]]) -> Iterator[str]:
    """Yield the text between special tokens and roles, so that no learned token spans them."""
    tags = re.compile("|".join(map(re.escape, (*_TAGS, MARK))))
    for conversation in conversations:
        for message in conversation:
            if message["role"] == "tool":
                yield from ("user\n", *f"\n{message['content']}\n".split(MARK))
            elif message["role"] == "assistant":
                yield "assistant\n"
                yield from filter(None, tags.split(message["content"]))
            else:
                yield from f"{message['role']}\n{message['content']}".split(MARK)
