"""The trainer's packing, log-probabilities and ranks, as ratios, and whole runs against TRL's.

One thread per process and random weights, but for the whole runs.

    python -m benchmarks.trainer [--trl PYTHON] [--json FILE] [--only NAME ...]

packed_vs_padded       tokens per second of a training step on rows of long-tailed lengths, over those of the same model
                       on the same rows padded in the order in which they come; by the processor time of this process
step_vs_trl            seconds of a whole step, generation included, disaggregated, over those of TRL 1.16's GRPO step
step_vs_trl_colocated  the same, colocated (whole_steps.py says more)
step_vs_trl_colocated_busy  the same beside a process that keeps a core busy; all three null without ``--trl``
telemetry_overhead     how much longer a whole step is with all telemetry than without, as a share (whole_steps.py)
telemetry_overhead_cpu how many more processor seconds all processes of a run use for a step, likewise
logprob_peak_vs_naive  rise of the peak resident set (VmHWM) of a process of its own while it computes log-probabilities
                       of [16 x 4096] tokens and 32,000 words, over that of logits, log_softmax and gather; the
                       latter is measured for 1/16 of the tokens, times 16, since all of it would not fit
reshard_bytes_vs_minimal  bytes that travel from FSDP2 ranks to tensor-parallel ones over those that must (reshard.py)
fsdp2_max_diff         largest difference of the loss or of any gradient between two ranks and one, in float32
megatron_max_diff      largest difference between FSDP2 on one rank and Megatron's TP2, PP2 and DP2 (backend_ranks.py);
                       null without megatron-core
"""

import argparse
import ctypes
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks import reshard, whole_steps
from benchmarks.processes.backend_ranks import megatron_max_diff
from benchmarks.processes.busy import busy_process
from benchmarks.processes.command_line import save
from benchmarks.processes.ranks import run_ranks
from benchmarks.processes.trainer_arms import (
    BUDGET,
    in_arrival_order,
    long_tailed,
    micro_batches,
    resident,
    rows_of,
    save_model,
)
from benchmarks.processes.whole_run import INSTALL
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import TrajectoryHeader
from rl_async.trainer.attention import NAME as PACKED_ATTENTION
from rl_async.trainer.backend import Outputs
from rl_async.trainer.batch_layout import RowCost, layout
from rl_async.trainer.families import LogitForm
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import LogitHead, token_stats
from rl_async.trainer.packing import Tensors

REPEATS = 2
PASS_ROWS, PASS_VOCAB, PASS_HIDDEN, NAIVE_SHARE = 16 * 4096, 32_000, 64, 16
DEADLINE_S = 600
BUSY_STEPS = range(4, 12)  # counted beside a busy process: enough, and short


def step_seconds(backend: Fsdp2Backend, batches: list[Tensors]) -> float:
    """Processor time of one optimizer step, the least of some."""

    def loss_fn(number: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batches[number].mask, outputs.logprobs, 0.0).sum()

    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        backend.step(batches, loss_fn)
        times.append(time.process_time() - began)
    return min(times)


def packed_vs_padded() -> float:
    lengths = long_tailed(256)
    rows = rows_of(lengths)
    headers: list[TrajectoryHeader] = [row.header() for row in rows]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        backend = Fsdp2Backend(folder, "float32", "cpu", TrainerConfig())
        arms: dict[str, tuple[bool, list[list[int]]]] = {"padded": (False, in_arrival_order(lengths))}
        for name, cost in (("padded, similar lengths together", RowCost(padded=True)), ("packed", backend.row_cost)):
            plan = layout(headers, step=0, minibatches=1, ranks=1, max_tokens=BUDGET, seed=0, cost=cost)
            arms[name] = not cost.padded, plan[0].ranks[0]
        seconds = {}
        for name, (packs, parts) in arms.items():
            backend.model.packs = packs
            backend.model.lm.set_attn_implementation(PACKED_ATTENTION if packs else "sdpa")
            seconds[name] = step_seconds(backend, micro_batches(rows, parts))
            print(f"  {name}: {sum(lengths) / seconds[name]:,.0f} tokens/s, {len(parts)} forward passes")
    dist.destroy_process_group()
    return seconds["padded"] / seconds["packed"]


def logprob_peak_vs_naive() -> float:
    chunked, naive = (int(run_alone("logprob_peak", arm)) for arm in ("chunked", "naive"))
    print(f"  chunked {chunked / 2**20:,.0f} MiB, naive {naive * NAIVE_SHARE / 2**20:,.0f} MiB")
    return chunked / (naive * NAIVE_SHARE)


def logprob_peak(arm: str) -> None:
    """Prints the bytes by which the peak resident set rises during one pass without gradient."""
    rows = PASS_ROWS if arm == "chunked" else PASS_ROWS // NAIVE_SHARE
    hidden, weight = torch.randn(rows, PASS_HIDDEN), torch.randn(PASS_VOCAB, PASS_HIDDEN)
    targets, temperature = torch.randint(0, PASS_VOCAB, (rows,)), torch.ones(rows)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    with torch.no_grad():
        if arm == "chunked":
            token_stats(hidden, LogitHead(weight, None, LogitForm()), targets, temperature)
        else:
            (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])
    print(resident("VmHWM") - before)


def fsdp2_max_diff() -> float:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for ranks in (1, 2):
            run_ranks(worker("fsdp2_gradients", folder), ranks, timeout_s=DEADLINE_S)
        one, two = (torch.load(Path(folder) / f"gradients-{ranks}.pt", weights_only=True) for ranks in (1, 2))
    assert one.keys() == two.keys() and any(gradient.abs().max() > 1e-3 for gradient in one.values())
    return max((one[name] - two[name]).abs().max().item() for name in one)


def fsdp2_gradients(folder: str) -> None:
    """One of some ranks: the mean loss over all tokens of a batch and its gradients, written by the first."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    rows = rows_of([min(length, 256) for length in long_tailed(32)])
    headers = [row.header() for row in rows]
    backend = Fsdp2Backend(folder, "float32", "cpu", TrainerConfig())
    plan = layout(headers, step=0, minibatches=1, ranks=ranks, max_tokens=1024, seed=0, cost=backend.row_cost)
    total = sum(header.sampled for header in headers)
    loss = torch.zeros(1)
    for batch in micro_batches(rows, plan[0].ranks[dist.get_rank()]):
        logprobs = backend.model.outputs(batch, frozenset()).logprobs
        part = -torch.where(batch.mask, logprobs, 0.0).sum() / total
        (part * ranks).backward()  # FSDP averages over ranks
        loss += part.detach()
    dist.all_reduce(loss)
    gradients = {name: whole(p.grad) for name, p in backend.model.named_parameters() if p.grad is not None}
    if dist.get_rank() == 0:
        torch.save({"loss": loss} | gradients, Path(folder) / f"gradients-{ranks}.pt")
    dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worker(name: str, argument: str) -> list[str]:
    """The command of this file as one of the workers."""
    return [sys.executable, "-m", "benchmarks.trainer", "--worker", name, argument]


def run_alone(name: str, argument: str) -> str:
    return run_ranks(worker(name, argument), 1, timeout_s=DEADLINE_S)[0]


def reshard_bytes_vs_minimal() -> float:
    """Measure a reshard between four processes (``reshard.py``)."""
    return reshard.measured_figures(1)["reshard_bytes_vs_minimal"]


WORKERS: dict[str, Callable[[str], None]] = {"logprob_peak": logprob_peak, "fsdp2_gradients": fsdp2_gradients}


def measures(trl: Path | None) -> dict[str, Callable[[], float | None]]:
    """What can be asked for. ``trl``: a Python that has TRL."""

    @functools.cache
    def steps() -> dict[str, float]:
        if trl is None:
            print(f"  no --trl: make one with {INSTALL}")
            return {}
        return whole_steps.ratios(trl)

    telemetry = functools.cache(whole_steps.telemetry_overhead)

    def busy() -> float | None:
        if trl is None:
            return None
        with busy_process():
            return whole_steps.ratios(trl, ["colocated"], 1, BUSY_STEPS).get("colocated")

    return {
        "packed_vs_padded": packed_vs_padded,
        "step_vs_trl": lambda: steps().get("disaggregated"),
        "step_vs_trl_colocated": lambda: steps().get("colocated"),
        "step_vs_trl_colocated_busy": busy,
        "telemetry_overhead": lambda: telemetry().wall,
        "telemetry_overhead_cpu": lambda: telemetry().cpu,
        "logprob_peak_vs_naive": logprob_peak_vs_naive,
        "reshard_bytes_vs_minimal": reshard_bytes_vs_minimal,
        "fsdp2_max_diff": fsdp2_max_diff,
        "megatron_max_diff": megatron_max_diff,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The trainer's goals as ratios.")
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help=f"one that has TRL: {INSTALL}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=sorted(measures(None)))
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "ARGUMENT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        WORKERS[arguments.worker[0]](arguments.worker[1])
        return
    results: dict[str, float | None] = {}
    for name, measure in measures(arguments.trl).items():
        results[name] = measure() if arguments.only is None or name in arguments.only else None
        print(f"{name}: {'not measured' if results[name] is None else format(results[name], '.4g')}", flush=True)
        save(results, arguments.json)  # after each, so that what is measured is kept if the next one fails


if __name__ == "__main__":
    main()
