"""Engines with weights in 8 bits, over HTTP: every update quantises as a fresh load does, to the same bits."""

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm.client import VllmEngine
from tests.conftest import save_tokenizer
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, deliver, differences, publish, running, scaled, send

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)
BUCKET = 1 << 11  # bytes


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers matter: those of a fresh one hardly change what they get."""
    folder = tmp_path_factory.mktemp("peaked")
    scaled(model_folder, 6.0).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.fixture(
    scope="module",
    params=[
        ("embedded", "int8", "float32", 1),
        ("embedded", "fp8", "bfloat16", 1),
        *(
            pytest.param(("vllm", numbers, "bfloat16", ranks), marks=[tried, pytest.mark.timeout(600)])
            for numbers, ranks, tried in (
                ("int8", 2, pytest.mark.nightly),
                ("fp8", 1, pytest.mark.nightly),
                ("fp8", 2, pytest.mark.slow),
            )
        ),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def peer(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A running engine of each kind."""
    kind, quantization, dtype, ranks = request.param
    run, divided = tmp_path_factory.mktemp("run"), {"tensor_parallel": ranks} if ranks > 1 else {}
    with running(kind, folder, run, eager=True, ranks=divided, quantization=quantization, dtype=dtype) as started:
        yield started


def ask(i: int, version: Version) -> GenerateRequest:
    return GenerateRequest(
        request_id=secrets.token_hex(4),
        token_ids=[(7 * k + i) % 60 for k in range(4 + i)],
        max_tokens=12,
        sampling=Sampling(temperature=0.0),
        stop_token_ids=[],
        min_version=version,
    )


async def answers(client: VllmEngine, version: Version) -> list[GenerateResult]:
    """Greedy answers to the same prompts, one after another, so that their batches are the same, too."""
    return [await client.generate(ask(i, version)) for i in range(4)]


def error(model: torch.nn.Module, i: int, got: GenerateResult) -> float:
    """Mean difference of an answer's log-probabilities from the model's own."""
    return differences(model, msgspec.structs.replace(ask(i, V0), sampling=Sampling()), got).mean().item()


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model some steps later."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * (weight.std() if weight.dim() > 1 else 0.2) * torch.randn_like(weight))
    return model


async def test_an_update_quantises_as_a_fresh_load_does(
    peer: Peer, connect: Connect, folder: Path, tmp_path: Path
) -> None:
    dtype = getattr(torch, peer.dtype)

    async def update(model: torch.nn.Module, version: Version) -> None:
        """To each of several workers what it needs, from two trainer ranks."""
        named = {name: weight.detach().to(dtype) for name, weight in model.named_parameters()}
        if peer.ranks:
            await asyncio.to_thread(publish, peer, named, version, 2, "nearest", tmp_path)
        else:
            await send(client, list(named.items()), version, BUCKET)

    client, later = connect(), moved(scaled(folder))
    await client.pause("keep")
    await deliver(client, [], V0)  # what it has loaded from its folder is now a version
    await client.resume()
    fresh, first = await client.checksums(), await answers(client, V0)
    await update(later, V1)
    sums, second = await client.checksums(), await answers(client, V1)
    assert {name for name in fresh if sums[name] == fresh[name]} == set()
    for i, got in enumerate(second):
        sent, old = (error(model, i, got) for model in (later, scaled(folder)))
        assert 1e-4 < sent < old / 5, "not the weights that were sent, rounded"
    await update(scaled(folder), V2)
    again = await answers(client, V2)
    assert await client.checksums() == fresh
    assert [got.token_ids for got in again] == [got.token_ids for got in first]
    assert [got.logprobs for got in again] == [got.logprobs for got in first], "not bit by bit"
