"""Time and peak memory of every loss and every correction on one batch, in passes over its own inputs.

One pass is the time of reading each input tensor of the function once (a sum over it), measured in the same process.
A loss is timed forward and backward; a correction has no gradient. Memory is the rise of the process's peak resident
set while it runs, over one float32 tensor of the batch's shape.

    python -m benchmarks.algorithms [--rows 64] [--tokens 8192] [--json FILE]
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import PRESETS, AlgorithmConfig
from rl_async.trainer.algorithms.correction import correct
from rl_async.trainer.algorithms.losses import LOSSES, LossInputs, PolicyLoss, SelectInputs

REPEATS = 7
MIB = 2**20


def batch(rows: int, tokens: int) -> dict[str, Tensor]:
    """Log-probabilities of a policy and of slightly older ones, nine tenths of the tokens sampled."""
    draw = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(rows, tokens, generator=draw)
    proximal = behaviour + 0.02 * torch.randn(rows, tokens, generator=draw)
    return {
        "logprobs": proximal + 0.02 * torch.randn(rows, tokens, generator=draw),
        "proximal": proximal,
        "behaviour": behaviour,
        "advantages": torch.randn(rows, 1, generator=draw).expand(rows, tokens).contiguous(),
        "weights": torch.ones(rows, tokens),
        "mask": torch.rand(rows, tokens, generator=draw) < 0.9,
        "age": torch.randint(0, 5, (rows, tokens), generator=draw),
    }


def seconds(work: Callable[[], object]) -> float:
    """Median wall time, after one run that warms up."""
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_rise(work: Callable[[], object]) -> int:
    """Bytes by which the peak resident set exceeds what is resident before."""
    ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed before is used again, and nothing rises
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    work()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def reading(tensors: Sequence[Tensor]) -> float:
    return seconds(lambda: [tensor.sum() for tensor in tensors])


def loss_work(loss: PolicyLoss, x: dict[str, Tensor]) -> tuple[Callable[[], object], list[Tensor]]:
    """One forward and backward pass of the loss, its selection included, and what it reads."""

    def work() -> None:
        selected = None
        if loss.select is not None:
            chosen = SelectInputs(x["proximal"], x["behaviour"], x["advantages"], x["mask"], AlgorithmConfig(), 0)
            selected = loss.select(chosen)
        logprobs = x["logprobs"].detach().requires_grad_()
        inputs = LossInputs(
            logprobs=logprobs,
            proximal=x["proximal"],
            behaviour=x["behaviour"],
            advantages=x["advantages"],
            weights=x["weights"],
            mask=x["mask"],
            free=x["mask"],
            options=AlgorithmConfig(),
            selected=selected,
        )
        per_token = loss.per_token(inputs)
        torch.where(x["mask"], per_token, 0.0).sum().backward()

    return work, [x[name] for name in ("logprobs", "proximal", "behaviour", "advantages", "weights", "mask")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # In a process that has trained, malloc has seen larger tensors than these and keeps freed ones mapped.
    torch.ones(7 * 2**20)
    x = batch(arguments.rows, arguments.tokens)
    unit = arguments.rows * arguments.tokens * 4
    work: dict[str, tuple[Callable[[], object], list[Tensor]]] = {}
    judged = [x["proximal"], x["behaviour"], x["mask"], x["age"]]
    for name, preset in PRESETS.items():
        work[f"correction {name}"] = (lambda preset=preset: correct(*judged, preset)), judged  # type: ignore[misc]
    for name, loss in LOSSES.items():
        work[f"loss {name}"] = loss_work(loss, x)
    times = {name: (seconds(run), reading(reads)) for name, (run, reads) in work.items()}
    result = {}
    print(f"{'':<42}{'ms':>9}{'passes':>8}{'MiB':>8}{'tensors':>9}   [{arguments.rows}, {arguments.tokens}] float32")
    for name, (run, _) in work.items():
        (taken, once), memory = times[name], peak_rise(run)
        result[name] = {"ms": taken * 1e3, "passes": taken / once, "peak_mib": memory / MIB}
        print(f"{name:<42}{taken * 1e3:>9.2f}{taken / once:>8.1f}{memory / MIB:>8.1f}{memory / unit:>9.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
