"""A gateway with a scripted engine, and the chat formats that it speaks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.schema.rollout import GatewayConfig
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


@pytest.fixture(scope="module")
def ending() -> Iterator[list[RunningGateway]]:
    """Gateways that were asked to end, which takes uvicorn some tenths of a second: the module's end waits for them."""
    gateways: list[RunningGateway] = []
    yield gateways
    for gateway in gateways:
        gateway.stop()


@pytest.fixture
def start(renderer: ChatRenderer, ending: list[RunningGateway]) -> Iterator[Callable[..., RunningGateway]]:
    started: list[RunningGateway] = []

    def begin(*says: str, samples: int = 1, chat: ChatRenderer = renderer, **options: Any) -> RunningGateway:
        limits, kept = {"max_tokens": 100, "max_model_len": 4000}, GatewayConfig(**options)
        config = run_config(limits, tools=("calculator",), max_tokens=3000, gateway=kept)
        started.append(RunningGateway(config, leased(samples=samples), chat, says))
        return started[-1]

    yield begin
    for gateway in started:
        gateway.ask_to_end()
        ending.append(gateway)
