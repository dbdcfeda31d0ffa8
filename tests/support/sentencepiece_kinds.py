"""Tokenizers of the kinds that SentencePiece models become: a space is put before a text, or before each part of it."""

import json
from typing import Any

from tokenizers import Tokenizer, models, trainers
from transformers import PreTrainedTokenizerFast

_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
# TinyLlama 1.1B Chat v1.0 and Zephyr 7B beta have the same.
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + _ALTERNATE
    + "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    + _ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
TEMPLATES = {"TinyLlama and Zephyr": ZEPHYR, "Llama 2": LLAMA_2, "Mistral 7B v0.2": MISTRAL}
KINDS = ("a space before each part", "Metaspace always", "Metaspace first", "Metaspace never", "Unigram")
_WORDS = [
    *("what", "is", "one", "plus", "two", "three", "four", "sum", "the", "answer"),
    *("equals", "thanks", "hello", "you", "are", "welcome", "brief", "be"),
]
_SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece_tokenizer(kind: str, template: str) -> PreTrainedTokenizerFast:
    """Make a small tokenizer with byte fallback, as conversions of SentencePiece models are written."""
    texts = [f"\u2581{first}\u2581{second}" for first in _WORDS for second in _WORDS]
    letters = sorted({*"".join(texts), *"<|>[]/ISTNYabcdefghijklmnopqrstuvwxyz?.,!0123456789"} - {" "})
    made: dict[str, Any]
    if kind == "Unigram":
        unigram = Tokenizer(models.Unigram())
        unigram.train_from_iterator(
            texts,
            trainers.UnigramTrainer(
                vocab_size=200, special_tokens=_SPECIAL, unk_token="<unk>", initial_alphabet=letters
            ),
        )
        made = json.loads(unigram.to_str())
        made["model"]["vocab"] += [[f"<0x{byte:02X}>", 0.0] for byte in range(256)]
    else:
        bpe = Tokenizer(models.BPE(unk_token="<unk>"))
        bpe.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=260, special_tokens=_SPECIAL, initial_alphabet=letters)
        )
        made = json.loads(bpe.to_str())
        vocab = made["model"]["vocab"]
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
        made["model"]["fuse_unk"] = True
    made["model"]["byte_fallback"] = True
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    if kind == "a space before each part":
        prepend = {"type": "Prepend", "prepend": "\u2581"}
        made["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    else:
        scheme = kind.removeprefix("Metaspace ") if kind.startswith("Metaspace") else "always"
        made["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": scheme,
            "split": kind == "Unigram",
        }
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    made["decoder"] = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)),
        chat_template=template,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
