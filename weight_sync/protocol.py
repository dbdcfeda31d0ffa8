"""Bodies of the weight routes, and the interfaces of engines and of their registry for the coordinator.

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
# First element and end of each dimension.
Box = list[tuple[Count, Count]]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class InitInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine joins a transfer. Coordinator -> engine.

    The engine's first worker has the rank ``rank_offset``, the others the following ones; ``ipc`` needs no more, and
    ``disk`` only the ``folder`` of the files. For the others the sender is rank 0 of a group of ``world_size``. They
    meet at the file ``store``, which only the user of both sides can open, or else at ``master_address:master_port``.
    ``timeout_s`` is for the rendezvous and for each transfer. ``shm_name`` is the shared memory that ``nearest``
    tries, or empty if it could not be allocated. ``collectives`` is the sender's version of NCCL, if it knows it.

    If several trainer ranks send, ``sources`` has an entry for each; if several workers of the engine receive,
    ``workers`` has. Then no other field counts.
    """

    backend: TransportName
    master_address: str = ""
    master_port: Port = 0
    store: str = ""
    rank_offset: Count = 0
    world_size: Count = 0
    timeout_s: Seconds = 0.0
    group_name: str = ""
    folder: str = ""
    shm_name: str = ""
    collectives: str = ""
    sources: list["InitInfo"] = []
    workers: list["InitInfo"] = []


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the memory of an accelerator, for processes on the same machine (``transports.py``).

    ``device`` is its UUID, ``offset`` is within the allocation of ``handle``. ``counter`` names the shared memory that
    counts the users of the allocation. If ``wait``, a reader waits for ``event`` first.
    """

    device: str
    handle: bytes
    nbytes: Count
    offset: Count
    counter: bytes
    counter_offset: Count
    event: bytes
    wait: bool


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Manifest of one bucket: the pieces in its flat bytes, in order. Coordinator -> engine.

    A ``delta`` travels as ``payload_bytes`` bytes and turns the bucket of version ``base``, which the engine holds,
    into this one; an engine that holds another version refuses it. ``finish`` adds an ``adapter`` times ``scale`` to
    the weights ``base``, or loads it beside them; an engine that has others, or no copy to add to, refuses it.

    A piece is a run of a parameter's elements, or a list of boxes of it, one after another. If several trainer
    ranks send pieces of the same parameters at the same time, ``sources`` has an entry for each; if the workers of the
    engine get slices, ``workers`` has. Then no other field counts except ``hold``.
    """

    # ``shapes`` are those of whole parameters, and types have torch's names.
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[Count]]
    # First element and number of elements of each piece. Both are empty if all parameters are whole. With boxes, the
    # start counts the elements of the parameter that come before, from any sender.
    starts: list[Count] = []
    numels: list[Count] = []
    # The boxes of each piece, or an empty list for a run; ``totals`` counts the elements of each parameter that travel,
    # from any sender. Both are empty if all pieces are runs.
    boxes: list[list[Box]] = []
    totals: list[Count] = []
    checksum: str
    # Place of the bytes for the ipc transport, on the host or on an accelerator, and for the disk transport.
    # ``device_memory`` has an entry for each worker, by its rank.
    shm_name: str = ""
    device_memory: list[DeviceMemory] = []
    file: str = ""
    # ``keep`` loads the bucket and keeps a copy for later deltas; ``stage`` only keeps it, for ``finish`` to load.
    # Both need the version, the bucket's position and the number of buckets.
    hold: Hold = "no"
    version: str = ""
    index: Count = 0
    count: Count = 0
    kind: Literal["full", "delta", "adapter"] = "full"
    base: str = ""
    scale: float = 0.0
    payload_bytes: Count = 0
    # Bytes that travel for the next bucket, which may arrive early. 0 if they are unknown, or this bucket is the last.
    next_bytes: Count = 0
    sources: list["UpdateInfo"] = []
    workers: list["UpdateInfo"] = []


Info = TypeVar("Info", InitInfo, UpdateInfo)


def of_worker(info: Info, rank: int) -> Info:
    """Return the entry for this worker of an engine. Raises WeightSyncError if it has none."""
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
        """Return the boxes that each worker needs of tensors with these shapes, or None if workers take whole tensors.

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
        """Return the version that the engine serves, or None before its first update."""
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
    """Duration, size and result of one publication.

    During ``waiting_seconds`` of ``seconds`` no engine was registered. ``pause_seconds`` is the longest pause of an
    engine, between its answers to pause and to resume. ``nbytes`` are those that the workers of one engine received,
    the most of all engines: one that holds the base gets fewer. ``engines`` confirmed the version; ``failures`` names
    the engines that were cut off, with phase, bucket and reason.
    """

    version: Version
    seconds: float
    waiting_seconds: float
    pause_seconds: float
    nbytes: int
    engines: list[str]
    failures: list[str]
