"""What one accelerator does with the largest model that its memory takes: a step, sleep and wake, resharding.

    python -m benchmarks.gpu [--device gpu] [--part device] [--layers N] [--vocab N] [--json FILE]
    python -m benchmarks.gpu --part publication      the shape of Qwen3-8B, from this process to another by ipc
    python -m benchmarks.gpu --part decode           the embedded engine with the shape of Qwen3-0.6B and 64 rows

Random weights in the shape of Qwen3-8B's layers, as many of them as fit (bfloat16 for compute, float32 weights,
gradients and AdamW's moments). With ``--device cpu`` a tiny one, so that this file runs anywhere; its numbers mean
nothing then.

step_tokens_per_s        tokens of the rows over the seconds of a whole optimizer step, the median of some
mfu                      3 x the operations of a forward pass (trainer/batch_layout.py) over seconds and the data
                         sheet's dense bfloat16 peak (Chowdhery et al., arXiv:2204.02311, appendix B); null for an
                         unknown device
step_vs_matmul           the same over what one large matmul in bfloat16 reaches here
sleep_s, wake_s          seconds of the trainer's second sleep and waking, with weights and optimizer
first_sleep_s            of its first sleep, which also allocates the host memory
sleep_gives_back         device memory that the trainer's sleep gives back, over what it holds awake
engine_sleep_gives_back  the same of the embedded engine's sleep at level 2
reshard_vs_device_copy   bytes per second of a reshard on one rank (all moves local, into bfloat16), over those of
                         copying each tensor with the same conversion
publication_s            seconds in which another process has verified and loaded all weights in bfloat16, with buckets
                         of an eighth of them or 1 GiB; requests go over a pipe instead of HTTP
publication_gb_per_s     their bytes over these seconds
decode_eager_tokens_per_s, decode_static_tokens_per_s
                         tokens that 64 rows get, over the seconds from their submission to the last answer
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.processes.trainer_arms import rows_of
from rl_async.accelerators import backends_of
from rl_async.configs.schema.trainer import TrainerConfig, WeightSyncConfig
from rl_async.launcher.plan.machine import device_bucket
from rl_async.launcher.plan.memory import LOGITS_CHUNK, size_of
from rl_async.messages import Sampling, Version
from rl_async.rollout_server.embedded.core import EngineCore, Sequence, capture_for
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.torch_shared import pick_device
from rl_async.trainer.actor_critic import device_name
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batch_layout import row_cost_of
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate
from rl_async.weight_sync.layout import TensorSpec, fsdp2, whole
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.receiver import Assembler, WeightReceiver
from rl_async.weight_sync.reshard import PointToPoint, ShardedWeights, plan, reshard
from rl_async.weight_sync.sender import Outlet, RankShards
from rl_async.weight_sync.transports import bucket_device

PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}  # NVIDIA's data sheets, SXM, dense bfloat16, FLOP/s
SHAPES: dict[str, dict[str, int]] = {
    "gpu": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "cpu": {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2},
}
HEAD_DIM = {"gpu": 128, "cpu": 32}
VOCAB = 32_000
ROWS, LENGTH = {"gpu": 16, "cpu": 4}, {"gpu": 2048, "cpu": 128}
STATE_BYTES = 16  # of a parameter: weight, gradient and two moments in float32
USABLE = 0.85  # of the memory; the rest is fragmentation, workspaces and the copies of one layer at a time
STEPS = 5


def shape(kind: str, layers: int, vocab: int = VOCAB) -> dict[str, Any]:
    return SHAPES[kind] | {
        "head_dim": HEAD_DIM[kind],
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": LENGTH[kind],
    }


def bytes_needed(kind: str, layers: int, vocab: int) -> int:
    """Of a step whose forward passes take one row each."""
    size = size_of(shape(kind, layers, vocab))
    assert size is not None
    logits = 16 * LOGITS_CHUNK * 4 * 2
    return size.parameters * STATE_BYTES + LENGTH[kind] * size.activations * 2 + logits


def layers_that_fit(kind: str, memory: int, vocab: int) -> int:
    """Raises SystemExit if not even one layer fits."""
    fitting = [layers for layers in range(1, 200) if bytes_needed(kind, layers, vocab) <= USABLE * memory]
    if not fitting:
        raise SystemExit(f"not one layer fits into {memory / 2**30:.0f} GiB; give --layers to try all the same")
    return fitting[-1]


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def seconds_once(device: str, action: Callable[[], object]) -> float:
    synchronize(device)
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def seconds_of(device: str, action: Callable[[], object], repeats: int = STEPS) -> float:
    """The median, after one that is not counted."""
    return statistics.median([seconds_once(device, action) for _ in range(repeats + 1)][1:])


def allocated(device: str) -> int:
    return 0 if device == "cpu" else torch.accelerator.memory_allocated()


def total_memory(torch_device: str) -> int:
    """Bytes of the first device of this type."""
    module: Any = torch.get_device_module(torch_device)
    return int(module.get_device_properties(0).total_memory)


def given_back(awake: int, asleep: int) -> float | None:
    return (awake - asleep) / awake if awake else None


def matmul_flops(device: str) -> float:
    """Operations per second of one large matmul in bfloat16."""
    n = 512 if device == "cpu" else 8192
    one, other = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / seconds_of(device, lambda: one @ other)


def measure_step(backend: Fsdp2Backend, device: str, kind: str) -> tuple[float, float]:
    """Tokens and operations per second of a whole step."""
    lengths = [LENGTH[kind]] * ROWS[kind]
    batches = [collate([row], device=device) for row in rows_of(lengths)]

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batches[number].mask, outputs.logprobs, 0.0).sum() / sum(lengths)

    seconds = seconds_of(device, lambda: backend.step(batches, loss_fn))
    cost = row_cost_of(backend.hf_config)
    return sum(lengths) / seconds, 3 * sum(cost.of(length) for length in lengths) / seconds


def measure_reshard(device: str, kind: str, store: dist.Store) -> float:
    """One rank has all; the target is another tensor of each shape, on the same device."""
    sizes = SHAPES[kind]
    named = {f"t{i}": TensorSpec((sizes["intermediate_size"], sizes["hidden_size"])) for i in range(32)}
    layout = fsdp2(named, 1)
    source = {(name, whole(spec.shape)): torch.randn(spec.shape, device=device) for name, spec in named.items()}
    target = {key: torch.empty_like(tensor, dtype=torch.bfloat16) for key, tensor in source.items()}
    made, wire = plan(layout, layout, 64 << 20), PointToPoint(store, device=device)
    ours = seconds_of(device, lambda: reshard(made, 0, source, target, wire, 60))

    def copies() -> None:
        for key, tensor in source.items():
            target[key].copy_(tensor)

    moved = sum(t.nbytes for t in target.values())
    plain = seconds_of(device, copies)
    print(f"  reshard {moved / ours / 1e9:.1f} GB/s, copies {moved / plain / 1e9:.1f} GB/s")
    return plain / ours


def measure_engine(folder: str, device: str) -> float | None:
    """Share of the device memory of weights and cache that sleep gives back."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine = EngineThread(EngineCore(model.to(device).eval(), max_batch=8, max_length=256), _crashed)
    awake = allocated(device)
    engine.sleep(2).result(60)
    share = given_back(awake, allocated(device))
    engine.wake([]).result(60)
    engine.stop()
    return share


def _crashed(error: Exception) -> None:
    raise SystemExit(f"the engine failed: {error}")


# Of the model that a publication carries: Qwen3-8B has 36 layers and an output layer of its own.
PUBLISHED_LAYERS, PUBLISHED_VOCAB = {"gpu": 36, "cpu": 2}, {"gpu": 151_936, "cpu": 512}
# Of the embedded engine: the shape of Qwen3-0.6B.
DECODED: dict[str, dict[str, int]] = {
    "gpu": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151_936},
    "cpu": SHAPES["cpu"] | {"head_dim": 32, "num_hidden_layers": 2, "vocab_size": 512},
}
DECODE_ROWS, PROMPT, ANSWER = {"gpu": 64, "cpu": 4}, {"gpu": 512, "cpu": 16}, {"gpu": 256, "cpu": 16}


def receive(device: str) -> None:
    """Be the engine of ``measure_publication``: load every bucket into tensors on ``device``, and answer each line."""
    weights: dict[str, Tensor] = {}

    def load(named: Any) -> None:
        for name, tensor in named:
            weights.setdefault(name, torch.empty_like(tensor, device=device)).copy_(tensor)

    receiver = WeightReceiver(Assembler(load), device)
    for line in sys.stdin:
        if line.startswith("join "):
            receiver.init(msgspec.json.decode(line.removeprefix("join "), type=InitInfo))
        else:
            receiver.update(msgspec.json.decode(line, type=UpdateInfo))
        print("ok", flush=True)
    receiver.close()


def measure_publication(device: str, kind: str) -> dict[str, float]:
    """Seconds, and GB/s, of whole publications to a process of its own, the median of some."""
    config = Qwen3Config(**shape(kind, PUBLISHED_LAYERS[kind], PUBLISHED_VOCAB[kind]) | {"tie_word_embeddings": False})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    specs = {name: TensorSpec(tuple(t.shape), "bfloat16") for name, t in model.named_parameters()}
    held = {(n, whole(s.shape)): torch.randn(s.shape, device=device, dtype=torch.bfloat16) for n, s in specs.items()}
    weights = ShardedWeights(fsdp2(specs, 1), held)
    nbytes = sum(tensor.nbytes for tensor in held.values())
    sync = WeightSyncConfig(way="ipc", bucket_bytes=device_bucket(nbytes))
    outlet = Outlet(0, sync, "127.0.0.1", 60.0, bucket_device("ipc", device))
    shards = RankShards(outlet, {})
    command = [sys.executable, "-m", "benchmarks.gpu", "--receive", device]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None and engine.stdout is not None
    lines, answers = engine.stdin, engine.stdout

    def tell(text: str) -> None:
        lines.write(text + "\n")
        lines.flush()

    def answered() -> None:
        if answers.readline() != "ok\n":
            raise SystemExit("the engine of the publication failed")

    offered = iter(range(1, 100))

    def publish() -> None:
        outlet.offer(weights)
        shards.begin(Version(0, next(offered)), "no")
        info = shipment.stage(0)
        for number in range(shipment.count):
            tell(msgspec.json.encode(info).decode())
            if number + 1 < shipment.count:
                info = shipment.stage(number + 1)
            answered()
        shards.seal()

    try:
        outlet.offer(weights)
        shards.begin(Version(0, 0), "no")
        shipment = shards.shipment(1, [None])
        tell("join " + msgspec.json.encode(shipment.init_info(0)).decode())
        answered()
        shards.seal()
        seconds = seconds_of(device, publish)
        lines.close()
        if engine.wait(60):
            raise SystemExit("the engine of the publication failed")
    finally:
        engine.kill()
        engine.wait(10)
        shards.close()
    return {"publication_s": seconds, "publication_gb_per_s": nbytes / seconds / 1e9}


def measure_decode(device: str, kind: str) -> dict[str, float]:
    """Return tokens per second of eager and of static steps, which a GPU captures."""
    found = {f"{decode}_tokens_per_s": decode_rate(device, kind, decode) for decode in ("eager", "static")}
    return {f"decode_{name}": rate for name, rate in found.items()}


def decode_rate(device: str, kind: str, decode: str) -> float:
    """Return the tokens per second of equally long answers to prompts without common prefixes, the median of rounds."""
    rows, prompt, answer = DECODE_ROWS[kind], PROMPT[kind], ANSWER[kind]
    config = Qwen3Config(**DECODED[kind], tie_word_embeddings=True, max_position_embeddings=prompt + answer)
    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    capture = capture_for(decode, torch.device(device))
    core = EngineCore(model.eval(), max_batch=rows, max_length=prompt + answer, capture=capture)
    engine = EngineThread(core, _crashed)
    numbers = iter(range(1 << 30))

    def answer_all() -> None:
        left, ready = [rows], torch.futures.Future[None]()

        def deliver(sequence: Sequence) -> None:
            left[0] -= 1
            if left[0] == 0:
                ready.set_result(None)

        prompts = torch.randint(config.vocab_size, (rows, prompt)).tolist()
        engine.submit(
            *(Sequence(str(next(numbers)), p, Sampling(), answer, frozenset(), None, deliver) for p in prompts)
        )
        ready.wait()

    seconds = seconds_of(device, answer_all, repeats=3)
    engine.stop()
    return rows * answer / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="One accelerator and the largest model that it takes.")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--part", choices=("device", "publication", "decode"), default="device")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--receive", metavar="DEVICE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(arguments.receive)
        return
    torch_device = pick_device(arguments.device)
    kind, device = ("cpu", "cpu") if torch_device == "cpu" else ("gpu", f"{torch_device}:0")
    results: dict[str, Any] = {"device": device_name(device)}

    if arguments.part == "device":
        measured = measure_device(device, kind, arguments.layers, arguments.vocab)
    else:
        measured = iter([{"publication": measure_publication, "decode": measure_decode}[arguments.part](device, kind)])
    # Saved as they come, in case the rest fails or the time is over.
    for part in measured:
        results |= part
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    for key, value in results.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{key}: {'not measured' if value is None else shown}")


def measure_device(device: str, kind: str, layers: int | None, vocab: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of an engine's sleep, a step, the trainer's sleep, and resharding of the largest model."""
    torch_device = device.partition(":")[0]
    memory = 1 << 30 if kind == "cpu" else total_memory(torch_device)
    layers = layers or (2 if kind == "cpu" else layers_that_fit(kind, memory, vocab))
    store = dist.HashStore()
    dist.init_process_group(backends_of(torch_device), store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3Config(**shape(kind, layers, vocab))
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        yield {"layers": layers, "vocab": vocab, "parameters": sum(p.numel() for p in model.parameters())}
        model.save_pretrained(folder)
        del model
        yield {"engine_sleep_gives_back": measure_engine(folder, device)}
        matmul = matmul_flops(device)
        backend = Fsdp2Backend(folder, "bfloat16", device, TrainerConfig())
        tokens, flops = measure_step(backend, device, kind)
        peak = next((peak for known, peak in PEAKS.items() if known in device_name(device)), None)
        yield {
            "matmul_tflops": matmul / 1e12,
            "step_tokens_per_s": tokens,
            "mfu": flops / peak if peak else None,
            "step_vs_matmul": flops / matmul,
        }
        awake = allocated(device)
        first = seconds_once(device, backend.sleep)
        asleep = allocated(device)
        backend.wake()
        yield {
            "first_sleep_s": first,
            "sleep_gives_back": given_back(awake, asleep),
            "sleep_s": seconds_once(device, backend.sleep),
            "wake_s": seconds_once(device, backend.wake),
        }
        del backend
        if kind == "gpu":
            torch.accelerator.empty_cache()
        yield {"reshard_vs_device_copy": measure_reshard(device, kind, dist.PrefixStore("reshard", store))}
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
