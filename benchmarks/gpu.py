"""What one accelerator does with the largest model that its memory takes: a step, sleep and wake, resharding.

    python -m benchmarks.gpu [--device gpu] [--layers N] [--vocab N] [--json FILE]
    python -m benchmarks.gpu --ladder [--layers 12]          steps with each option that should make them faster
    python -m benchmarks.gpu --decode                        the embedded engine with 64 rows of Qwen3-0.6B's shape

Random weights in the shape of Qwen3-8B's layers, as many of them as fit (bfloat16 for compute, float32 weights,
gradients and AdamW's moments), and of its head. With ``--device cpu`` a tiny one, so that this file runs anywhere; its
numbers mean nothing then.

step_tokens_per_s        tokens of the rows over the seconds of a whole optimizer step, the median of some
mfu                      3 x the operations of a forward pass (trainer/batch_layout.py) over seconds and the data
                         sheet's dense bfloat16 peak (Chowdhery et al., arXiv:2204.02311, appendix B); null for an
                         unknown device
step_peak_bytes          the most device memory that tensors took in a step
step_vs_matmul           the same over what one large matmul in bfloat16 reaches here
sleep_s, wake_s          seconds of the trainer's second sleep and waking, with weights and optimizer
first_sleep_s            of its first sleep, which also allocates the host memory
sleep_gives_back         device memory that the trainer's sleep gives back, over what it holds awake
engine_sleep_gives_back  the same of the embedded engine's sleep at level 2
reshard_vs_device_copy   bytes per second of a reshard on one rank (all moves local, into bfloat16), over those of
                         copying each tensor with the same conversion
decode_tokens_per_s      tokens that ``--decode`` samples, all rows together, over seconds
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.processes.trainer_arms import rows_of
from rl_async.accelerators import backends_of
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.launcher.plan.memory import LOGITS_CHUNK, size_of
from rl_async.messages import Sampling
from rl_async.rollout_server.embedded.core import EngineCore, Sequence
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.torch_shared import pick_device
from rl_async.trainer.actor_critic import device_name
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batch_layout import row_cost_of
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate
from rl_async.weight_sync.layout import TensorSpec, fsdp2, whole
from rl_async.weight_sync.reshard import PointToPoint, plan, reshard

PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}  # NVIDIA's data sheets, SXM, dense bfloat16, FLOP/s
SHAPES: dict[str, dict[str, int]] = {
    "gpu": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "cpu": {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2},
}
HEAD_DIM = {"gpu": 128, "cpu": 32}
VOCAB = {"gpu": 151_936, "cpu": 4096}
# The steps of the ladder: each with one more option, and the last also with a small head.
LADDER: dict[str, dict[str, Any]] = {
    "one row a pass": {"rows_per_pass": 1},
    "four rows a pass": {"rows_per_pass": 4},
    "compiled": {"rows_per_pass": 4, "compile": True},
    "compiled, small head": {"rows_per_pass": 4, "compile": True, "vocab_share": 5},
}
# Of Qwen3-0.6B; tokens of a prompt and of an answer.
DECODED = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
DECODED_LAYERS, DECODED_ROWS, PROMPT, ANSWER = {"gpu": 28, "cpu": 2}, {"gpu": 64, "cpu": 4}, 128, {"gpu": 256, "cpu": 8}
ROWS, LENGTH = {"gpu": 16, "cpu": 4}, {"gpu": 2048, "cpu": 128}
STATE_BYTES = 16  # of a parameter: weight, gradient and two moments in float32
USABLE = 0.85  # of the memory; the rest is fragmentation, workspaces and the copies of one layer at a time
STEPS = 5


def shape(kind: str, layers: int, vocab: int) -> dict[str, Any]:
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


def measure_step(
    backend: Fsdp2Backend, device: str, kind: str, matmul: float, rows_per_pass: int = 1
) -> dict[str, float | None]:
    """A whole step: its rates, also against those of ``matmul``, and the most memory that it took."""
    lengths = [LENGTH[kind]] * ROWS[kind]
    rows = rows_of(lengths)
    batches = [collate(rows[at : at + rows_per_pass], device=device) for at in range(0, len(rows), rows_per_pass)]

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batches[number].mask, outputs.logprobs, 0.0).sum() / sum(lengths)

    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    seconds = seconds_of(device, lambda: backend.step(batches, loss_fn))
    cost, name = row_cost_of(backend.hf_config), device_name(device)
    flops = 3 * sum(cost.of(length) for length in lengths) / seconds
    peak = next((peak for known, peak in PEAKS.items() if known in name), None)
    return {
        "step_tokens_per_s": sum(lengths) / seconds,
        "mfu": flops / peak if peak else None,
        "step_vs_matmul": flops / matmul,
        "step_peak_bytes": None if device == "cpu" else torch.accelerator.max_memory_allocated(),
    }


def save_model(folder: str, device: str, sizes: dict[str, Any]) -> int:
    """Write a model of random weights; return the number of its parameters."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure_ladder(device: str, kind: str, layers: int, vocab: int, matmul: float) -> dict[str, Any]:
    """The step with each entry of LADDER."""
    found: dict[str, Any] = {}
    for name, options in LADDER.items():
        sizes = shape(kind, layers, vocab // options.get("vocab_share", 1))
        with tempfile.TemporaryDirectory() as folder:
            save_model(folder, device, sizes)
            config = TrainerConfig(compile=options.get("compile", False))
            backend = Fsdp2Backend(folder, "bfloat16", device, config)
        found[name] = measure_step(backend, device, kind, matmul, options["rows_per_pass"])
        print(f"{name}: {found[name]}", flush=True)
        del backend
        if kind == "gpu":
            torch.accelerator.empty_cache()
    return found


def measure_decode(device: str, kind: str, vocab: int) -> float:
    """Tokens per second of the embedded engine, with as many rows as it is given from the first to the last token."""
    config = Qwen3Config(
        **DECODED,
        head_dim=128,
        num_hidden_layers=DECODED_LAYERS[kind],
        vocab_size=vocab,
        tie_word_embeddings=True,
        max_position_embeddings=2 * (PROMPT + ANSWER[kind]),
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    rows, answer = DECODED_ROWS[kind], ANSWER[kind]
    core = EngineCore(model, max_batch=rows, max_length=PROMPT + answer)
    draw = random.Random(0)

    def play() -> None:
        for number in range(rows):
            tokens = [draw.randrange(vocab) for _ in range(PROMPT)]
            core.add(Sequence(str(number), tokens, Sampling(), answer, frozenset(), None, deliver=lambda _: None))
        while core.unfinished:
            core.step()

    return rows * answer / seconds_of(device, play, repeats=2)


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


def measure_one(device: str, kind: str, layers: int, vocab: int, matmul: float, store: dist.Store) -> dict[str, Any]:
    """The step, sleep and waking, and the reshard, on one accelerator."""
    results: dict[str, Any] = {"layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        results["parameters"] = save_model(folder, device, shape(kind, layers, vocab))
        results["engine_sleep_gives_back"] = measure_engine(folder, device)
        backend = Fsdp2Backend(folder, "bfloat16", device, TrainerConfig())
        results |= measure_step(backend, device, kind, matmul)
        awake = allocated(device)
        results["first_sleep_s"] = seconds_once(device, backend.sleep)
        results["sleep_gives_back"] = given_back(awake, allocated(device))
        backend.wake()
        results["sleep_s"], results["wake_s"] = seconds_once(device, backend.sleep), seconds_once(device, backend.wake)
        del backend
        if kind == "gpu":
            torch.accelerator.empty_cache()
        results["reshard_vs_device_copy"] = measure_reshard(device, kind, dist.PrefixStore("reshard", store))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="One accelerator and the largest model that it takes.")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch_device = pick_device(arguments.device)
    kind, device = ("cpu", "cpu") if torch_device == "cpu" else ("gpu", f"{torch_device}:0")
    memory = 1 << 30 if kind == "cpu" else total_memory(torch_device)
    vocab = arguments.vocab or VOCAB[kind]
    layers = arguments.layers or (2 if kind == "cpu" else layers_that_fit(kind, memory, vocab))
    results: dict[str, Any] = {"device": device_name(device), "vocab": vocab}
    matmul = matmul_flops(device)
    results["matmul_tflops"] = matmul / 1e12
    store = dist.HashStore()
    dist.init_process_group(backends_of(torch_device), store=store, rank=0, world_size=1)
    if arguments.ladder:
        results |= {"layers": layers, "ladder": measure_ladder(device, kind, layers, vocab, matmul)}
    elif arguments.decode:
        results["decode_tokens_per_s"] = measure_decode(device, kind, vocab)
    else:
        results |= measure_one(device, kind, layers, vocab, matmul, store)
    dist.destroy_process_group()
    for key, value in results.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{key}: {'not measured' if value is None else shown}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
