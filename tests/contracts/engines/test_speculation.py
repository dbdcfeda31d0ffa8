"""vLLM that guesses tokens by n-grams and checks several at once: what it reports of them, also over an update."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import (
    Peer,
    errors,
    log_probabilities,
    metric,
    paused,
    running,
    scaled,
    send,
    tensors,
)
from tests.support.rounding import PlainPass

# vLLM takes minutes to start on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NGRAMS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
V0, V1 = Version(0, 0), Version(0, 1)
# A cool, sharp model repeats itself, so that guesses are right.
COOL = Sampling(temperature=0.4)
SHARP = 2.0


@pytest.fixture(scope="module")
def peer(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    flags = ("--speculative-config", NGRAMS)
    with running("vllm", model_folder, tmp_path_factory.mktemp("run"), eager=True, flags=flags) as started:
        yield started


def ask(number: int, max_tokens: int = 256) -> GenerateRequest:
    ids = [(5 * i + number) % 40 for i in range(8)] * 3
    return GenerateRequest(
        request_id=f"r{number}", token_ids=ids, max_tokens=max_tokens, sampling=COOL, stop_token_ids=[]
    )


def guessed(model: Any, request: GenerateRequest, got: GenerateResult) -> torch.Tensor:
    """Of each sampled token with a guess: whether it is the guess, and the guess's probability, [tokens, 2].

    The guess repeats what followed the last occurrence of the token before.
    """
    ids, start = request.token_ids + got.token_ids, len(request.token_ids)
    chance = log_probabilities(model, ids, request.sampling.temperature).exp()
    found = []
    for at in range(start, len(ids)):
        earlier = [i for i in range(1, at) if ids[i - 1] == ids[at - 1]]
        if earlier:
            found.append([float(ids[at] == ids[earlier[-1]]), chance[at - 1, ids[earlier[-1]]].item()])
    return torch.tensor(found, dtype=torch.float64)


async def test_accepted_and_refused_guesses_have_the_logprobs_of_a_plain_pass(
    connect: Connect, peer: Peer, model_folder: Path
) -> None:
    engine = connect()
    await send(engine, tensors(model_folder, SHARP), V0)
    requests = [ask(number) for number in range(12)]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    model = scaled(model_folder, SHARP)
    plain = PlainPass(model)
    worst = max(errors(plain, r, got).max().item() for r, got in zip(requests, answers, strict=True))
    accepted = await metric(peer, ACCEPTED)
    assert 0 < accepted < 12 * 256, "nothing was guessed, or everything"
    assert worst <= 1
    # A sampler that prefers guesses, or avoids them, is far off: the sum is one of independent terms of mean 0.
    came, chance = torch.cat([guessed(model, r, got) for r, got in zip(requests, answers, strict=True)]).T
    assert ((came - chance).sum() / (chance * (1 - chance)).sum().sqrt()).abs() < 5


async def test_an_update_changes_the_tokens_after_it_alone(connect: Connect, peer: Peer, model_folder: Path) -> None:
    engine = connect()
    await send(engine, tensors(model_folder, SHARP), V0)
    requests = [ask(number, 700) for number in range(4)]
    async with paused(engine, *requests) as tasks:
        await send(engine, tensors(model_folder, 1.5 * SHARP), V1)
    old, new = PlainPass(scaled(model_folder, SHARP)), PlainPass(scaled(model_folder, 1.5 * SHARP))
    for request, task in zip(requests, tasks, strict=True):
        got = await task
        assert [run.version for run in got.versions] == [V0, V1]
        boundary = got.versions[1].start
        assert errors(old, request, got)[:boundary].max() <= 1
        assert errors(new, request, got)[boundary:].max() <= 1
