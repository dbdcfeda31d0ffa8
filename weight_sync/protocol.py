"""Bodies of the weight routes, and what the coordinator needs of engines and of their registry.

The routes are vLLM's; the embedded engine serves the same ones. Nothing here imports torch, so an engine client can use
this module anywhere.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from rl_async.messages import EngineList, Version

TransportName = Literal["gloo", "ipc", "disk", "nccl"]
Hold = Literal["no", "keep", "stage"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]


class InitInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine joins a transfer. Coordinator -> engine.

    ``ipc`` needs only the backend, ``disk`` only the folder. For ``gloo`` and ``nccl`` the sender is rank 0 of a group
    of ``world_size`` and serves the group's store at ``master_address:master_port``.
    """

    backend: TransportName
    master_address: str = ""
    master_port: Port = 0
    rank_offset: Count = 0  # rank of this engine (of its first worker)
    world_size: Count = 0
    timeout_s: Seconds = 0.0  # of the rendezvous and of each transfer
    group_name: str = ""
    folder: str = ""  # disk: where the files are


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Manifest of one bucket: what its flat bytes hold, in this order. Coordinator -> engine.

    A ``delta`` travels as ``payload_bytes`` bytes and turns the bucket of version ``base``, which the engine holds,
    into this one; an engine that holds another version refuses it. An ``adapter`` bucket holds what ``finish`` adds to
    the weights ``base``; an engine without a copy of those refuses it.
    """

    names: list[str]
    dtype_names: list[str]  # as in torch: float32, bfloat16, ...
    shapes: list[list[Count]]  # of whole parameters
    starts: list[Count] = []  # first element of each piece of a parameter; empty if all parameters are whole
    numels: list[Count] = []  # number of elements of each piece; empty as ``starts``
    checksum: str  # xxh3_128 of the bucket's bytes, in hex
    shm_name: str = ""  # ipc: the shared memory that holds the bytes
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

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a transfer group, leaving any earlier one; return when the whole group has formed."""
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

    async def remove_engine(self, engine_id: str, reason: str) -> object:
        """Remove an engine, so that no request is routed to it any more."""
        ...


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """Duration, size and result of one publication."""

    version: Version
    seconds: float  # the whole publication
    waiting_seconds: float  # part of ``seconds`` during which no engine was registered
    pause_seconds: float  # longest pause of an engine, from its answer to pause to its answer to resume
    nbytes: int  # bytes of buckets that one engine received: of deltas, if any group could use them
    engines: list[str]  # that confirmed the version
    failures: list[str]  # engines cut off: which, in which phase and bucket, why
