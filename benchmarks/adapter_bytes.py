"""What a publication costs after a step: whole weights trained, adapters merged into them, and adapters alone.

    python -m benchmarks.adapter_bytes [--repeats 3]

bfloat16 on the wire, AdamW at 1e-5, random tokens, random Qwen3s. First bytes, as shares of the weights, of 12 M
parameters: what ``weight_sync.way=delta`` sends, in buckets of 1 and of 64 MiB, and what adapters are by themselves, in
float32. Then, of 39 M parameters, what takes how long until an embedded engine in a process of its own serves the new
weights: each step is published in every way, each to its own engine, in turns. Medians.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.processes.command_line import parser
from benchmarks.processes.engine_process import StandaloneDirectory, serving
from benchmarks.processes.trainer_arms import VOCAB, rows_of
from rl_async.configs.load import load_config
from rl_async.configs.schema.trainer import LoraConfig, TrainerConfig, WeightSyncConfig
from rl_async.messages import Version
from rl_async.rollout_server.vllm.client import VllmEngine
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate
from rl_async.trainer.publishing import EnginePublisher, GatheredWeights
from rl_async.weight_sync.buckets import deltas
from rl_async.weight_sync.coordinator import Overlapped, WeightCoordinator
from rl_async.weight_sync.reshard import Gathering, PointToPoint
from tests.support.weights import make_buckets

ARMS = {
    "whole weights": None,
    "adapters, all linear layers": LoraConfig(rank=8),
    "adapters, q_proj and v_proj": LoraConfig(rank=8, targets=("q_proj", "v_proj")),
}
WAYS = {"merged": False, "merged, delta": True, "adapters alone": False}  # whether deltas are sent
STEPS, BUCKETS_MIB = 2, (1, 64)
TIMEOUT_S = 120.0


def save_model(folder: Path, width: int, layers: int) -> Path:
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    words = {"tie_word_embeddings": True, "vocab_size": 8 * VOCAB}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **words)).save_pretrained(folder)
    return folder


def make(folder: Path, lora: LoraConfig | None) -> Fsdp2Backend:
    return Fsdp2Backend(str(folder), "bfloat16", "cpu", TrainerConfig(learning_rate=1e-5, lora=lora))


def step(backend: Fsdp2Backend, rows: int) -> None:
    batch = collate(rows_of([64] * rows), device="cpu")

    def loss_fn(_: int, outputs: Outputs) -> torch.Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batch.mask, outputs.logprobs, 0.0).mean()

    backend.step([batch], loss_fn)


def shares(folder: Path, lora: LoraConfig | None) -> list[float]:
    """Of the delta of the last step for each size of bucket, and of the adapters themselves."""
    backend, versions = make(folder, lora), []
    for _ in range(STEPS):
        step(backend, 8)
        versions.append(
            [(name, rows.to(backend.dtype, copy=True)) for (name, _), rows in backend.sharded_weights().held.items()]
        )
    found, total = [], sum(tensor.nbytes for _, tensor in versions[-1])
    for size in BUCKETS_MIB:
        old, new = (list(make_buckets(version, size << 20)) for version in versions[-2:])
        found.append(sum(bucket.nbytes for bucket in deltas(new, old, "0")) / total)
    adapters = (rows.nbytes for rows in backend.sharded_weights("adapters").held.values())
    return [*found, sum(adapters) / total]


def publications(folder: Path, lora: LoraConfig, repeats: int) -> dict[str, list[float]]:
    """By way: bytes, and seconds of export, of the rest of the publication, and of the engine's pause."""
    backend, found = make(folder, lora), defaultdict(list)
    wire = PointToPoint(dist.HashStore())
    config = load_config("calculator", [f"model.path={folder}", "model.dtype=bfloat16", "rollout.max_batch_size=1"])
    with ExitStack() as stack:
        publishers = {}
        for way, delta in WAYS.items():
            at = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, token = stack.enter_context(serving("embedded", config, at, ""))
            directory = StandaloneDirectory({"engine": url})
            coordinator = stack.enter_context(
                WeightCoordinator(
                    directory.open,
                    lambda r, token=token: VllmEngine(r.url, token=token),
                    WeightSyncConfig(way=("gloo", "delta") if delta else "gloo", timeout_s=TIMEOUT_S),
                )
            )
            gathering = Gathering(wire, 0, BUCKETS_MIB[-1] << 20, TIMEOUT_S)
            source = GatheredWeights(gathering, lora if way == "adapters alone" else None)
            publishers[way] = EnginePublisher(Overlapped(coordinator), source)
        for number in range(repeats + 1):  # the first brings the base, and what deltas start from
            step(backend, 1)
            for way, publisher in publishers.items():
                began = time.perf_counter()
                metrics = publisher.publish(Version(0, number), backend)
                sync, pause = metrics["sync/total_s"], metrics["sync/pause_s"]
                row = [metrics["sync/bytes"], time.perf_counter() - began - sync, sync, pause]
                found[way] += [row] if number else []
    return {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in found.items()}


def main() -> None:
    repeats = parser(__doc__).parse_args().repeats
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name), width=256, layers=12)
        for arm, lora in ARMS.items():
            print(f"{arm:<30}", *(f"{share:.3f}" for share in shares(folder, lora)), flush=True)
        save_model(folder, width=512, layers=12)
        for arm, lora in ARMS.items():
            for way, (nbytes, export, sync, pause) in publications(folder, lora, repeats).items() if lora else ():
                times = f"export {export:.3f} s, publication {sync:.3f} s, pause {pause:.3f} s"
                print(f"{arm:<30}{way:<16}{nbytes / 1e6:>8.2f} MB  {times}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
