"""Engines over the real receiver and a registry of them, in this process, for tests of the fleet."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec
import torch

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import EngineError, EngineLost, QueueLost, WeightSyncError
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.weight_sync.buckets import Bucket, Pairs
from rl_async.weight_sync.coordinator import Fleet, NoteStage
from rl_async.weight_sync.layout import TensorSpec
from rl_async.weight_sync.protocol import Box, InitInfo, TransportName, UpdateInfo, of_worker
from rl_async.weight_sync.receiver import AdapterLoader, Assembler, WeightReceiver
from tests.support.weights import make_buckets

V0, V1 = Version(0, 0), Version(0, 1)


class Engine:
    """An engine over the real receiver, one for each of its workers.

    ``faults`` maps a call, ``update 2`` say, to the error it raises, once; EngineLost kills the engine. With ``base``
    it loads adapters beside weights of that name; ``weights`` are then the scaled sums of each A and B.
    """

    def __init__(
        self,
        faults: Mapping[str, Exception] | None = None,
        workers: int = 1,
        needs: list[list[list[Box]]] | None = None,
        base: str = "",
    ) -> None:
        self.faults, self.needs, self.base = dict(faults or {}), needs, base
        self.of_workers: list[dict[str, float]] = [{} for _ in range(workers)]
        self.weights = self.of_workers[0]
        self.forget()
        self.serves: Version | None = None
        self.calls: list[str] = []
        self.updates = 0
        self.kinds: list[str] = []  # of the buckets that came
        self.closed = False
        self.asleep: set[str] = set()
        self.dead: EngineLost | None = None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        error = self.faults.pop(name, None) or self.dead
        if isinstance(error, EngineLost):
            self.dead = error
        if error is not None:
            raise error

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        self._called(f"pause {mode}")

    async def resume(self) -> None:
        self._called("resume")

    async def init_transfer(self, init: InitInfo) -> None:
        self._called("init")
        joining = [msgspec.structs.replace(init, rank_offset=init.rank_offset + i) for i in range(len(self.receivers))]
        await self._each(lambda i, receiver: receiver.init(of_worker(joining[i], i)))

    async def start_update(self, staged: bool = False) -> None:
        self._called("start")
        await self._each(lambda _, receiver: receiver.start())
        if "weights" in self.asleep:
            raise EngineError("the weights are asleep")

    async def update(self, info: UpdateInfo) -> None:
        self.updates += 1
        self._called(f"update {self.updates}")
        self.kinds.append(info.kind)
        try:
            await self._each(lambda i, receiver: receiver.update(of_worker(info, i)))
        except WeightSyncError as error:
            raise EngineError(str(error)) from error

    async def finish_update(self, version: Version) -> None:
        self._called("finish")
        await self._each(lambda _, receiver: receiver.finish())
        self.serves = version

    async def version(self) -> Version | None:
        self._called("version")
        return self.serves

    async def sleep(self, level: int) -> None:
        self._called(f"sleep {level}")
        self.asleep |= {"weights", "kv_cache"}

    async def wake(self, tags: Sequence[str]) -> None:
        self._called(f"wake {','.join(tags)}")
        self.asleep -= set(tags)

    async def workers(self) -> int:
        return len(self.receivers)

    async def boxes(self, tensors: Mapping[str, list[int]]) -> list[list[list[Box]]] | None:
        self._called("boxes")
        return self.needs

    async def is_sleeping(self) -> bool:
        self._called("is_sleeping")
        return bool(self.asleep)

    async def close(self) -> None:
        self.closed = True

    def forget(self) -> None:
        """Lose what the workers hold, and their places in groups."""
        self.receivers = [
            WeightReceiver(Assembler(_into(loaded)), adapters=self._loader(loaded)) for loaded in self.of_workers
        ]

    def _loader(self, loaded: dict[str, float]) -> AdapterLoader | None:
        def load(pairs: Pairs, scale: float) -> None:
            loaded.update((name, scale * (high @ low).sum().item()) for name, (low, high) in pairs.items())

        return AdapterLoader(lambda: self.base, load) if self.base else None

    async def _each(self, work: Callable[[int, WeightReceiver], None]) -> None:
        await asyncio.gather(*(asyncio.to_thread(work, i, receiver) for i, receiver in enumerate(self.receivers)))


def _into(loaded: dict[str, float]) -> Callable[[list[tuple[str, torch.Tensor]]], None]:
    """A loader that keeps the sums of what it gets, without the parts that it had not asked for."""
    return lambda named: loaded.update((name, tensor.nansum().item()) for name, tensor in named)


class Directory:
    """A registry whose engines are in this process."""

    def __init__(self, **engines: Engine) -> None:
        self.engines_by_url = dict(engines)
        self.records = {name: EngineRecord(engine_id=name, url=name, kind="test") for name in engines}
        self.revision = 0
        self.changed = asyncio.Event()
        self.removed: dict[str, str] = {}
        self.confirmed: list[tuple[str, Version]] = []
        self.published: tuple[Version, list[str]] | None = None
        self.lost = 0  # so many calls to come fail

    def add(self, name: str, engine: Engine) -> None:
        self.engines_by_url[name] = engine
        self.records[name] = EngineRecord(engine_id=name, url=name, kind="test")
        self._bump()

    def connect(self, record: EngineRecord) -> Engine:
        return self.engines_by_url[record.url]

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        if self.lost:
            self.lost -= 1
            raise QueueLost("the queue is away")
        if self.revision <= after:
            self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), wait_s)
        return EngineList(revision=self.revision, engines=list(self.records.values()), published=V0)

    async def publish(self, version: Version, engines: list[str]) -> None:
        self.published = (version, engines)
        for name in engines:
            self._confirm(name, version)

    async def confirm(self, engine_id: str, version: Version) -> None:
        self.confirmed.append((engine_id, version))
        self._confirm(engine_id, version)

    async def withdraw(self, engine_ids: list[str]) -> None:
        for name in engine_ids:
            self.records[name] = msgspec.structs.replace(self.records[name], version=None)
        self._bump()

    async def remove_engine(self, engine_id: str, reason: str) -> None:
        del self.records[engine_id]
        self.removed[engine_id] = reason
        self._bump()

    def _bump(self) -> None:
        self.revision += 1
        self.changed.set()

    def _confirm(self, name: str, version: Version) -> None:
        self.records[name] = msgspec.structs.replace(self.records[name], version=version)
        self._bump()


def buckets(value: float = 1.0) -> list[Bucket]:
    return list(make_buckets([("a", torch.full((4,), value)), ("b", torch.full((4,), value))], 16))


# Those that a test made.
FLEETS: list[Fleet] = []


def make_fleet(
    directory: Directory,
    transport: TransportName = "ipc",
    timeout_s: float = 5.0,
    engine_wait_s: float = 0.3,
    sync: WeightSyncConfig | None = None,
    note: NoteStage = lambda engine, version, stage: None,
    shares: Callable[[EngineRecord], bool] = lambda record: True,
) -> Fleet:
    sync = sync or WeightSyncConfig()
    sync = msgspec.structs.replace(sync, way=(transport, *sync.options), timeout_s=timeout_s)
    FLEETS.append(Fleet(directory, directory.connect, sync, engine_wait_s, note=note, shares=shares))
    return FLEETS[-1]


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def sparse(step: int) -> list[Bucket]:
    """Two buckets of 400 bytes, of which a few change with each step."""
    named = [(name, torch.zeros(100)) for name in ("a", "b")]
    for _, tensor in named:
        tensor[:step] = 1.0
    return list(make_buckets(named, 400))


# Names and shapes of small models of the known families, as the layouts want them.


def specs(
    *,
    layers: int = 2,
    hidden: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 2,
    inner: int = 12,
    vocab: int = 10,
    experts: int = 0,
    stacked: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    dtype: str = "float32",
) -> dict[str, TensorSpec]:
    """Llama; with ``bias`` Qwen2, with ``qk_norm`` Qwen3, with ``experts`` Qwen3-MoE."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for which, size in rows.items():
            shapes[f"{at}.self_attn.{which}_proj.weight"] = (size, hidden)
            if bias:
                shapes[f"{at}.self_attn.{which}_proj.bias"] = (size,)
            if qk_norm and which != "v":
                shapes[f"{at}.self_attn.{which}_norm.weight"] = (head_dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if experts:
            shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        if stacked:
            shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, inner)
            continue
        for mlp in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            shapes[f"{at}.{mlp}.gate_proj.weight"] = shapes[f"{at}.{mlp}.up_proj.weight"] = (inner, hidden)
            shapes[f"{at}.{mlp}.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}
