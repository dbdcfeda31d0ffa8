"""A tiny tokenizer made from generated demonstrations."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop import runner
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.agent_loop.toy_tasks import KINDS


@pytest.fixture(autouse=True)
def every_rendering_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHECKED_SHARE", 1.0)


def demos(name: str, count: int) -> list[list[dict[str, str]]]:
    source, generator, found = random.Random(5), KINDS[name], []
    for _ in range(count):
        sample = generator.sample(source)
        found.append([{"role": "user", "content": sample.prompt}, *generator.demonstrate(sample, source)])
    return found


@pytest.fixture(scope="session")
def conversations() -> list[list[dict[str, str]]]:
    return demos("shop", 400)


@pytest.fixture(scope="session")
def tokenizer(conversations: list[list[dict[str, str]]]) -> PreTrainedTokenizerFast:
    return train_tokenizer(conversations, 200)


@pytest.fixture(scope="session")
def renderer(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tokenizer)
