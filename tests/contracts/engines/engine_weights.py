"""Weights of the engine contract: read from a model folder, sent to engines, and applied here for comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.messages import EngineRecord, Version
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.coordinator import WeightCoordinator
from rl_async.weight_sync.protocol import InitInfo, TransportName
from rl_async.weight_sync.transports.ipc import SharedMemorySender
from tests.contracts.engines.engine_peers import Peer
from tests.contracts.weights.test_transport import Directory
from tests.support.rounding import PlainPass
from tests.support.weights import TrainerRanks, make_buckets

BUCKET_BYTES = 1 << 12


def scaled(folder: Path, scale: float = 1.0) -> Any:
    """The folder's model with its matrices scaled, float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() == 2 else 1.0)
    return model


def tensors(folder: Path, scale: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    """The parameters of ``scaled``."""
    return [(name, parameter.detach()) for name, parameter in scaled(folder, scale).named_parameters()]


async def send(
    client: VllmEngine, weights: list[tuple[str, torch.Tensor]], version: Version, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """A full update over shared memory, with requests in flight kept."""
    buckets: list[Bucket] = list(make_buckets(weights, bucket_bytes))  # what vLLM fuses comes in several of them
    assert any(bucket.info.starts for bucket in buckets), "no parameter was cut"
    await client.pause("keep")
    await deliver(client, buckets, version)
    await client.resume()


async def deliver(client: VllmEngine, buckets: Sequence[Bucket], version: Version) -> None:
    """Buckets over shared memory to a paused engine, as one update."""
    await client.init_transfer(InitInfo(backend="ipc"))
    await client.start_update()
    sender = SharedMemorySender()
    try:
        for bucket in buckets:
            await client.update(sender.stage(bucket))
            sender.unstage()
    finally:
        sender.close()
    await client.finish_update(version)


def publish(
    peer: Peer, named: Mapping[str, torch.Tensor], version: Version, ranks: int, transport: TransportName, folder: Path
) -> int:
    """One publication by the trainer's coordinator, from the shards of so many ranks; the bytes that it sent."""
    directory = Directory()
    directory.add(EngineRecord(engine_id="e", url=peer.url, kind=peer.kind))
    sync = WeightSyncConfig(
        transport=transport, folder=str(folder / "weights"), timeout_s=100, bucket_bytes=BUCKET_BYTES
    )
    with (
        TrainerRanks(named, ranks, sync) as trainer,
        WeightCoordinator(directory.open, lambda _: peer.client(), sync) as coordinator,
    ):
        report = coordinator.publish(version, trainer.weights(named))
    assert report.failures == []
    return report.nbytes


def log_probabilities(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log-softmax [T, V] of a plain forward pass over the whole sequence."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)


def differences(model: Any, request: GenerateRequest, got: GenerateResult) -> torch.Tensor:
    """|engine - plain forward pass| per sampled token, under the request's temperature."""
    ids, start = request.token_ids + got.token_ids, len(request.token_ids)
    expected = log_probabilities(model, ids, request.sampling.temperature)[range(start - 1, len(ids) - 1), ids[start:]]
    return (expected - torch.tensor(got.logprobs)).abs()


def errors(model: Any, request: GenerateRequest, got: GenerateResult) -> torch.Tensor:
    """Errors of an engine's log-probabilities against float64, as multiples of what rounding explains."""
    plain = model if isinstance(model, PlainPass) else PlainPass(model)
    ids = request.token_ids + got.token_ids
    return plain.errors(ids, got.logprobs, request.sampling.temperature or 1.0)
