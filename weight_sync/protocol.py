"""Bodies of the weight routes, and what the coordinator needs of engines and of their registry.

The routes are vLLM's; the embedded engine serves the same ones. Nothing here imports torch, so an engine client can use
this module anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from rl_async.errors import WeightSyncError
from rl_async.messages import EngineList, Version

TransportName = Literal["nearest", "gloo", "ipc", "disk", "nccl"]
Hold = Literal["no", "keep", "stage"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Box = list[tuple[Count, Count]]  # first element and end, per dimension
Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class InitInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine joins a transfer. Coordinator -> engine.

    ``ipc`` needs only the backend, ``disk`` only the folder. For the others the sender is rank 0 of a group of
    ``world_size``, whose store is the file ``store``, or else at ``master_address:master_port``.
    """

    backend: TransportName
    master_address: str = ""
    master_port: Port = 0
    # The path of a file that only the user of both sides can open, on one machine.
    store: str = ""
    rank_offset: Count = 0  # rank of this engine's first worker; the others have the following ones
    world_size: Count = 0
    timeout_s: Seconds = 0.0  # of the rendezvous and of each transfer
    group_name: str = ""
    folder: str = ""  # disk: where the files are
    shm_name: str = ""  # nearest: shared memory to try; empty: there was no room for it
    sources: list["InitInfo"] = []  # of each trainer rank that sends, if there are several; then nothing else counts
    workers: list["InitInfo"] = []  # of each worker of the engine, if there are several; then nothing else counts


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where bytes are in the memory of an accelerator, for processes on the same machine (``device_memory.py``)."""

    device: str  # UUID
    handle: bytes  # of the allocation
    nbytes: Count
    offset: Count  # in the allocation
    counter: bytes  # name of the shared memory in which users of the allocation are counted
    counter_offset: Count
    event: bytes  # until which a reader waits
    wait: bool  # whether it must


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Manifest of one bucket: what its flat bytes hold, in this order. Coordinator -> engine.

    A ``delta`` travels as ``payload_bytes`` bytes and turns the bucket of version ``base``, which the engine holds,
    into this one; an engine that holds another version refuses it. An ``adapter`` bucket holds what ``finish`` adds to
    the weights ``base``; an engine without a copy of those refuses it.

    A piece is a run of a parameter's elements, or a list of boxes of it, one after another. With ``sources`` several
    trainer ranks send pieces of the same parameters at the same time.
    """

    names: list[str]
    dtype_names: list[str]  # as in torch: float32, bfloat16, ...
    shapes: list[list[Count]]  # of whole parameters
    # First element of each piece of a parameter, or of its boxes: how many elements come before them, from anyone.
    starts: list[Count] = []  # empty if all parameters are whole
    numels: list[Count] = []  # number of elements of each piece; empty as ``starts``
    boxes: list[list[Box]] = []  # of each piece; empty: a run of elements. Empty as a whole: all are runs
    totals: list[Count] = []  # with ``boxes``: number of elements that travel of each parameter, from anyone
    checksum: str  # of the bucket's bytes (buckets/checksum.py)
    shm_name: str = ""  # ipc: the shared memory that holds the bytes
    device_memory: DeviceMemory | None = None  # ipc: the same, if it is on an accelerator
    file: str = ""  # disk: the file that holds the bytes
    hold: Hold = "no"  # keep: load, and keep a copy for later deltas; stage: keep only, ``finish`` loads
    # Unless ``hold`` is no: the version, the bucket's position and the number of buckets.
    version: str = ""
    index: Count = 0
    count: Count = 0
    kind: Literal["full", "delta", "adapter"] = "full"
    base: str = ""  # delta: the version it changes; adapter: the weights it is added to
    scale: float = 0.0  # adapter: factor on the product of its matrices
    payload_bytes: Count = 0  # delta: bytes that travel
    next_bytes: Count = 0  # bytes that travel for the next bucket, which may arrive early; 0: none, or not known
    sources: list["UpdateInfo"] = []  # of each trainer rank that sends, if there are several; then nothing else counts
    workers: list["UpdateInfo"] = []  # of each worker of the engine, if they get slices; then nothing else counts


Info = TypeVar("Info", InitInfo, UpdateInfo)


def of_worker(info: Info, rank: int) -> Info:
    """Return what concerns this worker of an engine. Raises WeightSyncError if there is nothing for it."""
    if not info.workers:
        return info
    if rank >= len(info.workers):
        raise WeightSyncError(f"weights were cut for {len(info.workers)} workers, and this is number {rank}")
    return info.workers[rank]


class InitTransferBody(msgspec.Struct, frozen=True):
    """Body of ``POST /init_weight_transfer_engine``, sent once per engine and group."""

    init_info: InitInfo


class UpdateWeightsBody(msgspec.Struct, frozen=True):
    """Body of ``POST /update_weights``, sent once per bucket."""

    update_info: UpdateInfo


class FinishUpdateBody(msgspec.Struct, frozen=True):
    """Body of ``POST /finish_weight_update``; the version as ``lineage.step``."""

    weight_version: str


class EngineControl(Protocol):
    """One engine as the coordinator sees it.

    Methods raise EngineError. They have no deadline shorter than their caller's, who cancels them.
    """

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop decoding; ``keep`` holds the requests in flight and recomputes their caches on resume."""
        ...

    async def resume(self) -> None:
        """Continue decoding, requests in flight first."""
        ...

    async def workers(self) -> int:
        """Return how many processes of the engine hold parts of the weights; each joins transfer groups by itself."""
        ...

    async def boxes(self, tensors: Mapping[str, list[int]]) -> list[list[list[Box]]] | None:
        """Return, by worker, the boxes that it needs of each tensor, whose shapes are given; None: it takes all whole.

        The engine must not be in the middle of an update.
        """
        ...

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a transfer group with all workers, leaving any earlier one; return when the whole group has formed."""
        ...

    async def start_update(self, staged: bool = False) -> None:
        """Begin an update and discard an unfinished one. With ``staged`` the engine keeps decoding."""
        ...

    async def update(self, info: UpdateInfo) -> None:
        """Receive and load one bucket; return when it is loaded and its checksum has been verified."""
        ...

    async def finish_update(self, version: Version) -> None:
        """End the update: all buckets were sent, and the engine's weights are now ``version``."""
        ...

    async def version(self) -> Version | None:
        """Return the version that the engine serves; None before its first update."""
        ...

    async def sleep(self, level: int) -> None:
        """Release device memory: level 1 keeps the weights on the host, level 2 drops them."""
        ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Allocate device memory again for ``weights`` and/or ``kv_cache``."""
        ...

    async def is_sleeping(self) -> bool:
        """Return whether any device memory that ``sleep`` released is still missing."""
        ...

    async def close(self) -> None:
        """Close the connections to the engine, which keeps running."""
        ...


class EngineDirectory(Protocol):
    """The registry of engines, kept by the transfer queue. Methods raise QueueLost after their own deadline."""

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        """Return the registry as soon as its revision exceeds ``after``, or after ``wait_s``."""
        ...

    async def publish(self, version: Version, engines: list[str]) -> object:
        """Record that ``version`` is published and that these engines serve it."""
        ...

    async def confirm(self, engine_id: str, version: Version) -> object:
        """Record that a late engine has caught up with ``version``."""
        ...

    async def withdraw(self, engine_ids: list[str]) -> object:
        """Take engines out of traffic until they are published or confirmed again; their requests move to others."""
        ...

    async def remove_engine(self, engine_id: str, reason: str) -> object:
        """Remove an engine, so that no request is routed to it any more."""
        ...


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """Duration, size and result of one publication."""

    version: Version
    seconds: float  # the whole publication
    waiting_seconds: float  # part of ``seconds`` during which no engine was registered
    pause_seconds: float  # longest pause of an engine, from its answer to pause to its answer to resume
    nbytes: int  # bytes that the workers of one engine received: of deltas, if any group could use them
    engines: list[str]  # that confirmed the version
    failures: list[str]  # engines cut off: which, in which phase and bucket, why
