"""A quarter of an hour on one GPU: every figure about one card, in one file.

    scripts/gpu_quarter [--json FILE] [--only NAME ...]        with the machine's own torch
    python -m benchmarks.quarter --rehearse                    the same items on the CPU, tiny; its figures mean nothing

``docs/reference/gpu.md`` says what each item measures. An item ends with its time, and one that fails does not keep the
others from running; the file is written after each. The exit code is 1 if one failed.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import total_memory
from benchmarks.runbook import LAUNCH, PYTEST, SMALL_RUN
from rl_async.torch_shared import pick_device
from rl_async.trainer.actor_critic import device_name

CHECKED = ("weight_sync.mismatch.every=1", "weight_sync.mismatch.action=warn", "launcher.run_dir=RUNS")
REAL_RUN = ("--config", "smollm2", "trainer.steps=8", *CHECKED)
VLLM = ("rollout.engine=vllm",)


class Item(NamedTuple):
    """Seconds, arguments for Python on a GPU, and on a CPU; FIGURES stands for a file of figures, RUNS for a folder.

    ``run`` names the run whose figures are read.
    """

    seconds: float
    command: Sequence[str]
    rehearsal: Sequence[str]
    run: str = ""


def gpu(seconds: float, *options: str, layers: str = "") -> Item:
    """An item of benchmarks/gpu.py."""
    command = ("-m", "benchmarks.gpu", *options, "--json", "FIGURES")
    more = ("--layers", layers) if layers else ()
    return Item(seconds, (*command, "--device", "gpu", *more), (*command, "--device", "cpu"))


def whole_run(name: str, mode: str, *overrides: str) -> Item:
    """Eight steps of SmolLM2, whose engines are compared with the trainer after each."""
    launch = (*LAUNCH, "--mode", mode, "--name", name)
    return Item(110, (*launch, *REAL_RUN, *overrides), (*launch, *SMALL_RUN, *CHECKED), run=name)


ITEMS = {
    "checks": Item(90, (*PYTEST, "tests/gpu"), (*PYTEST, "tests/gpu")),
    "ladder": gpu(200, "--ladder", layers="12"),
    "largest model": gpu(150),
    "decode": gpu(90, "--decode"),
    "publication": Item(
        120,
        ("-m", "benchmarks.gpu_publication", "--device", "gpu", "--json", "FIGURES"),
        ("-m", "benchmarks.gpu_publication", "--device", "cpu", "--buckets", "1", "4", "--json", "FIGURES"),
    ),
    "colocated": whole_run("quarter-colocated", "colocated"),
    "disaggregated": whole_run("quarter-disaggregated", "disaggregated"),
    "exactly once": Item(20, *[(*LAUNCH[:-1], "audit", "RUNS/quarter-disaggregated")] * 2),
}
# Where vLLM can be imported; an item of the rehearsal is the launch's plan.
VLLM_ITEMS = {
    f"vllm {mode}": Item(180, whole_run(f"quarter-vllm-{mode}", mode, *VLLM).command, (), run=f"quarter-vllm-{mode}")
    for mode in ("disaggregated", "colocated")
}


def figures_of(run: Path) -> dict[str, float]:
    """Medians over the steps of a run but for the first two, and the largest mismatch."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for key in ("time/step_s", "time/update_s", "time/sync_s", "time/paused_s", "perf/mfu", "reward/mean"):
        values = [line[key] for line in lines[2:] if key in line]
        if values:
            found[key] = statistics.median(values)
    mismatches = [line["mismatch/mean"] for line in lines if "mismatch/mean" in line]
    return found | ({"mismatch/mean, largest": max(mismatches)} if mismatches else {}) | {"steps": len(lines)}


def perform(item: Item, folder: Path, *, rehearse: bool) -> dict[str, Any]:
    """Run an item; return its exit code, None if its time was over, its seconds and its figures."""
    figures = folder / "figures.json"
    figures.unlink(missing_ok=True)
    replaced = {"FIGURES": str(figures), "RUNS": str(folder / "runs")}
    given = [*(item.rehearsal if rehearse else item.command)]
    for name, path in (replaced | {"MADE": str(folder / "made")}).items():
        given = [argument.replace(name, path) for argument in given]
    print("  python", *given, flush=True)
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, *given])
    try:
        code: int | None = process.wait(math.inf if rehearse else item.seconds)
    except subprocess.TimeoutExpired:
        # A launch ends its engines before itself.
        process.terminate()
        code = None
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    result: dict[str, Any] = {"exit_code": code, "seconds": time.monotonic() - began}
    if figures.exists():
        result |= json.loads(figures.read_text())
    if item.run and (folder / "runs" / item.run / "metrics.jsonl").exists():
        result |= figures_of(folder / "runs" / item.run)
    return result


def card() -> dict[str, Any]:
    """The card and what runs on it."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    device = pick_device("auto")
    if device != "cpu":
        found |= {"card": device_name(f"{device}:0"), "memory_bytes": total_memory(device)}
    return found


def has_vllm() -> bool:
    """Whether this Python's vLLM can be imported; a broken one says why."""
    return subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True, check=False).returncode == 0


def main() -> int:
    """Return 1 if an item failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--only", nargs="+", choices=ITEMS | VLLM_ITEMS, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("gpu_quarter.json"))
    arguments = parser.parse_args()
    items = ITEMS if arguments.rehearse or not has_vllm() else ITEMS | VLLM_ITEMS
    found: dict[str, Any] = {"machine": card()}
    print(found["machine"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or items:
            print(f"== {name}", flush=True)
            found[name] = perform((ITEMS | VLLM_ITEMS)[name], Path(folder), rehearse=arguments.rehearse)
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    results = {name: result["exit_code"] for name, result in found.items() if name != "machine"}
    for name, code in results.items():
        state = {0: "passed", None: "ended after its time"}.get(code, "FAILED")
        print(f"{name:22}{state} after {found[name]['seconds']:.0f} s")
    print(f"figures: {arguments.json}")
    return int(any(code != 0 for code in results.values()))


if __name__ == "__main__":
    sys.exit(main())
