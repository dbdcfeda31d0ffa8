"""Engines compute by the changed config.json that ``model.override`` gives them, as the trainer does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.schema.data import OverrideConfig, RopeConfig
from rl_async.launcher.sources import overridden_folder
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, running, scaled, send, tensors
from tests.support.rounding import PlainPass

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
def peer(overridden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A real vLLM that serves it."""
    with running("vllm", overridden, tmp_path_factory.mktemp("run"), eager=True) as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_vllm_computes_by_the_changed_rotary_embedding(
    connect: Connect, overridden: Path, model_folder: Path, tmp_path: Path
) -> None:
    engine = connect()
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
