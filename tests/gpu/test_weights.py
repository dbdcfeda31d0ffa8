"""The way of weights on a CUDA device: buckets that never come to the host, and engines that read device memory."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from rl_async.configs.schema.trainer import TrainerConfig, WeightSyncConfig
from rl_async.messages import Version
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors, collate
from rl_async.weight_sync.buckets import SUMS, Bucket, checksum, checksum_like, deltas, numbered, unpack
from rl_async.weight_sync.layout import TensorSpec, fsdp2, whole
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.receiver import RetainedBuckets
from rl_async.weight_sync.reshard import Gathering, PointToPoint, ShardedWeights
from rl_async.weight_sync.transports import SharedMemorySender
from tests.conftest import make_rows
from tests.support.weights import TrainerRanks, whole_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


DEVICE = "cuda:0"
BUCKET = 1 << 20
SPECS = {f"layer.{i}": TensorSpec((700, 1000), "bfloat16") for i in range(4)}

ENGINE = """
import sys
import msgspec, torch
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.receiver import WeightReceiver

def load(pieces):
    assert all(piece.data.is_cuda for piece in pieces)
    print(sum(float(piece.data.double().sum()) for piece in pieces), flush=True)

receiver = WeightReceiver(load, "cuda:0")
receiver.init(msgspec.json.decode(sys.stdin.readline(), type=InitInfo))
for line in sys.stdin:
    receiver.update(msgspec.json.decode(line, type=UpdateInfo))
receiver.close()
"""


def filled(value: float) -> list[Bucket]:
    """Buckets of weights on the device, gathered there."""
    layout = fsdp2(SPECS, 1)
    held = {
        (name, whole(spec.shape)): torch.full(spec.shape, value + i, device=DEVICE)
        for i, (name, spec) in enumerate(SPECS.items())
    }
    wire = PointToPoint(dist.HashStore(), device=DEVICE)
    return Gathering(wire, 0, BUCKET, 60.0, DEVICE).buckets(ShardedWeights(layout, held))


def test_buckets_are_filled_and_checksummed_on_the_device_as_on_the_host() -> None:
    buckets = filled(1.0)
    assert len(buckets) > 4
    for bucket in buckets:
        assert bucket.data.is_cuda and bucket.info.checksum.startswith(SUMS)
        assert checksum_like(bucket.info.checksum, bucket.data.cpu()) == bucket.info.checksum


@pytest.mark.parametrize("count", [1, 7, 8, (1 << 18) - 1, 1 << 18, (1 << 26) + 13])
def test_a_device_finds_the_checksum_that_the_host_does(count: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert checksum(data.to(DEVICE)) == checksum_like(SUMS, data)


def test_deltas_are_the_same_bytes_as_on_the_host_and_patch_there() -> None:
    old, new = (list(numbered(filled(1.0), Version(0, step), "keep")) for step in (0, 1))
    for bucket in new:
        bucket.data[:64] ^= 1
    new = [Bucket(b.data, msgspec.structs.replace(b.info, checksum=checksum(b.data))) for b in new]
    sent = list(deltas(new, old, "0.0"))
    host = list(deltas([b.offloaded() for b in new], [b.offloaded() for b in old], "0.0"))
    retained = RetainedBuckets()
    for bucket in old:
        retained.put(bucket.data, bucket.info)
    for bucket, same, right in zip(sent, host, new, strict=True):
        assert bucket.info.kind == "delta" and bucket.data.is_cuda
        assert torch.equal(bucket.data.cpu(), same.data)
        assert torch.equal(retained.put(bucket.data, bucket.info), right.data)
    kept = []
    retained.load("0.1", lambda pieces: kept.extend(piece.data for piece in pieces))
    assert all(not data.is_cuda for data in kept)


@contextmanager
def engine() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: "subprocess.Popen[str]", message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(message).decode() + "\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


@pytest.mark.parametrize("offloaded", [False, True])
def test_engines_read_buckets_from_memory_of_the_device(offloaded: bool) -> None:
    """Two engines, two versions; what is added on the device is two buckets."""
    sender = SharedMemorySender((1, 1))
    with engine() as one, engine() as other:
        for number, process in enumerate((one, other)):
            tell(process, sender.init_info(number))
        for value in (1.0, 5.0):
            buckets = [bucket.offloaded() if offloaded else bucket for bucket in filled(value)]
            before = torch.cuda.memory_allocated()
            found = [0.0, 0.0]
            for bucket in buckets:
                info = sender.stage(bucket)
                assert len(info.device_memory) == 2 and not info.shm_name
                for number, process in enumerate((one, other)):
                    tell(process, info)
                    found[number] += answer(process)
                sender.unstage()
            expected = sum(float(p.data.double().sum()) for b in buckets for p in unpack(b.data, b.info))
            assert found == [expected, expected]
            assert torch.cuda.memory_allocated() - before <= 2 * BUCKET + (1 << 20)  # rounded up by the allocator
    sender.close()


@pytest.mark.parametrize("kept", ["not", "on the device", "on the host"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_sends_its_shards_from_the_device(ranks: int, kept: str) -> None:
    """Two versions of float32, which travel in bfloat16. What is kept on the device gives its memory back."""
    sync = WeightSyncConfig(way="ipc", bucket_bytes=BUCKET, timeout_s=30)
    named = {name: torch.full(spec.shape, 1.0, device=DEVICE) for name, spec in SPECS.items()}
    with engine() as process, TrainerRanks(named, ranks, sync, fsdp2(SPECS, ranks), DEVICE) as trainer:
        weights = trainer.weights(named)
        shipment = weights.shipment(1, [None])
        tell(process, shipment.init_info(0))
        for step in range(2):
            if step:
                weights = trainer.weights({name: tensor + 1 for name, tensor in named.items()})
            for outlet in trainer.outlets if kept != "not" else ():
                outlet.keep(stays=kept == "on the device")
            weights.begin(Version(0, step), "no")
            found = 0.0
            for number in range(shipment.count):
                info = shipment.stage(number)
                for source in info.sources or [info]:
                    assert source.device_memory and source.checksum.startswith(SUMS)
                tell(process, info)
                shipment.send(number)
                found += answer(process)
            before = torch.cuda.memory_allocated()
            weights.leave()
            copy = sum(2 * tensor.numel() for tensor in named.values())
            assert before - torch.cuda.memory_allocated() >= (copy if kept == "on the device" else 0)
            weights.seal()
            assert found == (step + 1) * sum(tensor.numel() for tensor in named.values())
        shipment.close()


def test_a_killed_engine_leaves_the_sender_able_to_go_on() -> None:
    sender = SharedMemorySender()
    (first, *_) = filled(1.0)
    with engine() as killed:
        tell(killed, InitInfo(backend="ipc"))
        tell(killed, sender.stage(first))
        answer(killed)
    sender.unstage()
    with engine() as another:
        tell(another, InitInfo(backend="ipc"))
        tell(another, sender.stage(first))
        assert answer(another) == sum(float(p.data.double().sum()) for p in unpack(first.data, first.info))
    sender.close()


# What FSDP2's options do to the memory of a CUDA device, and that they change no gradient there.


def make(folder: Path, **options: bool) -> Fsdp2Backend:
    return Fsdp2Backend(str(folder), "float32", "cuda:0", TrainerConfig(learning_rate=1e-3, minibatches=1, **options))


def batch() -> list[Tensors]:
    return [collate(make_rows(0)[:8], device="cuda:0")]


def likelihood(batches: list[Tensors], number: int, outputs: Outputs) -> torch.Tensor:
    assert outputs.logprobs is not None
    return -torch.where(batches[number].mask, outputs.logprobs, 0.0).mean()


def train(backend: Fsdp2Backend) -> dict[str, torch.Tensor]:
    """Two steps; the weights after them, on the host."""
    for _ in range(2):
        batches = batch()
        backend.step(batches, functools.partial(likelihood, batches))
    return {name: tensor.cpu() for name, tensor in whole_weights(backend).items()}


@pytest.mark.parametrize("option", ["activation_checkpointing", "cpu_offload"])
def test_an_option_changes_nothing_that_is_learned(model_folder: Path, option: str) -> None:
    plain, other = train(make(model_folder)), train(make(model_folder, **{option: True}))
    assert max((plain[name] - other[name]).abs().max().item() for name in plain) < 1e-4


def test_offloaded_weights_and_moments_are_in_host_memory(model_folder: Path) -> None:
    backend = make(model_folder, cpu_offload=True)
    train(backend)
    assert backend.optimizer is not None
    assert all(parameter.device.type == "cpu" for parameter in backend.model.parameters())
    states = backend.optimizer.state.values()
    assert all(tensor.device.type == "cpu" for state in states for tensor in state.values())


def test_asleep_the_device_is_empty_and_awake_it_goes_on(model_folder: Path) -> None:
    before = torch.cuda.memory_allocated()
    backend = make(model_folder)
    learned = train(backend)
    awake = torch.cuda.memory_allocated() - before
    backend.sleep()
    torch.cuda.synchronize()
    asleep = torch.cuda.memory_allocated() - before
    assert asleep < awake / 10
    assert all(parameter.to_local().is_pinned() for parameter in backend.model.parameters())
    backend.sleep()  # twice is once
    exported = {name: tensor.cpu() for name, tensor in whole_weights(backend).items()}
    assert all(exported[name].equal(tensor) for name, tensor in learned.items())
    backend.wake()
    again = train(backend)
    assert any(not again[name].equal(learned[name]) for name in learned)
