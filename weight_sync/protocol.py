"""Bodies of the weight routes, and what the coordinator needs of engines and of their registry.

The routes are vLLM's; the embedded engine serves the same ones. Nothing here imports torch, so that an engine client
can use it anywhere.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from rl_async.messages import EngineList, Version

Backend = Literal["gloo", "ipc", "disk", "nccl"]
Hold = Literal["no", "keep", "stage"]


class InitInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine joins a transfer; ``ipc`` needs the backend only, ``disk`` the folder. Coordinator -> engine.

    With ``gloo`` and ``nccl`` the sender is rank 0 of a group of ``world_size`` and holds the store at
    ``master_address:master_port``.
    """

    backend: Backend
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 0  # the rank of this engine (of its first worker)
    world_size: int = 0
    timeout_s: float = 0.0  # of the rendezvous and of each transfer
    group_name: str = ""
    folder: str = ""  # disk: where the files are


class UpdateInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Manifest of one bucket: what its flat bytes hold, in this order. Coordinator -> engine.

    A ``delta`` travels as ``payload_bytes`` bytes and makes the bucket out of the one that the engine holds of version
    ``base``; an engine that holds another version refuses it. One of kind ``adapter`` holds what ``finish`` adds to the
    weights ``base``; an engine that holds no copy of these refuses it.
    """

    names: list[str]
    dtype_names: list[str]  # as in torch: float32, bfloat16, ...
    shapes: list[list[int]]  # of whole parameters
    starts: list[int] = []  # where a parameter is cut: the first element of each piece; empty: all are whole
    numels: list[int] = []  # and how many elements each piece has
    checksum: str  # xxh3_128 of the bucket's bytes, in hex
    shm_name: str = ""  # ipc: the shared memory that holds the bytes
    file: str = ""  # disk: the file that holds the bytes
    hold: Hold = "no"  # keep: load, and keep a copy for later deltas; stage: keep only, ``finish`` loads
    version: str = ""  # what follows is set unless hold is no: the version, the bucket's place, how many there are
    index: int = 0
    count: int = 0
    kind: Literal["full", "delta", "adapter"] = "full"
    base: str = ""  # delta: the version that it changes; adapter: the weights to which it is added
    scale: float = 0.0  # adapter: what the product of its matrices counts
    payload_bytes: int = 0  # delta
    next_bytes: int = 0  # that travel for the bucket after this one, which may arrive meanwhile; 0: none, or not known


class InitTransferBody(msgspec.Struct, frozen=True):
    """Body of ``POST /init_weight_transfer_engine``."""

    init_info: InitInfo


class UpdateWeightsBody(msgspec.Struct, frozen=True):
    """Body of ``POST /update_weights``, sent once per bucket."""

    update_info: UpdateInfo


class FinishUpdateBody(msgspec.Struct, frozen=True):
    """Body of ``POST /finish_weight_update``; the version as ``lineage.step``."""

    weight_version: str


class EngineControl(Protocol):
    """One engine as the coordinator sees it.

    Methods raise EngineError. They set no deadline of their own below that of their caller, who cancels them.
    """

    async def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop decoding; ``keep`` holds the requests in flight and recomputes their caches on resume."""
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a transfer group, leaving any earlier one; returns when the whole group has met."""
        ...

    async def start_update(self, staged: bool = False) -> None:
        """Begin an update; one that was left unfinished is forgotten. ``staged``: the engine goes on decoding."""
        ...

    async def update(self, info: UpdateInfo) -> None:
        """Receive and load one bucket; returns when it is loaded and its checksum was right."""
        ...

    async def finish_update(self, version: Version) -> None:
        """All buckets were sent: the engine's weights are now ``version``."""
        ...

    async def version(self) -> Version | None:
        """The version that the engine serves; None before its first update."""
        ...

    async def sleep(self, level: int) -> None:
        """Give up device memory: 1 keeps the weights on the host, 2 forgets them."""
        ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Take back device memory for ``weights`` and/or ``kv_cache``."""
        ...

    async def is_sleeping(self) -> bool:
        """Whether it gave up device memory and has not taken all of it back."""
        ...

    async def close(self) -> None:
        """Close the connections to the engine."""
        ...


class EngineDirectory(Protocol):
    """The registry of engines, kept by the transfer queue. Methods raise QueueLost after their own deadline."""

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> EngineList:
        """The registry, at once or when its revision passes ``after``, at the latest after ``wait_s``."""
        ...

    async def publish(self, version: Version, engines: list[str]) -> object:
        """These engines confirmed ``version``."""
        ...

    async def confirm(self, engine_id: str, version: Version) -> object:
        """A late engine has caught up."""
        ...

    async def remove_engine(self, engine_id: str, reason: str) -> object:
        """Route nothing to this engine any more."""
        ...


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one publication took."""

    version: Version
    seconds: float  # the whole publication
    waiting_seconds: float  # of these, those in which no engine was registered
    pause_seconds: float  # the longest pause of an engine, from its answer to pause to its answer to resume
    nbytes: int  # of the buckets as one engine got them: deltas, if there was a group that could use them
    engines: list[str]  # that confirmed the version
    failures: list[str]  # engines cut off: which, in which phase and bucket, why
