"""Answers within a JSON schema, over HTTP, from the embedded engine and real vLLM.

What a grammar allows is computed here by trying every token, for schemas of which few texts are instances.
"""

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.errors import EngineRejected
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm.client import VllmEngine
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, differences, errors, paused, running, scaled, send, tensors
from tests.contracts.gateway.peers import make_model
from tests.support.rounding import PlainPass, assert_near
from tests.unit.agent_loop.conftest import demos

V0, V1 = Version(0, 0), Version(0, 1)
COLOURS = ["red", "green", "greed", "10", "a b"]
INSTANCES = [json.dumps(colour) for colour in COLOURS]  # all texts that are instances of the schema
COLOUR = json.dumps({"enum": COLOURS})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(demos("calculator", 300), 200)


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=pytest.mark.slow)])
def peer(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A running engine of each kind."""
    if request.param == "embedded":
        pytest.importorskip("llguidance", reason="no masks of tokens here; install them: pip install 'rl-async[json]'")
    with running(request.param, folder, tmp_path_factory.mktemp("run"), eager=True) as started:
        yield started


@pytest.fixture
async def engine(connect: Connect, folder: Path) -> VllmEngine:
    """A client; the engine serves the folder's weights as version 0.0."""
    client = connect(max_coalesced=4)
    await send(client, tensors(folder), V0)
    return client


def ask(tokenizer: PreTrainedTokenizerFast, schema: str, prompt: int = 8, **more: Any) -> GenerateRequest:
    settings = {"sampling": Sampling(), "max_tokens": 60, "min_version": V0, "json_schema": schema} | more
    ids = [(7 * i + 11) % 60 + 10 for i in range(prompt)]
    stops = [tokenizer.eos_token_id]
    return GenerateRequest(request_id=secrets.token_hex(4), token_ids=ids, stop_token_ids=stops, **settings)


def allowed(tokenizer: PreTrainedTokenizerFast, said: str) -> torch.Tensor:
    """Which tokens may follow a text, bool [V], by trying each."""
    found = torch.zeros(len(tokenizer), dtype=torch.bool)
    for token in set(range(len(tokenizer))) - set(tokenizer.all_special_ids):
        text = tokenizer.decode([token])
        found[token] = bool(text) and any(instance.startswith(said + text) for instance in INSTANCES)
    found[tokenizer.eos_token_id] = said in INSTANCES
    return found


def assert_masked(
    model: Any, tokenizer: PreTrainedTokenizerFast, request: GenerateRequest, got: GenerateResult
) -> None:
    """Compare with log mu of each sampled token: the policy's distribution over what is allowed, renormalised."""
    ids, start = request.token_ids + got.token_ids, len(request.token_ids)
    temperature = 1.0 if request.sampling.greedy else request.sampling.temperature
    exact, rounded = PlainPass(model).logprobs(ids, temperature)
    expected = []
    for place, token in enumerate(got.token_ids):
        mask = allowed(tokenizer, tokenizer.decode(got.token_ids[:place]))
        expected.append(exact[start - 1 + place].masked_fill(~mask, -torch.inf).log_softmax(-1)[token])
    # The sum over what is allowed, which is taken off again, has the same error.
    assert_near(torch.tensor(got.logprobs), torch.stack(expected), 2 * rounded, request.request_id)


def said(tokenizer: PreTrainedTokenizerFast, got: GenerateResult) -> str:
    return str(tokenizer.decode([t for t in got.token_ids if t != tokenizer.eos_token_id]))


async def test_log_probabilities_are_those_of_the_masked_distribution_and_others_are_left_alone(
    engine: VllmEngine, folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    warm, greedy = Sampling(temperature=0.7), Sampling(temperature=0.0)
    bound = [ask(tokenizer, COLOUR, 5 + i // 2, sampling=warm if i // 2 % 3 else Sampling()) for i in range(12)]
    bound.append(ask(tokenizer, COLOUR, sampling=greedy))
    free = [ask(tokenizer, "", 5 + i) for i in range(8)]
    both = [request for pair in zip(bound, [*free, *free[:5]], strict=True) for request in pair]
    answers = dict(zip(map(id, both), await asyncio.gather(*(engine.generate(r) for r in both)), strict=True))
    model, seen = scaled(folder), set()
    for request in bound:
        got = answers[id(request)]
        assert got.finish_reason == "stop" and said(tokenizer, got) in INSTANCES
        seen.add(said(tokenizer, got))
        assert_masked(model, tokenizer, request, got)
        assert differences(model, request, got).max() > 0.5 or request.sampling.greedy, "the mask left nearly all"
    assert len(seen) > 1
    for request in free:
        assert errors(model, request, answers[id(request)]).max() <= 1
        assert said(tokenizer, answers[id(request)]) not in INSTANCES


async def test_objects_fit_their_schema(engine: VllmEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    properties = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [True, None]}}
    shape = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    requests = [ask(tokenizer, json.dumps(shape), max_tokens=300) for _ in range(8)]
    answers = await asyncio.gather(*(engine.generate(r) for r in requests))
    complete = [got for got in answers if got.finish_reason == "stop"]
    assert len(complete) > 4
    for got in complete:
        value = json.loads(said(tokenizer, got))
        assert value.keys() == {"a", "b"} and 0 <= value["a"] <= 99 and value["b"] in (True, None)


async def test_an_answer_that_is_cut_short_is_what_it_is(
    engine: VllmEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    got = await engine.generate(ask(tokenizer, COLOUR, max_tokens=2))
    assert got.finish_reason == "length" and len(got.token_ids) == 2
    assert any(instance.startswith(said(tokenizer, got)) for instance in INSTANCES)


async def test_an_answer_goes_on_within_its_schema_with_new_weights(
    engine: VllmEngine, folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    digits = "0123456789" * 120
    requests = [ask(tokenizer, json.dumps({"enum": [digits]}), max_tokens=2000) for _ in range(3)]
    async with paused(engine, *requests) as tasks:
        await send(engine, tensors(folder, 1.5), V1)
    for task in tasks:
        got = await task
        assert [run.version for run in got.versions] == [V0, V1], "the update came too late or too early"
        assert got.finish_reason == "stop" and json.loads(said(tokenizer, got)) == digits


@pytest.mark.parametrize("schema", ['{"type": "wat"}', "{", '{"$ref": "#/$defs/nowhere"}'])
async def test_a_schema_that_is_none_is_refused(
    engine: VllmEngine, tokenizer: PreTrainedTokenizerFast, schema: str
) -> None:
    with pytest.raises(EngineRejected):
        await engine.generate(ask(tokenizer, schema))
    assert (await engine.generate(ask(tokenizer, COLOUR))).finish_reason == "stop"


async def test_a_schema_that_the_vocabulary_cannot_spell_is_refused(
    peer: Peer, engine: VllmEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    if peer.kind != "embedded":
        pytest.skip("vLLM's grammars do not say")
    for schema in ({"enum": ["É"]}, {"enum": ["aÉ"]}):
        with pytest.raises(EngineRejected):
            await engine.generate(ask(tokenizer, json.dumps(schema)))
    assert (await engine.generate(ask(tokenizer, COLOUR))).finish_reason == "stop"
