"""Engines that load adapters beside the weights of their model's folder: the embedded engine and real vLLM."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_async.configs.schema.data import OverrideConfig, RopeConfig
from rl_async.configs.schema.trainer import LoraConfig
from rl_async.errors import EngineError
from rl_async.launcher.sources import overridden_folder
from rl_async.messages import Sampling, Version
from rl_async.model_files import weights_name
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.buckets import Bucket, as_adapters, numbered
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, deliver, differences, paused, running, scaled, send, tensors
from tests.support.rounding import PlainPass
from tests.support.weights import adapters, make_buckets, merged

# vLLM takes minutes to start on a busy machine.

RANK = 4
# For vLLM k_proj is a part of a fused layer.
LAYERS = ("k_proj", "o_proj", "down_proj")
# What engines may differ from merged weights by, in float32.
BOUND = 1e-4


@pytest.fixture(scope="module", params=["embedded", pytest.param("vllm", marks=pytest.mark.slow)])
def peer(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    """A running engine of each kind that loads adapters."""
    folder, lora = tmp_path_factory.mktemp("run"), LoraConfig(rank=RANK)
    with running(request.param, model_folder, folder, eager=True, lora=lora) as started:
        yield started


@pytest.fixture
def engine(connect: Connect) -> VllmEngine:
    return connect()


def ask(max_tokens: int = 32) -> GenerateRequest:
    ids = [(7 * i + 3) % 60 for i in range(20)]
    return GenerateRequest(request_id="r", token_ids=ids, max_tokens=max_tokens, sampling=Sampling(), stop_token_ids=[])


def published(folder: Path, step: int, scale: float, layers: tuple[str, ...] = LAYERS) -> tuple[list[Bucket], object]:
    """Buckets with random adapters, and the model with them merged."""
    weights, model = tensors(folder), scaled(folder)
    named = adapters(weights, layers, seed=step, rank=RANK)
    model.load_state_dict(dict(merged(weights, named, scale)), strict=False)
    sent = as_adapters(make_buckets(named.items(), 1 << 12), scale, weights_name(folder))
    return list(numbered(sent, Version(0, step), "no")), model


async def update(engine: VllmEngine, buckets: list[Bucket], version: Version) -> None:
    await engine.pause("keep")
    await deliver(engine, buckets, version)
    await engine.resume()


@pytest.mark.timeout(600)
async def test_loaded_adapters_compute_what_merged_ones_do(engine: VllmEngine, model_folder: Path) -> None:
    base, whole, apart = scaled(model_folder), sum(tensor.nbytes for _, tensor in tensors(model_folder)), []
    for step, scale in ((1, 1.7), (2, 0.4)):
        buckets, model = published(model_folder, step, scale)
        await update(engine, buckets, Version(0, step))
        got = await engine.generate(ask())
        assert [run.version for run in got.versions] == [Version(0, step)]
        apart.append(differences(model, ask(), got).max().item())
        assert differences(base, ask(), got).max() > 100 * BOUND, "adapters count nothing"
        assert sum(bucket.nbytes for bucket in buckets) < whole / 4
    assert max(apart) <= BOUND, apart


@pytest.mark.timeout(600)
async def test_requests_in_flight_go_on_with_new_adapters(engine: VllmEngine, model_folder: Path) -> None:
    (before, old), (after, new) = published(model_folder, 3, 1.0), published(model_folder, 4, 1.0)
    await update(engine, before, Version(0, 3))
    request = ask(700)
    async with paused(engine, request) as (task,):
        await deliver(engine, after, Version(0, 4))
        await engine.resume()
    got = await task
    assert [run.version for run in got.versions] == [Version(0, 3), Version(0, 4)]
    boundary = got.versions[1].start
    assert differences(old, request, got)[:boundary].max() <= BOUND
    assert differences(new, request, got)[boundary:].max() <= BOUND
    assert differences(old, request, got)[boundary:].max() > 100 * BOUND


@pytest.mark.timeout(600)
async def test_what_does_not_fit_is_refused_by_name_and_a_later_update_is_taken(
    engine: VllmEngine, model_folder: Path
) -> None:
    buckets, model = published(model_folder, 5, 1.0)
    wrong = {
        "files-other": as_adapters(buckets, 1.0, "files-other"),
        "takes no other weights": list(make_buckets(tensors(model_folder), 1 << 14)),
        "no_such_proj": published_for_nothing(model_folder),
    }
    await engine.pause("keep")
    for named, refused in wrong.items():
        with pytest.raises(EngineError, match=named):
            await deliver(engine, refused, Version(0, 5))
    await deliver(engine, buckets, Version(0, 5))
    await engine.resume()
    assert differences(model, ask(), await engine.generate(ask())).max() <= BOUND


def published_for_nothing(folder: Path) -> list[Bucket]:
    """Adapters of a layer that the model does not have."""
    layer = "model.layers.0.self_attn.no_such_proj"
    pair = [(f"{layer}.lora_A.weight", torch.ones(RANK, 8)), (f"{layer}.lora_B.weight", torch.ones(8, RANK))]
    return list(numbered(as_adapters(make_buckets(pair, 1 << 12), 1.0, weights_name(folder)), Version(0, 5), "no"))


# Engines compute by the changed config.json that ``model.override`` gives them, as the trainer does.


V0 = Version(0, 0)
PROMPT = [(7 * i + 3) % 60 for i in range(24)]
LINEAR, BASE = {"rope_type": "linear", "factor": 16.0}, {"rope_theta": 50.0}


def changed(folder: Path, cache: Path, rope: dict[str, Any]) -> Path:
    """The folder that trainer and engines get."""
    return overridden_folder(folder, OverrideConfig(rope=RopeConfig(**rope)), cache)


@pytest.fixture
def overridden(model_folder: Path, tmp_path: Path) -> Path:
    """A folder with two changes: one vLLM is enough for both."""
    return changed(model_folder, tmp_path / "cache", LINEAR | BASE)


@pytest.fixture
def overridden_peer(overridden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """Run a real vLLM that serves the overridden folder."""
    with running("vllm", overridden, tmp_path_factory.mktemp("run"), eager=True) as started:
        yield started


@pytest.fixture
async def overridden_engine(overridden_peer: Peer) -> AsyncIterator[VllmEngine]:
    """Connect to that vLLM."""
    engine = overridden_peer.client()
    yield engine
    await engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_vllm_computes_by_the_changed_rotary_embedding(
    overridden_engine: VllmEngine, overridden: Path, model_folder: Path, tmp_path: Path
) -> None:
    engine = overridden_engine
    await send(engine, tensors(overridden), V0)
    request = GenerateRequest(
        request_id="0", token_ids=PROMPT, max_tokens=16, sampling=Sampling(), stop_token_ids=[], min_version=V0
    )
    result = await engine.generate(request, session="s")
    row = [*PROMPT, *result.token_ids]
    assert PlainPass(scaled(overridden)).errors(row, result.logprobs).max() <= 1
    others = [model_folder, *(changed(model_folder, tmp_path / "cache", rope) for rope in (LINEAR, BASE))]
    for other in others:
        assert PlainPass(scaled(other)).errors(row, result.logprobs).max() > 1, "each change is told apart"
