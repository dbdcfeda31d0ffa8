"""One rank of the processes of test_transport.py: part of a trainer, of a receiver like a TP engine, or of both.

The receiver holds an engine's fused parameters and compares each with whole weights that were cut by torch's own
``chunk`` and ``cat``, without a layout. Prints a line of JSON per scenario.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import Box, Layout, TensorSpec, engine, fsdp2, megatron
from rl_async.weight_sync.reshard import PointToPoint, Wire, one_box_each, plan, reshard, split_fused
from tests.support.resharding import SharedMemoryWire, figures
from tests.unit.weight_sync.fleet_engines import specs

WORLD = 4
BUCKET = 1024  # bytes, so that there are many
HEADS, GROUPS = 8, 4
SHAPE: dict[str, Any] = {"heads": HEADS, "kv_heads": GROUPS, "bias": True, "qk_norm": True, "vocab": 70}

Parts = dict[tuple[str, Box], Tensor]


class Scenario(NamedTuple):
    """``first`` is the rank of the receiver's first."""

    source: str  # fsdp2 or megatron
    ranks: int
    tp: int
    first: int
    experts: int = 0
    shared: bool = False
    dtype: str = "bfloat16"


SCENARIOS = {
    "fsdp2 on 2 to TP 2": Scenario("fsdp2", 2, 2, 2),
    "fsdp2 on 3 to TP 1": Scenario("fsdp2", 3, 1, 3),
    "fsdp2 on 4 to TP 4 on the same ranks": Scenario("fsdp2", 4, 4, 0, dtype="float32"),
    "megatron on 2 x 2 to TP 2 on two of them": Scenario("megatron", 4, 2, 2),
    "experts of megatron to TP 2 with EP 2": Scenario("megatron", 4, 2, 1, experts=4),
    "fsdp2 on 2 to TP 2 through shared memory": Scenario("fsdp2", 2, 2, 2, shared=True),
    "experts of megatron through shared memory": Scenario("megatron", 4, 2, 0, experts=4, shared=True),
}


def weights(named: dict[str, TensorSpec]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in named.items()}


def module_of(tensors: dict[str, Tensor]) -> torch.nn.Module:
    """Parameters under the tensors' names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(leaf, torch.nn.Parameter(tensor.clone()))
    return root


def fsdp2_parts(whole: dict[str, Tensor], layout: Layout, rank: int, mesh: DeviceMesh) -> Parts:
    """What ``fully_shard`` leaves on this rank."""
    sharded = {}
    for name, parameter in fully_shard(module_of(whole), mesh=mesh).named_parameters():
        assert isinstance(parameter, DTensor)
        sharded[name] = parameter.detach().to_local()
    return one_box_each(layout, rank, sharded)


def sets_of(named: dict[str, TensorSpec]) -> Iterator[tuple[list[str], Callable[..., list[Tensor]], Callable]]:
    """Names that are fused, how Megatron's ranks hold them together, and how an engine's do."""
    for name in named:
        if ".q_proj" in name:
            qkv = [name.replace(".q_proj", f".{which}_proj") for which in "qkv"]
            yield qkv, megatron_qkv, fused_by_chunks
        elif "gate_proj" in name:
            yield [name, name.replace("gate_proj", "up_proj")], fused_by_chunks, fused_by_chunks
        elif "o_proj" in name or "down_proj" in name:
            yield [name], columns, columns
        elif "embed_tokens" in name or "lm_head" in name:
            yield [name], megatron_vocabulary, engine_vocabulary
        elif not any(f".{which}_proj" in name for which in ("k", "v", "up")):
            yield [name], repeated, repeated


def megatron_qkv(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    return list(torch.cat([t.unflatten(0, (GROUPS, -1)) for t in tensors], 1).flatten(0, 1).chunk(ranks))


def fused_by_chunks(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*(t.chunk(ranks) for t in tensors), strict=True)]


def columns(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    return [part.clone() for part in tensors[0].chunk(ranks, 1)]


def repeated(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    return [tensors[0].clone() for _ in range(ranks)]


def megatron_vocabulary(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    return [part.clone() for part in tensors[0].chunk(ranks)]


def engine_vocabulary(tensors: list[Tensor], ranks: int) -> list[Tensor]:
    step = 128 // ranks  # 70 rows, padded to a multiple of 64
    return [part.clone() for part in (*tensors[0].split(step), *[tensors[0][:0]] * ranks)][:ranks]


def held_by(layout: Layout, rank: int, names: list[str], fused: list[Tensor], slot: int) -> tuple[Parts, Tensor | None]:
    """The boxes of a fused parameter, and itself, if the rank has it. Experts are whole where they are."""
    if not any(shard.rank == rank for shard in layout.shards[names[0]]):
        return {}, None
    mine = fused[slot]
    if len(names) == 1:
        return {(name, box): mine for name, box in layout.held(rank) if name == names[0]}, mine
    return split_fused(mine, layout, rank, names), mine


def run(scenario: Scenario, wire: Wire, meshes: dict[int, DeviceMesh], timeout_s: float = 60) -> dict[str, object]:
    """This rank's part, and what it saw."""
    rank, tp = dist.get_rank(), scenario.tp
    named = specs(**SHAPE, experts=scenario.experts, dtype=scenario.dtype)
    whole = weights(named)
    ep = 2 if scenario.experts else 1
    target = engine(named, tp=tp, ep=ep, kv_heads=GROUPS).placed(range(scenario.first, WORLD + 1))
    source_parts: Parts = {}
    if scenario.source == "fsdp2":
        source = fsdp2(named, scenario.ranks)
        if rank < scenario.ranks:
            source_parts = fsdp2_parts(whole, source, rank, meshes[scenario.ranks])
    else:
        source = megatron(named, kv_heads=GROUPS, tp=2, pp=2, ep=ep)
        for names, cut, _ in sets_of(named):
            ranks = 1 if ".experts." in names[0] else 2
            parts, _ = held_by(source, rank, names, cut([whole[n] for n in names], ranks), rank % ranks)
            source_parts |= parts
    slot, target_parts, fused, expected = rank - scenario.first, {}, [], []
    if 0 <= slot < tp:
        for names, _, cut in sets_of(named):
            at, ranks = (0, 1) if ".experts." in names[0] else (slot, tp)
            right = cut([whole[n].to(getattr(torch, scenario.dtype)) for n in names], ranks)
            parts, mine = held_by(target, rank, names, [torch.full_like(t, 9.0) for t in right], at)
            target_parts |= parts
            if mine is not None:
                fused.append(mine)
                expected.append(right[at])
    made = plan(source, target, BUCKET)
    done = reshard(made, rank, source_parts, target_parts, wire, timeout_s)
    cost = figures(made)
    return done._asdict() | {
        "parameters": len(fused),
        "wrong": sum(not torch.equal(a, b) for a, b in zip(fused, expected, strict=True)),
        "moved": cost.moved,
        "minimal": cost.minimal,
        "local": cost.local,
        "full_gather": cost.full_gather,
        "buckets": len(made.exchanges),
    }


def main(mode: str) -> None:
    """``all`` the scenarios, or one of them in which rank 1 dies or hangs as the mode says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["STORE_PORT"]), is_master=rank == 0)
    meshes = {ranks: DeviceMesh("cpu", list(range(ranks))) for ranks in (2, 3, 4)}
    dist.barrier()
    shared = SharedMemoryWire(dist.PrefixStore("shared", store), rank)
    wires: dict[bool, Wire] = {False: PointToPoint(dist.PrefixStore("gloo", store)), True: shared}
    try:
        if mode == "all":
            for name, scenario in SCENARIOS.items():
                print(json.dumps({"scenario": name} | run(scenario, wires[scenario.shared], meshes)), flush=True)
            dist.barrier()
            return
        how, _, kind = mode.partition(" ")
        scenario = SCENARIOS["megatron on 2 x 2 to TP 2 on two of them"]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        try:
            run(scenario, wires[kind == "shared"], meshes, timeout_s=4)
        except WeightSyncError as error:
            print(error, flush=True)
    finally:
        shared.close()


if __name__ == "__main__":
    main(sys.argv[1])
