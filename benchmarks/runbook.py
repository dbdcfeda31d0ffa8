"""The first hour on a machine with GPUs: every measurement of what this project says about GPUs, one after another.

    python -m benchmarks.runbook [--only NAME ...] [--json FILE]
    python -m benchmarks.runbook --rehearse          the same items on the CPU, at tiny size or as dry runs

What a rehearsal measures means nothing.

``docs/reference/gpu.md`` says what each item measures. One that fails prints what to try, and does not keep the others
from running; the exit code is 1 if one did.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LAUNCH = ("-m", "rl_async.launcher.cli", "launch")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# Its model is hardly trained.
SMALL_RUN = (
    *("--config", "calculator", "trainer.steps=2", "data.train_batch_groups=4", "rollout.group_size=2"),
    *("data.path=MADE/train.parquet", "data.eval_path=MADE/test.parquet"),
    *("warm_start.demos_path=MADE/demos.parquet", "warm_start.out=MADE/model", "model.path=MADE/model"),
    *("warm_start.min_steps=1", "warm_start.max_steps=2", "warm_start.check_every=1", "warm_start.gate=0"),
)
REAL_RUN = ("--config", "smollm2", "rollout.engine=vllm", "trainer.steps=20")
DRY_VLLM = ("--dry-run", "--config", "calculator", "rollout.engine=vllm", "rollout.python=.venv-vllm/bin/python")
DRY_MEGATRON = ("--dry-run", "trainer.backend=megatron", "trainer.ranks=2")


class Item(NamedTuple):
    """One measurement: what to run with Python on GPUs and, tiny, on a CPU. RUNS and MADE stand for folders."""

    minutes: float  # that it may take on GPUs
    command: Sequence[str]
    rehearsal: Sequence[str]


def variant(name: str, preset: str, *overrides: str, dry: Sequence[str], options: Sequence[str] = ()) -> Item:
    """Five steps of ``preset``, which fail if engines do not sample from what was published; rehearsed by a dry run."""
    command = (*LAUNCH, "--mode", "disaggregated", *options)
    checked = (
        "trainer.steps=5",
        "weight_sync.mismatch.every=1",
        "weight_sync.mismatch.action=stop",
        "rollout.engine=vllm",
    )
    named = ("--name", f"gpu-{name}", "launcher.run_dir=RUNS")
    return Item(5, (*command, "--config", preset, *named, *checked, *overrides), (*command, *named, *dry))


ITEMS = {
    "tests": Item(10, (*PYTEST, "tests/gpu"), (*PYTEST, "tests/gpu")),
    "one device": Item(10, ("-m", "benchmarks.gpu", "--device", "gpu"), ("-m", "benchmarks.gpu", "--device", "cpu")),
    "loading": Item(
        10,
        ("-m", "benchmarks.loading", "--ranks", "8", "--layers", "36", "--hidden", "4096"),
        ("-m", "benchmarks.loading", "--ranks", "1", "--layers", "2", "--hidden", "256", "--words", "512"),
    ),
    "separate devices": Item(
        10,
        (
            *(*LAUNCH, "--mode", "disaggregated", *REAL_RUN, "--name", "gpu-separate", "launcher.run_dir=RUNS"),
            *("weight_sync.transport=nccl", "rollout.engines=4", "trainer.ranks=4"),
        ),
        (*LAUNCH, "--mode", "disaggregated", *SMALL_RUN, "--name", "gpu-separate", "launcher.run_dir=RUNS"),
    ),
    "shared devices": Item(
        10,
        (*LAUNCH, "--mode", "colocated", *REAL_RUN, "--name", "gpu-shared", "launcher.run_dir=RUNS", "trainer.ranks=8"),
        (*LAUNCH, "--mode", "colocated", *SMALL_RUN, "--name", "gpu-shared", "launcher.run_dir=RUNS"),
    ),
    "audit": Item(
        2,
        ("-m", "rl_async.launcher.cli", "audit", "RUNS/gpu-separate"),
        ("-m", "rl_async.launcher.cli", "audit", "RUNS/gpu-separate"),
    ),
    # SmolLM2 has 9 heads, 3 key-value heads and 30 layers.
    "tensor parallel": variant(
        "tensor",
        "smollm2",
        *("rollout.engines=2", "rollout.tensor_parallel=3", "trainer.ranks=2"),
        dry=(*DRY_VLLM, "rollout.tensor_parallel=2", "trainer.ranks=2"),
    ),
    "pipeline parallel": variant(
        "pipeline",
        "smollm2",
        *("rollout.engines=2", "rollout.pipeline_parallel=2", "trainer.ranks=4"),
        dry=(*DRY_VLLM, "rollout.pipeline_parallel=2", "trainer.ranks=2"),
    ),
    "megatron": variant(
        "megatron",
        "smollm2",
        *("trainer.backend=megatron", "trainer.ranks=6", "trainer.tensor_parallel=3", "rollout.engines=2"),
        dry=(*DRY_MEGATRON, "--config", "calculator", "trainer.tensor_parallel=2"),
    ),
    "experts": variant(
        "experts",
        "calculator-moe",
        *("trainer.backend=megatron", "trainer.ranks=4", "trainer.expert_parallel=4", "trainer.router_replay=always"),
        *("rollout.engines=2", "rollout.tensor_parallel=2", "rollout.expert_parallel=2"),
        *("model.dtype=bfloat16", "weight_sync.mismatch.limit=0.2"),
        dry=(*DRY_MEGATRON, "--config", "calculator-moe", "trainer.expert_parallel=2", "trainer.router_replay=always"),
    ),
    "fp8": variant(
        "fp8",
        "smollm2",
        *("rollout.quantization=fp8", "rollout.engines=4", "trainer.ranks=4"),
        dry=(*DRY_VLLM, "rollout.quantization=fp8", "model.dtype=bfloat16"),
    ),
    "int8": variant(
        "int8",
        "smollm2",
        *("rollout.quantization=int8", "rollout.engines=4", "trainer.ranks=4"),
        dry=(*DRY_VLLM, "rollout.quantization=int8", "model.dtype=bfloat16"),
    ),
    "ray": variant(
        "ray",
        "smollm2",
        *("rollout.engines=4", "trainer.ranks=4"),
        dry=("--dry-run", *SMALL_RUN, "trainer.ranks=2"),
        options=("--launcher", "ray"),
    ),
}

# What to do about an item that failed.
HINTS = {
    "tests": "The failing test names the part. Out of memory: see nvidia-smi",
    "one device": (
        "Not one layer fits: give --layers 1. A low MFU with a step_vs_matmul near it: the device is throttled or "
        "shared; far below it: rl-async profile"
    ),
    "loading": "Run with --ranks 1; if the peak stays, compare anonymous, not resident",
    "separate devices": (
        "An engine does not start: its log. A publication hangs: if weight_sync.transport=gloo works, choose the "
        "interface of the other collectives (docs/how-to/clusters.md)"
    ),
    "shared devices": (
        "Out of memory on waking: smaller rollout.max_batch_size, or trainer.cpu_offload=true; while weights are "
        "copied: weight_sync.transport=disk"
    ),
    "audit": "Keep the run's folder",
    "tensor parallel": (
        "Engines do not answer as the trainer computes: if weight_sync.transport=disk agrees, the slices are wrong"
    ),
    "pipeline parallel": (
        "Engines do not answer as the trainer computes: if weight_sync.transport=disk agrees, the slices are wrong"
    ),
    "megatron": "See logs/trainer-0.log, and try trainer.tensor_parallel=1, then trainer.backend=fsdp2",
    "experts": (
        "vLLM refuses --enable-return-routed-experts: trainer.router_replay=never. A router/agreement far below "
        "0.9: records and tokens are shifted"
    ),
    "fp8": "The GPU is older than compute capability 8.9: use int8",
    "int8": "vLLM's kernel (Selected ... for Int8Linear in the log) refuses the GPU: use fp8",
    "ray": "ray start --head first; ray status names a bundle that waits for ever",
}


def run(item: Item, folder: Path, *, rehearse: bool) -> tuple[int | None, float]:
    """The exit code, None if the time was over, and seconds."""
    folders = {"RUNS": str(folder / "runs"), "MADE": str(folder / "made")}
    given = list(item.rehearsal if rehearse else item.command)
    for name, path in folders.items():
        given = [argument.replace(name, path) for argument in given]
    print("  python", *given, flush=True)
    began = time.monotonic()
    try:
        code: int | None = subprocess.run([sys.executable, *given], timeout=60 * item.minutes, check=False).returncode
    except subprocess.TimeoutExpired:
        code = None
    return code, time.monotonic() - began


def main() -> int:
    """Return 1 if an item failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            print(f"== {name}", flush=True)
            code, seconds = run(ITEMS[name], Path(folder), rehearse=arguments.rehearse)
            found[name] = {"exit_code": code, "seconds": seconds}
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    for name, result in found.items():
        state = {0: "passed", None: "ended after its time"}.get(result["exit_code"], "FAILED")
        print(f"{name:20}{state} after {result['seconds']:.0f} s")
        if result["exit_code"] != 0:
            print(f"    {HINTS[name]}")
    return int(any(result["exit_code"] != 0 for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
