"""The same code on a CUDA device: trainer log-probabilities, a step, the engine's sampling, the weights' way across."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes.ranks import run_ranks
from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence, capture_for
from rl_async.trainer import attention
from rl_async.trainer.actor_critic import build_models
from rl_async.trainer.algorithms.algorithm import build
from rl_async.trainer.attention import merged, merged_by_kernel, packed_attention
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.batches import Batch, plan_batch
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate, row_calls, tree_calls
from rl_async.trainer.update import update
from rl_async.weight_sync.buckets import unpack
from rl_async.weight_sync.process_groups import NcclSender
from tests.conftest import VOCAB, make_rows
from tests.support.batches import shared_rows
from tests.support.weights import make_buckets, whole_weights

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("critic", [None, CriticConfig(), CriticConfig(shared=True)], ids=["none", "own", "shared"])
def test_training_step_and_export_on_cuda(model_folder: Path, critic: CriticConfig | None) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = RunConfig(
            model=ModelConfig(path=str(model_folder), dtype="float32", device="gpu"),
            data=DataConfig(path="none"),
            algorithm=AlgorithmConfig(advantage="gae" if critic else "grpo"),
            critic=critic,
            trainer=TrainerConfig(learning_rate=1e-3),
        )
        models = build_models(config, "cuda:0")
        rows = make_rows(0)
        headers = [row.header() for row in rows]
        batch = Batch(0, headers, plan_batch(headers, 0, config, 1, RowCost()), {row.key: row for row in rows})
        metrics = update(models, batch, build(config), config).metrics
        assert metrics["loss/grad_norm"] > 0
        assert (critic is None) == ("critic/loss" not in metrics)
        models.sleep()
        models.wake()
        exported = whole_weights(models.policy)
        for bucket in make_buckets(iter(exported.items()), 1 << 16):
            for piece in unpack(bucket.data, bucket.info):
                sent = exported[piece.name].cpu().view(-1)[piece.start : piece.start + piece.data.numel()]
                assert torch.equal(piece.data, sent)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("decode", ["eager", "static"])
def test_the_engine_agrees_with_a_plain_forward_pass_on_cuda(
    model_folder: Path,
    decode: str,
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval().to("cuda")
    core = EngineCore(model, max_batch=8, max_length=64, capture=capture_for(decode, torch.device("cuda")))
    for _ in range(2):
        todo = [
            Sequence(str(i), list(range(3, 8 + i)), Sampling(), 20, frozenset(), None, lambda _: None)
            for i in range(20)
        ]
        for sequence in todo:
            core.add(sequence)
        while core.waiting or core.running:
            core.step()
        for sequence in todo:
            with torch.no_grad():
                logits = model(torch.tensor([sequence.tokens], device="cuda")).logits[0].float()
            start = sequence.prompt_length
            expected = logits.log_softmax(-1).cpu()[range(start - 1, len(sequence.tokens) - 1), sequence.sampled]
            assert (expected - torch.tensor(sequence.logprobs)).abs().max() < 1e-3  # tf32 and other kernels
        # Graphs read the weights in place.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        core.weights_changed()


# Liger's kernels, FlashAttention and shared rows compute on GPUs what plain operations do there, up to rounding.


NO_GPU = None if torch.cuda.is_available() else "no CUDA device on this machine"


def logprobs(folder: Path, dtype: str, config: TrainerConfig) -> tuple[Tensor, float]:
    """Of the sampled tokens, before a step that makes them likelier, and the norm of its gradient."""
    batch = collate(make_rows(0)[:8], device="cuda:0")
    backend = Fsdp2Backend(str(folder), dtype, "cuda:0", config)
    found = backend.forward(batch).logprobs
    assert found is not None

    def loss_fn(_: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batch.mask, outputs.logprobs, 0.0).mean()

    _, norm = backend.step([batch], loss_fn)
    return found[batch.mask].float(), norm


@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None,
    reason=NO_GPU or "Liger is not here; install it with pip install 'rl-async[liger]'",
)
def test_ligers_kernels_compute_the_same(model_folder: Path, one_rank: None) -> None:
    expected, norm = logprobs(model_folder, "float32", TrainerConfig())  # first: Liger stays for the whole process
    found, other = logprobs(model_folder, "float32", TrainerConfig(kernels="liger"))
    assert (found - expected).abs().max() < 1e-3
    assert other == pytest.approx(norm, rel=1e-2)


@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_one_call_for_a_packed_row_computes_what_one_for_each_sequence_does(
    heads: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, generator = ((40, 2), (7, 1), (1, 3)), torch.Generator("cuda").manual_seed(0)
    lengths = [length for length, sequences in groups for _ in range(sequences)]
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]

    def attend(dtype: torch.dtype) -> list[Tensor]:
        query, key, value = parts = [part.to(dtype).requires_grad_() for part in given]
        out, _ = packed_attention(
            module,
            query,
            key,
            value,
            None,
            packed_row=row_calls(groups, torch.device("cuda")),
            sliding_window=window,
            scaling=0.2,
        )
        return [out, *torch.autograd.grad(out, parts, seen.to(dtype))]

    shapes = [(1, count, sum(lengths), 64) for count in (heads[0], heads[1], heads[1])]
    given = [torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for shape in shapes]
    seen = torch.randn(1, sum(lengths), heads[0], 64, device="cuda", generator=generator, dtype=torch.bfloat16)
    calls, kernel = [], attention._kernel

    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(given)
        return kernel(*given, **named)

    monkeypatch.setattr(attention, "_kernel", counted)
    by_groups = attend(torch.float32)
    assert not calls
    by_row = attend(torch.bfloat16)
    assert len(calls) == 1
    for found, expected in zip(by_row, by_groups, strict=True):
        assert (found.float() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_a_tree_of_prefixes_is_attended_to_as_on_a_cpu(heads: tuple[int, int]) -> None:
    """Outputs and gradients, with bfloat16 numbers in both, which the CPU multiplies in float32."""
    batch, draw = shared_rows(VOCAB), torch.Generator().manual_seed(0)
    assert batch.tree is not None
    shapes = [(len(batch.tree.places), count, 64) for count in (heads[0], heads[1], heads[1], heads[0])]
    *given, seen = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)

    def attended(attend: Callable[..., Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
        parts = [x.to(device, dtype).requires_grad_() for x in given]
        out = attend(*parts, tree_calls(batch.tree, torch.device(device)), 0.2)
        return [x.cpu().float() for x in (out, *torch.autograd.grad(out, parts, seen.to(out)))]

    expected = attended(merged, "cpu", torch.float32)
    for found, right in zip(attended(merged_by_kernel, "cuda:0", torch.bfloat16), expected, strict=True):
        assert (found - right).norm() < 2e-2 * right.norm()


@pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_shared_rows_are_computed_as_own_ones(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "differences.json"
    worker = [
        sys.executable,
        "-m",
        "tests.contracts.trainer.workers.ulysses",
        "cuda",
        str(model_folder.parent),
        str(out),
    ]
    run_ranks([*worker, model_folder.name], 2, timeout_s=300)
    (found,) = json.loads(out.read_text()).values()
    assert found["outputs"] < 1e-3
    assert found["gradients"] < 1e-3 * max(1.0, found["size"])


# Buckets from GPU to GPU, never on the host, between two processes, and a broadcast that ends after its deadline.
#
# The former needs two GPUs, since NCCL refuses two processes on one.


ENGINE = """
import sys
import msgspec, torch
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.receiver import WeightReceiver

torch.cuda.set_device(1)
def load(pieces):
    assert all(piece.data.device == torch.device("cuda:1") for piece in pieces)
    print(sum(float(piece.data.double().sum()) for piece in pieces), flush=True)

receiver = WeightReceiver(load, "cuda:1")
receiver.init(msgspec.json.decode(sys.stdin.readline(), type=InitInfo))
for line in sys.stdin:
    receiver.update(msgspec.json.decode(line, type=UpdateInfo))
"""


# The only member of its group: its broadcast waits for a kernel that takes some ten times the deadline.
LATE = """
import dataclasses
import time
import torch
from rl_async.errors import WeightSyncError
from rl_async.weight_sync.process_groups import NcclSender
from tests.support.weights import make_buckets

torch.cuda.set_device(0)
[bucket] = make_buckets([("w", torch.ones(1000))], 1 << 20)
bucket = dataclasses.replace(bucket, data=bucket.data.cuda())
sender = NcclSender((), "weights-0", 1.0)
sender.connect()
sender.send(bucket)
torch.cuda._sleep(20_000_000_000)
try:
    sender.send(bucket)
except WeightSyncError:
    print("late", flush=True)
sender.close()
time.sleep(4)
print("alive", flush=True)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_broadcast_after_its_deadline_is_an_error_and_the_process_lives() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["late", "alive"]), done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_buckets_cross_from_one_gpu_to_another() -> None:
    torch.cuda.set_device(0)
    sender = NcclSender((1,), "weights-0", 60)
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(sender.init_info(0)).decode() + "\n")
        process.stdin.flush()
        sender.connect()
        for bucket in make_buckets([("w", torch.arange(1000.0)), ("v", torch.ones(500, dtype=torch.bfloat16))], 2000):
            bucket = dataclasses.replace(bucket, data=bucket.data.cuda())
            process.stdin.write(msgspec.json.encode(sender.stage(bucket)).decode() + "\n")
            process.stdin.flush()
            sender.send(bucket)
        process.stdin.close()
        assert sum(map(float, process.stdout.read().split())) == 999 * 500 + 500
        assert process.wait(60) == 0
    finally:
        sender.close()
        process.kill()
        process.wait(10)
