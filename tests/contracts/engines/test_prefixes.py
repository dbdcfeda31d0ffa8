"""The embedded engine computes a known prefix once, says so, and forgets it with the weights."""

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from rl_async.messages import Sampling, Version
from rl_async.process.http_auth import bearer
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, metric, running
from tests.contracts.engines.engine_weights import errors, scaled, send, tensors

HITS = "vllm:prefix_cache_hits_total"


@pytest.fixture
def peer(model_folder: Path, tmp_path: Path) -> Iterator[Peer]:
    """A running embedded engine."""
    with running("embedded", model_folder, tmp_path, model_length=256) as started:
        yield started


async def test_a_second_turn_reuses_the_first_until_an_update(peer: Peer, connect: Connect, model_folder: Path) -> None:
    client = connect()
    turns: list[tuple[GenerateRequest, GenerateResult, float]] = []
    tokens, hits = [(7 * i + 3) % 60 for i in range(60)], 0.0
    for number, scale in enumerate((1.0, 1.0, 1.5, 1.5)):
        version = Version(0, number // 2)
        if number % 2 == 0:
            await send(client, tensors(model_folder, scale), version)
        request = GenerateRequest(
            request_id=f"turn-{number}", token_ids=tokens, sampling=Sampling(), max_tokens=20, stop_token_ids=[]
        )
        got = await client.generate(request)
        reused = await metric(peer, HITS) - hits
        hits += reused
        turns.append((request, got, reused))
        assert got.versions[0].version == version
        assert errors(scaled(model_folder, scale), request, got).max() <= 1
        tokens = [*tokens, *got.token_ids, 5, 6, 7]
    assert [reused for _, _, reused in turns] == [0, 64, 0, 112]
    async with aiohttp.ClientSession(headers=bearer(peer.token)) as session:
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": 2}}
        async with session.post(f"{peer.url}/inference/v1/generate", json=body) as response:
            usage = (await response.json())["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 144}
