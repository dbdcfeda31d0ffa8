"""Conversations in tokenizers that put spaces before a text: learned tokens are those of the whole template."""

from typing import Any

import numpy as np
import pytest

from rl_async.agent_loop.chat_formats.format_registry import choose
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.training_data import ChatEncoder, to_chat
from tests.support.sentencepiece_kinds import KINDS, TEMPLATES, sentencepiece_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is one plus two?"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "you are welcome."},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_learned_tokens_are_those_of_the_whole_template(name: str, kind: str) -> None:
    tokenizer = sentencepiece_tokenizer(kind, TEMPLATES[name])
    backend = tokenizer.backend_tokenizer
    messages = MESSAGES[1:] if name.startswith("Mistral") else MESSAGES
    text = str(tokenizer.apply_chat_template(messages, tokenize=False)).rstrip("\n")
    assert text.endswith("</s>")
    ids, learned = ChatEncoder(tokenizer).encode(to_chat({"messages": messages}, "c.jsonl, line 1"))
    assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids

    def decoded(count: int) -> str:
        return str(backend.decode(ids[:count].tolist(), skip_special_tokens=False))

    borders = np.flatnonzero(np.diff(np.r_[False, learned, False].astype(int)))
    said = [decoded(b).removeprefix(decoded(a)) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    space = " " if name == "Llama 2" else ""  # which the template prints around an answer
    assert said == [f"{space}{m['content']}{space}</s>" for m in messages if m["role"] == "assistant"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_episode_has_the_tokens_of_a_demonstration(name: str, kind: str) -> None:
    tokenizer = sentencepiece_tokenizer(kind, TEMPLATES[name])
    chat, messages = choose(tokenizer), MESSAGES[1:]
    assert isinstance(chat, ChatRenderer)
    ids, learned = ChatEncoder(tokenizer).encode(to_chat({"messages": messages}, "c.jsonl, line 1"))
    prompt = chat.prompt(messages[:1])
    assert ids[: len(prompt)].tolist() == prompt and not learned[: len(prompt)].any()
    end = len(prompt) + int(np.argmin(learned[len(prompt) :]))
    said = ids[len(prompt) : end].tolist()
    assert said[-1] in chat.stop_token_ids and chat.parse(said).text.strip() == "three"
    added = chat.bridge(prompt, said, messages[2:3])
    assert ids[end : end + len(added)].tolist() == added and learned[end + len(added)]
