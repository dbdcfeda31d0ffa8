"""The memory budget of a run: who has how much of each device in which stage of a step. Pure.

    start    engines and trainer ranks load; the first weights are gathered
    rollout  engines sample
    train    the trainer steps
    gather   the new weights are copied, in the type that travels
    load     engines take the copy

Where engines and trainer take turns, engines sleep while the trainer works (train, gather), and otherwise its models
are off the device; what each rank sends stays there until engines have loaded it, and leaves before their caches wake.
Everywhere else an engine has at all times what it needs while it works, but for an embedded one's cache at the start. A
trainer on a GPU has what a step needs at all times after the start, since torch keeps that; on a CPU while it trains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from rl_async.configs.derived import resolve_transport, sends_shards
from rl_async.configs.engines import ENGINES
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.launcher.plan.memory import (
    CONTEXT_BYTES,
    DTYPE_BYTES,
    TORCH_BYTES,
    ModelSize,
    cache_bytes,
    decoding_bytes,
    held_bytes,
    trainer_parts,
)
from rl_async.process.run_files import DeviceBudget, Holder, MemoryBudget, Part, Stage

STAGES: tuple[Stage, ...] = get_args(Stage)
CPU = "cpu"
_KEPT_ASLEEP: frozenset[Part] = frozenset({"runtime", "published", "bucket"})
_BETWEEN_STEPS: frozenset[Part] = frozenset({"runtime", "weights", "reference", "optimizer", "published", "bucket"})
_Stages = dict[Stage, dict[Part, int]]


@dataclass(frozen=True)
class Place:
    """Where a process computes: its GPUs, one for each of its ranks (empty: the CPU), and whether it takes turns there
    with processes of the other role. ``kind``: of an engine; ``opens``: further GPUs, of trainer ranks whose memory it
    maps to take weights from."""

    process: str
    gpus: tuple[int, ...]
    turns: bool
    kind: str = ""
    opens: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineMemory:
    """What each rank of an engine may have, as flags of engines want it; None: what it finds. Shares are of all that
    its device has."""

    cache_bytes: int | None = None
    share: float | None = None  # everything
    static_share: float | None = None  # weights and cache


def memory_budget(
    config: RunConfig, size: ModelSize, engines: Sequence[Place], trainers: Sequence[Place], capacity: int | None
) -> MemoryBudget:
    """Return the budgets of all devices, of ``capacity`` bytes each (None: unknown).

    KV caches of engines on GPUs shrink to what the others leave there. Raises UserError, naming the largest part and
    the key to change, for a device that lacks memory in some stage.
    """
    limit = None if capacity is None else int(capacity * config.launcher.device_memory)
    held: dict[str, list[Holder]] = {}
    for place in trainers:
        holder = Holder(place.process, "trainer", _trainer(config, size, place))
        held.setdefault(_devices(place)[0], []).append(holder)
    for place in engines:
        for device in (_devices(place) * config.rollout.ranks)[: config.rollout.ranks]:
            held.setdefault(device, []).append(Holder(place.process, "engine", _engine(config, size, place)))
    found = (DeviceBudget(device, capacity, limit, tuple(holders)) for device, holders in held.items())
    return MemoryBudget(tuple(_checked(_with_room(budget, config, size), config) for budget in found))


def engine_memory(budget: MemoryBudget, config: RunConfig, place: Place) -> EngineMemory:
    """Return what to set on an engine. On a GPU of its own, software that measures what is left is left alone."""
    given, found = config.rollout.cache_bytes, budget.of(place.process)
    if not place.gpus:
        return EngineMemory(config.rollout.cpu_cache_bytes)
    if found is None:
        return EngineMemory(given)
    device, holder = found
    if given is None and len(device.holders) == 1 and ENGINES[place.kind].package:
        return EngineMemory()
    awake, most = holder.stages["rollout"], max(map(holder.total, STAGES))

    def share(nbytes: int) -> float | None:
        return None if device.capacity is None else math.ceil(10_000 * nbytes / device.capacity) / 10_000

    return EngineMemory(awake["KV cache"], share(most), share(awake["weights"] + awake["KV cache"]))


def _devices(place: Place) -> tuple[str, ...]:
    return tuple(f"gpu:{gpu}" for gpu in place.gpus) or (CPU,)


def _trainer(config: RunConfig, size: ModelSize, place: Place) -> _Stages:
    """Each rank keeps what it publishes, for engines that come late: its share of the weights, or rank 0 all of them if
    it gathers them. The transport says whether a GPU has that, and what engines map, or the host.

    In turns on a GPU it is for late engines on the host: there at once if rank 0 gathers, and at the start. A trainer's
    sleep frees nothing on a CPU.
    """
    on_gpu, transport = bool(place.gpus), resolve_transport(config)
    step = trainer_parts(config, size, on_gpu=on_gpu)
    copy = size.parameters * DTYPE_BYTES[config.model.dtype]
    bucket = min(config.weight_sync.bucket_bytes, copy)
    sharded = sends_shards(config)
    mine = copy // config.trainer.ranks if sharded else copy if place.process.endswith("-0") else 0
    here = mine > 0 and (not on_gpu or transport in ("ipc", "nccl"))
    published: dict[Part, int] = {"published": mine} if here else {}
    if on_gpu and transport == "ipc":
        step["bucket"] = 2 * bucket
    in_turns = place.turns and on_gpu
    if not in_turns:
        step |= published
    # Megatron keeps the sums of its gradients until it sleeps.
    between = _only(step, _BETWEEN_STEPS | ({"gradients"} if config.trainer.backend == "megatron" else set()))
    gathering: dict[Part, int] = {"bucket": bucket}
    gathering |= between
    starting = dict(gathering)
    del starting["optimizer"]  # AdamW's moments are made by a step
    if not in_turns:
        if on_gpu:
            between, gathering = step, max(step, gathering, key=lambda parts: sum(parts.values()))
        return {"start": starting, "rollout": between, "train": step, "gather": gathering, "load": between}
    away = _only(step, _KEPT_ASLEEP) | _left_asleep(config, size, step)
    loading = away | (published if sharded else {})
    return {"start": starting, "rollout": away, "train": step, "gather": gathering | published, "load": loading}


def _left_asleep(config: RunConfig, size: ModelSize, step: dict[Part, int]) -> dict[Part, int]:
    """Megatron's sleep leaves weights on the device: those that its layers compute with, and the reference's."""
    trainer = config.trainer
    if trainer.backend != "megatron":
        return {}
    weights = (size.parameters + size.critic) * DTYPE_BYTES[config.model.dtype]
    return {
        "weights": weights // (trainer.tensor_parallel * trainer.pipeline_parallel),
        "reference": step["reference"],
    }


def _engine(config: RunConfig, size: ModelSize, place: Place) -> _Stages:
    """One rank of an engine. While weights arrive, the cache of one that slept is still away.

    An embedded engine loads all weights before it quantises any, and then its cache grows with its requests.
    """
    on_gpu, traits, sync = bool(place.gpus), ENGINES[place.kind], config.weight_sync
    weights = size.parameters * DTYPE_BYTES[config.model.dtype] // config.rollout.ranks  # as they travel
    embedded = not traits.package
    output = size.head * 4 if embedded and not on_gpu and config.model.dtype != "float32" else 0
    awake: dict[Part, int] = {
        "runtime": CONTEXT_BYTES * (1 + len(place.opens)) if on_gpu else TORCH_BYTES,
        "weights": held_bytes(config, size) // config.rollout.ranks + output,
        "KV cache": cache_bytes(config, size, embedded=embedded, on_gpu=on_gpu),
    }
    if on_gpu:
        awake["activations"] = decoding_bytes(config, size)
    elif sync.staged or sync.delta or sync.adapters:  # host copies
        awake["published"] = (
            weights if sync.staged and not (sync.delta or sync.adapters) else weights * config.rollout.ranks
        )
    start: dict[Part, int] = {part: n for part, n in awake.items() if part != "KV cache" or not embedded}
    if embedded:
        start["weights"] = weights + output
    bucket: dict[Part, int] = {"bucket": min(sync.bucket_bytes, weights)}
    if not (place.turns and (on_gpu or traits.cpu_sleeps)):
        return dict.fromkeys(STAGES, awake) | {"start": start, "load": awake | bucket}
    asleep = _only(awake, _KEPT_ASLEEP)
    loading = asleep | {"weights": awake["weights"]} | bucket
    return {"start": start, "rollout": awake, "train": asleep, "gather": asleep, "load": loading}


def _only(parts: dict[Part, int], kept: frozenset[Part]) -> dict[Part, int]:
    return {part: nbytes for part, nbytes in parts.items() if part in kept}


def _with_room(device: DeviceBudget, config: RunConfig, size: ModelSize) -> DeviceBudget:
    """Shrink the KV caches of engines on a GPU to what is left there, unless rollout.cache_bytes says what they get.

    Raises UserError if that does not hold one sequence.
    """
    engines = [holder for holder in device.holders if holder.role == "engine"]
    if device.limit is None or device.device == CPU or config.rollout.cache_bytes is not None or not engines:
        return device
    caches = [holder.stages["rollout"]["KV cache"] for holder in engines]
    limit = device.limit

    def for_each(stage: Stage) -> float:
        held = [holder.stages[stage]["KV cache"] for holder in engines if "KV cache" in holder.stages[stage]]
        return (sum(held) - max(0, device.total(stage) - limit)) // len(held) if held else math.inf

    left = max(0, int(min(map(for_each, STAGES))))

    def shrunk(holder: Holder) -> Holder:
        stages = {
            stage: {part: min(n, left) if part == "KV cache" else n for part, n in parts.items()}
            for stage, parts in holder.stages.items()
        }
        return msgspec.structs.replace(holder, stages=stages)

    found = msgspec.structs.replace(device, holders=tuple(map(shrunk, device.holders)))
    least = config.rollout.max_model_len * size.kv_per_token * DTYPE_BYTES[config.model.dtype] // config.rollout.ranks
    if left < min(least, *caches):
        raise UserError(
            f"memory of {device.device}: of {_gib(device.limit)} (launcher.device_memory) {_gib(left)} are left for "
            f"the KV cache of {engines[0].process}, and one sequence of rollout.max_model_len="
            f"{config.rollout.max_model_len} tokens needs {_gib(least)}; lower that, or the rest: "
            f"{_needs(found, 'rollout')}"
        )
    return found


def _checked(device: DeviceBudget, config: RunConfig) -> DeviceBudget:
    """Return the budget. Raises UserError if it exceeds the device."""
    for stage in STAGES:
        if device.limit is not None and device.total(stage) > device.limit:
            raise UserError(
                f"memory of {device.device}: stage '{stage}' of a step needs {_gib(device.total(stage))}, and "
                f"launcher.device_memory={config.launcher.device_memory:g} of its {_gib(device.capacity or 0)} is "
                f"{_gib(device.limit)}. Of that {_needs(device, stage)}"
            )
    return device


def _needs(device: DeviceBudget, stage: Stage) -> str:
    """Say what the largest holder of each role needs, and what to do about it; the largest of them first."""
    ascending = sorted(device.holders, key=lambda holder: holder.total(stage))
    of_roles = {holder.role: holder for holder in ascending}.values()
    largest = [holder for holder in reversed(ascending) if holder in of_roles]
    return ". ".join(f"{one.process} needs {_gib(one.total(stage))}; {one.remedy(stage)}" for one in largest)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
