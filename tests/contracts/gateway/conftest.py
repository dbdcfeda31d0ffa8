"""A gateway with a scripted engine, and the chat formats that it speaks."""

from collections.abc import Callable, Iterator

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.data.tiny_tokenizer import train_tokenizer
from tests.contracts.gateway.peers import RunningGateway
from tests.unit.agent_loop.conftest import demos
from tests.unit.agent_loop.fakes import leased, run_config

THINK = ["<think>", "</think>"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(demos("calculator", 300), 200)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tokenizer)


@pytest.fixture(scope="module")
def thinking(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    """A format whose template knows reasoning."""
    template = "{#- </think> -#}" + str(tokenizer.chat_template)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=tokenizer.eos_token, chat_template=template, extra_special_tokens=THINK
    )
    return ChatRenderer(made)


@pytest.fixture
def start(renderer: ChatRenderer) -> Iterator[Callable[..., RunningGateway]]:
    started: list[RunningGateway] = []

    def begin(*says: str, samples: int = 1, chat: ChatRenderer = renderer) -> RunningGateway:
        config = run_config({"max_tokens": 100, "max_model_len": 4000}, tools=("calculator",), max_tokens=3000)
        started.append(RunningGateway(config, leased(samples=samples), chat, says))
        return started[-1]

    yield begin
    for gateway in started:
        gateway.stop()
