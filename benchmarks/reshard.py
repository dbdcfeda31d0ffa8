"""What does resharding move, and how long does it take, against gathering everything everywhere?

Measured: FSDP2 shards of a Qwen3 of 368 MB in bfloat16 on two processes, wanted by a TP engine's two ranks in two other
processes, over gloo and through shared memory; against the full gather: rank 0 gets the other's half
and broadcasts everything to both ranks of the receiver, in pieces of the same size. Bytes are counted where they are
sent (resharded) or received (gathered). Planned only: larger models, which takes no process.

    reshard_bytes_vs_minimal    bytes that travelled / bytes that some rank wants and does not hold    goal <= 1.05

    python -m benchmarks.reshard [--repeats 5] [--json FILE]
"""

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes.command_line import parser, save
from benchmarks.processes.ranks import free_ports, run_ranks
from rl_async.weight_sync.layout import Box, Layout, TensorSpec, engine, fsdp2, joined, megatron, slices, volume, whole
from rl_async.weight_sync.reshard import PointToPoint, ReshardPlan, Wire, plan, reshard
from tests.support.resharding import SharedMemoryWire, figures

MB = 1 << 20
BUCKET = 64 * MB
TIMEOUT_S = 120.0
DEADLINE_S = 600
SOURCES = TARGETS = 2  # ranks


class Model(NamedTuple):
    """Shape of a model with Qwen's parameter names."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    experts: int = 0
    head_dim: int = 128
    tied: bool = False

    def specs(self) -> dict[str, TensorSpec]:
        """Return the specs of all tensors, in bfloat16."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes |= {
                f"{at}.input_layernorm.weight": (self.hidden,),
                f"{at}.self_attn.q_proj.weight": (queries, self.hidden),
                f"{at}.self_attn.k_proj.weight": (keys, self.hidden),
                f"{at}.self_attn.v_proj.weight": (keys, self.hidden),
                f"{at}.self_attn.q_norm.weight": (self.head_dim,),
                f"{at}.self_attn.k_norm.weight": (self.head_dim,),
                f"{at}.self_attn.o_proj.weight": (self.hidden, queries),
                f"{at}.post_attention_layernorm.weight": (self.hidden,),
            }
            if self.experts:
                shapes[f"{at}.mlp.gate.weight"] = (self.experts, self.hidden)
            for mlp in [f"{at}.mlp.experts.{e}" for e in range(self.experts)] or [f"{at}.mlp"]:
                shapes |= {
                    f"{mlp}.gate_proj.weight": (self.inner, self.hidden),
                    f"{mlp}.up_proj.weight": (self.inner, self.hidden),
                    f"{mlp}.down_proj.weight": (self.hidden, self.inner),
                }
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return {name: TensorSpec(shape) for name, shape in shapes.items()}


SMALL = Model(layers=12, hidden=1024, heads=8, kv_heads=4, inner=3072, vocab=32000, tied=True)
QWEN3_8B = Model(layers=36, hidden=4096, heads=32, kv_heads=8, inner=12288, vocab=151936)
QWEN3_30B_A3B = Model(layers=48, hidden=2048, heads=32, kv_heads=4, inner=768, vocab=151936, experts=128)


def larger() -> dict[str, tuple[Layout, Layout]]:
    """Source and target of models too large for this machine."""
    dense, sparse = QWEN3_8B.specs(), QWEN3_30B_A3B.specs()
    tp4, tp8 = engine(dense, tp=4, kv_heads=8), engine(sparse, tp=8, ep=8, kv_heads=4)
    two = joined([tp4, tp4.placed(range(4, 8))])
    pipeline = megatron(dense, kv_heads=8, tp=2, pp=2, dp=2)
    experts = megatron(sparse, kv_heads=4, tp=2, pp=2, dp=4, ep=8)
    return {
        "8B, FSDP2 on 8, to 2 x TP 4 on the same GPUs": (fsdp2(dense, 8), two),
        "8B, FSDP2 on 8, to TP 4 elsewhere": (fsdp2(dense, 8), tp4.placed(range(8, 12))),
        "8B, Megatron TP 2 x PP 2 x DP 2, to 2 x TP 4 on the same GPUs": (pipeline, two),
        "30B-A3B, Megatron TP 2 x PP 2 x EP 8, to TP 8 EP 8 elsewhere": (experts, tp8.placed(range(16, 24))),
    }


def small_plan() -> ReshardPlan:
    """Plan the reshard that the four processes carry out."""
    named = SMALL.specs()
    target = engine(named, tp=TARGETS, kv_heads=SMALL.kv_heads).placed(range(SOURCES, SOURCES + TARGETS))
    return plan(fsdp2(named, SOURCES), target, BUCKET)


def numbers(spec: TensorSpec) -> Tensor:
    """A whole tensor, the same everywhere, in which neighbours differ; bfloat16 counts to 256 exactly."""
    elements = volume(whole(spec.shape))
    return torch.arange(251, dtype=torch.bfloat16).repeat(-(-elements // 251))[:elements].view(spec.shape)


def holding(layout: Layout, rank: int) -> dict[tuple[str, Box], Tensor]:
    """The right shards of ``rank``, each a tensor of its own."""
    named = layout.tensors
    return {
        (name, box): numbers(named[name])[slices(box, whole(named[name].shape))].clone()
        for name, box in layout.held(rank)
    }


def full_gather(flat: Tensor, engines: dist.ProcessGroup) -> int:
    """Rank 1 gives rank 0 its half, and rank 0 gives all to every rank of the engine, in buckets; bytes received."""
    rank, half, received = dist.get_rank(), flat.numel() // SOURCES, 0
    for start in range(0, half, BUCKET):
        part = flat[half + start : half + min(start + BUCKET, half)]
        if rank == 1:
            dist.send(part, 0)
        elif rank == 0:
            dist.recv(part, 1)
            received += part.nbytes
    if rank == 1:
        return 0
    for part in flat.split(BUCKET):
        dist.broadcast(part, 0, group=engines)
        received += part.nbytes if rank >= SOURCES else 0
    return received


def rank_process(repeats: int) -> None:
    """One of the four; prints a line of JSON with its bytes and seconds per arm."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, made = dist.get_rank(), small_plan()
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=rank == 0)
    engines = dist.new_group([0, *range(SOURCES, SOURCES + TARGETS)])
    source, right = holding(made.source, rank), holding(made.target, rank)
    total = sum(made.source.nbytes(name, whole(spec.shape)) for name, spec in made.source.tensors.items())
    flat = torch.zeros(total, dtype=torch.uint8)
    shared = SharedMemoryWire(dist.PrefixStore("shared", store), rank)
    wires: dict[str, Wire] = {"gloo": PointToPoint(dist.PrefixStore("gloo", store)), "shared memory": shared}
    seconds: dict[str, list[float]] = defaultdict(list)
    nbytes: dict[str, int] = {}
    buffers: dict[str, int] = {}
    for _ in range(repeats + 1):
        for name, wire in wires.items():
            target = {key: torch.full_like(tensor, 252) for key, tensor in right.items()}
            dist.barrier()
            began = time.perf_counter()
            done = reshard(made, rank, source, target, wire, TIMEOUT_S)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            assert all(torch.equal(target[key], right[key]) for key in right), f"{name}: rank {rank} got other weights"
            nbytes[name], buffers[name] = done.sent, done.buffers
        dist.barrier()
        began = time.perf_counter()
        nbytes["full gather"] = full_gather(flat, engines)
        dist.barrier()
        seconds["full gather"].append(time.perf_counter() - began)
    shared.close()
    medians = {name: statistics.median(samples[1:]) for name, samples in seconds.items()}  # the first is a warm-up
    print(json.dumps({"bytes": nbytes, "buffers": buffers, "seconds": medians}), flush=True)
    dist.barrier()


def measure(repeats: int) -> list[dict[str, dict[str, float]]]:
    """Run four processes and return what each measured."""
    (store,) = free_ports(1)
    command = [sys.executable, "-m", "benchmarks.reshard", "--rank", "--repeats", str(repeats)]
    outputs = run_ranks(command, SOURCES + TARGETS, timeout_s=DEADLINE_S, environment={"STORE_PORT": store})
    return [json.loads(out) for out in outputs]


def measured_figures(repeats: int) -> dict[str, float]:
    """Prints the measured table; returns the goals' keys."""
    told, made = measure(repeats), small_plan()
    minimal = figures(made).minimal
    print(f"{'measured, FSDP2 on 2 to TP 2':<64}{'MB':>10}{'/ minimal':>11}{'ms':>8}{'buffers MB':>12}")
    for arm, seconds in told[0]["seconds"].items():
        moved = sum(rank["bytes"][arm] for rank in told)
        buffers = max(rank["buffers"].get(arm, 0) for rank in told)
        print(f"{arm:<64}{moved / 1e6:>10.1f}{moved / minimal:>11.3f}{1000 * seconds:>8.0f}{buffers / 1e6:>12.1f}")
    return {"reshard_bytes_vs_minimal": max(sum(r["bytes"][a] for r in told) for a in told[0]["buffers"]) / minimal}


def main() -> None:
    arguments = parser(__doc__, "--rank").parse_args()
    if arguments.rank:
        rank_process(arguments.repeats)
        return
    result = measured_figures(arguments.repeats)
    print(f"\n{'planned':<64}{'GB':>10}{'/ minimal':>11}{'gather':>8}{'buffers MB':>12}{'plan s':>8}")
    for name, (source, target) in larger().items():
        began = time.perf_counter()
        cost = figures(plan(source, target, 256 * MB))
        took = time.perf_counter() - began
        moved, gather = f"{cost.moved / 1e9:>10.1f}{cost.moved / cost.minimal:>11.3f}", cost.full_gather / cost.moved
        print(f"{name:<64}{moved}{gather:>7.1f}x{cost.peak_extra / 1e6:>12.1f}{took:>8.1f}")
    for name, value in result.items():
        print(f"\n{name:<64}{value:>10.3f}")
    save(result, arguments.json)


if __name__ == "__main__":
    main()
