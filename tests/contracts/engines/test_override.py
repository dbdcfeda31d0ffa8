"""Engines compute by the changed config.json that ``model.override`` gives them, as the trainer does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_async.configs.schema.data import OverrideConfig, RopeConfig
from rl_async.launcher.sources import overridden_folder
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.api import GenerateRequest
from tests.contracts.engines.conftest import Connect
from tests.contracts.engines.engine_peers import Peer, running
from tests.contracts.engines.engine_weights import scaled, send, tensors
from tests.support.rounding import PlainPass

V0 = Version(0, 0)
PROMPT = [(7 * i + 3) % 60 for i in range(24)]
OVERRIDES = {
    "linear": OverrideConfig(rope=RopeConfig(rope_type="linear", factor=16.0)),
    "theta": OverrideConfig(rope=RopeConfig(rope_theta=50.0)),
}


@pytest.fixture(params=OVERRIDES)
def overridden(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Path:
    """The folder that trainer and engines get."""
    return overridden_folder(model_folder, OVERRIDES[request.param], tmp_path / "cache")


@pytest.fixture
def peer(overridden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A real vLLM that serves it."""
    with running("vllm", overridden, tmp_path_factory.mktemp("run"), eager=True) as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_vllm_computes_by_the_changed_rotary_embedding(
    connect: Connect, overridden: Path, model_folder: Path
) -> None:
    engine = connect()
    await send(engine, tensors(overridden), V0)
    request = GenerateRequest(
        request_id="0", token_ids=PROMPT, max_tokens=16, sampling=Sampling(), stop_token_ids=[], min_version=V0
    )
    result = await engine.generate(request, session="s")
    row = [*PROMPT, *result.token_ids]
    changed, plain = PlainPass(scaled(overridden)), PlainPass(scaled(model_folder))
    assert changed.errors(row, result.logprobs).max() <= 1
    assert plain.errors(row, result.logprobs).max() > 1, "the model's own embedding is told apart"
