"""The trainer's comparison of log-probabilities with a real engine that was given the right or the wrong weights."""

import asyncio
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_async.configs.schema.trainer import MismatchConfig
from rl_async.errors import EngineLost, WeightSyncError
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.trainer.backend import Backend, Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors
from rl_async.trainer.publishing import Canaries, WatchedPublisher
from rl_async.trainer.rank import CANARY_TOKENS
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.transports import SharedMemorySender
from tests.conftest import VOCAB
from tests.contracts.engines.engine_peers import Peer, running
from tests.support.rounding import pass_rounding, unit_roundoff
from tests.support.weights import make_buckets, whole_weights

# Log-probabilities at temperature 0.7 of a fresh model are about log(VOCAB) / 0.7; sums are over its MLP or vocabulary.
ROUNDED = pass_rounding(2 * math.log(VOCAB) / 0.7, layers=2, terms=VOCAB)


@pytest.fixture(scope="module")
def peer(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    with running("embedded", model_folder, tmp_path_factory.mktemp("run")) as started:
        yield started


@pytest.fixture(scope="module")
def policy(model_folder: Path) -> Iterator[Backend]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Fsdp2Backend(str(model_folder), "float32", "cpu", None)
    dist.destroy_process_group()


class Publisher:
    """Sends what the backend exports, its matrices scaled by the next of ``scales``: 1 is what it should be."""

    def __init__(self, peer: Peer, scales: list[float]) -> None:
        self.peer, self.scales = peer, scales
        self.published: list[Version] = []
        self.trains = False

    def before_train(self) -> None:
        self.trains = True

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        self.published.append(version)
        self.trains = False
        scale = self.scales.pop(0)
        weights = [
            (name, tensor * scale if tensor.dim() == 2 else tensor) for name, tensor in whole_weights(backend).items()
        ]
        asyncio.run(self._send(weights, version))
        return {"sync/total_s": 0.1}

    async def _send(self, weights: list[tuple[str, torch.Tensor]], version: Version) -> None:
        client, sender = self.peer.client(), SharedMemorySender()
        try:
            await client.pause("keep")
            await client.init_transfer(InitInfo(backend="ipc"))
            await client.start_update()
            for bucket in make_buckets(weights, 1 << 16):
                await client.update(sender.stage(bucket))
            await client.finish_update(version)
            await client.resume()
        finally:
            sender.close()
            await client.close()


def watched(peer: Peer, scales: list[float], config: MismatchConfig) -> tuple[WatchedPublisher, Publisher]:
    publisher = Publisher(peer, scales)

    def directory() -> EngineList:
        current = publisher.published[-1]
        records = [
            EngineRecord(engine_id="engine-0", url=peer.url, kind="embedded", version=current),
            EngineRecord(engine_id="late", url="http://127.0.0.1:9", kind="embedded", version=None),
            EngineRecord(engine_id="dead", url="http://127.0.0.1:9", kind="embedded", version=current),
        ]
        return EngineList(revision=1, engines=records, published=current)

    def connect(record: EngineRecord) -> VllmEngine:
        return VllmEngine(record.url, token=peer.token)

    canaries = Canaries(directory, connect, vocabulary=VOCAB, tokens=CANARY_TOKENS, temperature=0.7, timeout_s=10.0)
    return WatchedPublisher(publisher, canaries, config, 0.7), publisher


def test_an_image_token_is_never_in_the_prompt() -> None:
    current = Version(0, 1)
    record = EngineRecord(engine_id="engine-0", url="none", kind="embedded", version=current)
    engines = EngineList(revision=1, engines=[record], published=current)
    asked: list[list[int]] = []

    class Engine:
        async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
            asked.append(request.token_ids)
            raise EngineLost("gone")

        async def close(self) -> None: ...

    def prompt(image_token: int | None) -> list[int]:
        canaries = Canaries(
            lambda: engines,
            lambda record: Engine(),  # type: ignore[arg-type, return-value]
            vocabulary=VOCAB,
            tokens=CANARY_TOKENS,
            temperature=0.7,
            timeout_s=10.0,
            image_token=image_token,
        )
        canaries.send(current)
        assert canaries.collect() == []
        return asked.pop()

    plain = prompt(None)
    assert plain[3] in plain and plain[3] != 0
    assert prompt(plain[3]) == [0 if token == plain[3] else token for token in plain]


class Sleeper:
    """A backend whose weights can compute only between ``before_train`` and the next publication."""

    def __init__(self, backend: Backend, publisher: Publisher) -> None:
        self.device, self.sharded_weights = backend.device, backend.sharded_weights
        self._backend, self._publisher = backend, publisher

    def forward(self, batch: Tensors) -> Outputs:
        assert self._publisher.trains, "asleep"
        return self._backend.forward(batch)


def test_the_trainer_compares_when_it_has_its_device_and_has_it_after_sending_again(
    peer: Peer, policy: Backend
) -> None:
    watch, publisher = watched(peer, [4.0, 1.0], MismatchConfig(action="resync"))
    watch.publish(Version(0, 1), Sleeper(policy, publisher))  # type: ignore[arg-type]
    watch.before_train()
    assert len(publisher.published) == 2
    assert publisher.trains


def test_an_engine_that_took_the_weights_agrees(peer: Peer, policy: Backend) -> None:
    watch, _ = watched(peer, [1.0, 1.0, 1.0], MismatchConfig(action="stop", limit=ROUNDED, every=2))
    assert watch.publish(Version(0, 1), policy) == {"sync/total_s": 0.1}
    watch.before_train()
    found = watch.publish(Version(0, 2), policy)
    assert (found["mismatch/engines"], found["mismatch/silent"]) == (1.0, 1.0)  # one of them is dead
    assert 0 < found["mismatch/worst_engine_mean"] == found["mismatch/mean"] <= found["mismatch/max"] <= ROUNDED
    # exp(d) - 1 - d of differences d up to that, and its own rounding.
    assert abs(found["mismatch/kl"]) <= ROUNDED**2 + 2 * unit_roundoff(torch.float32)
    watch.before_train()  # only every second publication is compared
    assert watch.publish(Version(0, 3), policy) == {"sync/total_s": 0.1}


def test_one_that_samples_from_other_weights_ends_the_run(peer: Peer, policy: Backend) -> None:
    watch, publisher = watched(peer, [4.0], MismatchConfig(action="stop"))
    watch.publish(Version(0, 1), policy)
    with pytest.raises(WeightSyncError, match=r"version 0\.1.* engine-0 .*weight_sync\.mismatch\.limit = 0\.05"):
        watch.before_train()
    assert len(publisher.published) == 1


def test_a_warning_leaves_the_run_alone(peer: Peer, policy: Backend, caplog: pytest.LogCaptureFixture) -> None:
    watch, publisher = watched(peer, [4.0, 1.0], MismatchConfig(action="warn"))
    watch.publish(Version(0, 1), policy)
    with caplog.at_level(logging.WARNING):
        watch.before_train()
    assert "engine-0" in caplog.text
    assert len(publisher.published) == 1
    assert watch.publish(Version(0, 2), policy)["mismatch/mean"] > 0.05


def test_the_weights_are_sent_again_once(peer: Peer, policy: Backend) -> None:
    watch, publisher = watched(peer, [4.0, 1.0, 1.0, 4.0, 4.0, 4.0], MismatchConfig(action="resync", every=3))
    watch.publish(Version(0, 1), policy)
    watch.before_train()  # sent again
    assert publisher.published == [Version(0, 1)] * 2
    assert watch.publish(Version(0, 2), policy)["mismatch/mean"] > 0.05
    watch.before_train()  # compared out of turn: now it is well
    assert watch.publish(Version(0, 3), policy)["mismatch/mean"] <= ROUNDED
    watch.before_train()
    watch.publish(Version(0, 4), policy)
    watch.before_train()  # wrong again, sent again
    assert len(publisher.published) == 6
    publisher.scales = [4.0]
    watch.publish(Version(0, 5), policy)
    with pytest.raises(WeightSyncError, match=r"again.* engine-0|engine-0.* again"):
        watch.before_train()
