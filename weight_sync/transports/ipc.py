"""Hands buckets to engines on the same host through memory that both sides map: no sockets, one copy in, no copy out.

A bucket that was filled on the host goes through a segment of shared memory, one that was filled on an accelerator
through memory there (CUDA IPC, or HIP's), so that its bytes never leave the device. Two pieces of such memory are used
in turns.

The sender owns them. If it is killed, Python's resource tracker unlinks the segments, or the parent of the sender
(``rl_async.process.private_folder``); the driver frees device memory. torch counts who has opened a handle; memory that
its owner drops is reused once nobody has it open. An export counts one reader: a second that closes the same export
takes the unsigned counter below zero, and the memory is never freed. So each reader gets an export of its own.
"""

import _posixshmem
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rl_async.errors import WeightSyncError
from rl_async.process.private_folder import create_segment
from rl_async.torch_shared import settle
from rl_async.weight_sync.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import DeviceMemory, InitInfo, UpdateInfo


def exported(data: Tensor) -> DeviceMemory:
    """Return a handle of ``data``, uint8[nbytes], a whole tensor of its own, which the caller keeps alive.

    Raises WeightSyncError if the memory cannot be shared.
    """
    try:
        _, arguments = cast(tuple[Any, Any], reductions.reduce_tensor(data))
    except RuntimeError as error:
        raise WeightSyncError(
            f"cannot share memory of {data.device} with other processes: {error}; containers need --ipc=host for it; "
            "otherwise choose weight_sync.transport=gloo or disk"
        ) from error
    _, _, _, _, _, _, index, handle, nbytes, offset, _, counter, counter_offset, event, wait = arguments
    return DeviceMemory(
        device=_device_names(data.device.type)[index],
        handle=handle,
        nbytes=nbytes,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        wait=wait,
    )


def opened(memory: DeviceMemory) -> Tensor:
    """Return the memory of another process as uint8[nbytes]; it stays open as long as the tensor and its views.

    Raises WeightSyncError if this process does not see the device, or if the handle has become invalid.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    names = _device_names(found.type) if found is not None else []
    if found is None or memory.device not in names:
        raise WeightSyncError(
            f"the trainer's weights are on device {memory.device}, and this engine sees {names or 'none'}; "
            "weight_sync.transport=ipc is for engines on the trainer's devices, use nccl, gloo or disk"
        )
    rebuild = getattr(reductions, f"rebuild_{found.type}_tensor")
    try:
        return rebuild(
            Tensor,
            torch.Size([memory.nbytes]),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            names.index(memory.device),
            memory.handle,
            memory.nbytes,
            memory.offset,
            False,
            memory.counter,
            memory.counter_offset,
            memory.event,
            memory.wait,
        )
    except RuntimeError as error:
        raise WeightSyncError(f"cannot open memory of device {memory.device}: {error}") from error


def _device_names(kind: str) -> list[str]:
    """Return the UUIDs of the devices that this process sees; indices of the same device differ between processes."""
    module: Any = torch.get_device_module(kind)
    return [str(module.get_device_properties(index).uuid) for index in range(torch.accelerator.device_count())]


class HostSlot:
    """A segment of shared memory for one bucket at a time. ``fields`` of a manifest name it to engines."""

    device = torch.device("cpu")

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._segment = nbytes, new_segment(nbytes)
        self.name = self._segment.name
        self.fields: dict[str, Any] = {"shm_name": self.name}

    def fill(self, data: Tensor) -> None:
        """Copy ``data``, uint8[up to nbytes], to the beginning."""
        assert self._segment.buf is not None, "the slot is closed"
        self._segment.buf[: data.numel()] = data.numpy().data

    def close(self) -> None:
        """Release the memory; processes that have mapped it keep their mapping."""
        self._segment.close()
        self._segment.unlink()


class DeviceSlot:
    """Memory of an accelerator for one bucket at a time. ``fields`` of a manifest name it to ``readers`` workers."""

    def __init__(self, nbytes: int, device: torch.device, readers: int) -> None:
        self.nbytes, self.device = nbytes, device
        data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._data: Tensor | None = data
        self.fields: dict[str, Any] = {"device_memory": [exported(data) for _ in range(readers)]}

    def fill(self, data: Tensor) -> None:
        """Copy ``data``, uint8[up to nbytes], to the beginning; return when it is there."""
        assert self._data is not None, "the slot is closed"
        self._data[: data.numel()].copy_(data)
        # The engine does not wait for this process's stream.
        settle(self._data)

    def close(self) -> None:
        """Release the memory; processes that have opened it keep it."""
        self._data = None


class SharedMemorySender:
    """One slot per staged bucket, read by the ``workers`` of each engine. Engines need no connection to it."""

    def __init__(self, workers: Sequence[int] = (1,)) -> None:
        self._workers = workers
        self._staged: deque[HostSlot | DeviceSlot] = deque()
        self._spare: list[HostSlot | DeviceSlot] = []
        # A thread may still stage a bucket while the sender is closed.
        self._lock = threading.Lock()
        self._closed = False

    def init_info(self, member: int) -> InitInfo:
        """Tell engine ``member`` its rank among the readers; the manifest of each bucket names its slot."""
        return InitInfo(backend="ipc", rank_offset=sum(self._workers[:member]))

    def reserve(self, nbytes: int) -> str:
        """Make both slots for buckets on the host beforehand; return the name of one segment.

        Raises WeightSyncError if shared memory is full.
        """
        slots: list[HostSlot] = []
        for _ in range(2):
            slots.append(HostSlot(nbytes))
            self._spare.append(slots[-1])
        return slots[0].name

    def connect(self) -> None:
        """Do nothing: engines do not connect to the sender."""

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Copy the bucket into a slot on the device where it was filled, named in the manifest."""
        with self._lock:
            if self._closed:
                raise WeightSyncError("a bucket was staged after the transfer was closed")
            slot = self._slot(bucket)
            self._staged.append(slot)
            slot.fill(bucket.data)
        return msgspec.structs.replace(bucket.info, **slot.fields)

    def send(self, bucket: Bucket) -> None:
        """Do nothing: ``stage`` has copied the bytes."""

    def unstage(self) -> None:
        """Free the oldest slot for a later bucket: no engine will read it any more."""
        with self._lock:
            if self._staged:
                self._spare.append(self._staged.popleft())

    def close(self) -> None:
        """Release all slots and refuse further buckets."""
        with self._lock:
            self._closed = True
            for slot in (*self._staged, *self._spare):
                slot.close()
            self._staged.clear()
            self._spare.clear()

    def _slot(self, bucket: Bucket) -> HostSlot | DeviceSlot:
        """Return a spare slot that fits, or a new one. Spare slots that do not fit are closed."""
        while self._spare:
            slot = self._spare.pop()
            if slot.nbytes >= bucket.nbytes and slot.device == bucket.device:
                return slot
            slot.close()
        if bucket.device.type == "cpu":
            return HostSlot(bucket.nbytes)
        return DeviceSlot(bucket.nbytes, bucket.device, sum(self._workers))


class SharedMemoryReceiver:
    """Maps the slots that manifests name, on the engine's side."""

    def __init__(self, info: InitInfo) -> None:
        """Take the rank from the info; nothing is joined."""
        self._rank = info.rank_offset
        # At most as many as the sender has. They stay open from bucket to bucket: to map pages again costs time.
        self._open: dict[str | DeviceMemory, Tensor] = {}

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return one bucket's bytes, uint8[nbytes], where they are. They are read-only and valid until the answer."""
        if info.device_memory and self._rank >= len(info.device_memory):
            raise WeightSyncError(f"a bucket for {len(info.device_memory)} workers, and this has rank {self._rank}")
        nbytes, where = wire_bytes(info), info.device_memory[self._rank] if info.device_memory else info.shm_name
        if isinstance(where, DeviceMemory) and nbytes > where.nbytes:
            raise WeightSyncError(f"a bucket of {nbytes} bytes in device memory of {where.nbytes} bytes")
        if where not in self._open:
            # The sender has two slots, so it has dropped one of these.
            while len(self._open) > 1:
                del self._open[next(iter(self._open))]
            self._open[where] = opened(where) if isinstance(where, DeviceMemory) else mapped(where)
        memory = self._open[where]
        if nbytes > memory.numel():
            raise WeightSyncError(f"a bucket of {nbytes} bytes in shared memory of {memory.numel()} bytes")
        return memory[:nbytes]

    def close(self) -> None:
        """Close what is open, once no tensor refers to it."""
        self._open.clear()


def new_segment(nbytes: int) -> SharedMemory:
    """Create a segment with all its pages allocated.

    Otherwise a write to a full /dev/shm would end the process with SIGBUS. Raises WeightSyncError if it is full.
    """
    segment = None
    try:
        segment = create_segment(nbytes)
        descriptor = _posixshmem.shm_open(f"/{segment.name}", os.O_RDWR, mode=0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        if segment is not None:
            segment.close()
            segment.unlink()
        raise WeightSyncError(
            f"cannot allocate {nbytes} bytes of shared memory: {error}; make /dev/shm larger (docker run --shm-size), "
            "lower weight_sync.bucket_bytes, or choose another weight_sync.transport"
        ) from error
    return segment


def mapped(name: str, *, shared: bool = False) -> Tensor:
    """Map a whole segment, uint8[its size]; the mapping lives as long as the tensor and its views.

    Writes to it stay private unless ``shared``. Raises WeightSyncError for an unknown segment.
    """
    if not name or "/" in name:
        raise WeightSyncError(f"{name!r} is not a name of a shared memory segment")
    flags, access = (os.O_RDWR, mmap.ACCESS_WRITE) if shared else (os.O_RDONLY, mmap.ACCESS_COPY)
    try:
        # Not SharedMemory: until Python 3.13 it makes the reader's resource tracker unlink the sender's segment.
        descriptor = _posixshmem.shm_open(f"/{name}", flags, mode=0o600)
        try:
            region = mmap.mmap(descriptor, 0, access=access)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"cannot map the shared memory {name}: {error}") from error
    return torch.frombuffer(region, dtype=torch.uint8)
