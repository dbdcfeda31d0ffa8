"""Transports: they carry buckets from the trainer to a group of engines, by gloo, NCCL, shared memory or files.

In: buckets, one after another, from ``wave``. Out: the same bytes on each engine, for ``receiver`` to verify. A
transport is a ``Sender`` and a ``Receiver``; to add one, write both, add a line to ``TRANSPORTS``, its name to
``protocol.TransportName`` and to the config's ``weight_sync.way``. Those over a process group are in
``process_groups.py``.

``nearest``, the default, chooses: shared memory if all of a group can open this process's, else gloo. Every engine
tries to open a segment that the sender names, and says in the group's store whether it could. Addresses prove nothing:
containers on one machine may have a /dev/shm of their own each, and so does another user's process.

Shared memory (``ipc``): a bucket that was filled on the host goes through a segment of shared memory, one that was
filled on an accelerator through memory there (CUDA IPC, or HIP's), so that its bytes never leave the device. No
sockets, one copy in, no copy out; two pieces of such memory are used in turns. The sender owns them. If it is killed,
Python's resource tracker unlinks the segments, or the parent of the sender (``rl_async.process.private_folder``); the
driver frees device memory. torch counts who has opened a handle; memory that its owner drops is reused once nobody
has it open. An export counts one reader: a second that closes the same export takes the unsigned counter below zero,
and the memory is never freed. So each reader gets an export of its own.

Files (``disk``) lie in a folder that trainer and engines share, on any file system. A file holds one tensor,
``bucket`` uint8[nbytes]. It appears under its name only when it is complete and durable, and is deleted as soon as
every engine has read it. Files that a killed trainer left are deleted by the next one.
"""

import _posixshmem
import mmap
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing import reductions

from rl_async.accelerators import shares_memory
from rl_async.errors import WeightSyncError
from rl_async.files import force_to_disk, written_whole
from rl_async.process.private_folder import create_segment
from rl_async.torch_shared import settle
from rl_async.weight_sync.buckets import Bucket, wire_bytes
from rl_async.weight_sync.process_groups import GlooReceiver, GlooSender, NcclReceiver, NcclSender, store_of
from rl_async.weight_sync.protocol import DeviceMemory, InitInfo, TransportName, UpdateInfo

KEY = "bucket"


class DiskSender:
    """Writes one file per staged bucket into ``folder``, which belongs to this sender alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0
        self._files: deque[Path] = deque()
        delete_files(folder)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise WeightSyncError(f"weight_sync.folder: cannot create {folder}: {error}") from error

    def init_info(self, member: int) -> InitInfo:
        """Tell engines the folder; the manifest of each bucket names its file."""
        return InitInfo(backend="disk", folder=str(self._folder.resolve()))

    def connect(self) -> None:
        """Do nothing: engines read the files without a connection."""

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Write the bucket to a file whose name was never used, so that no engine has it cached."""
        file = self._folder / f"{self._written:06d}.safetensors"
        self._written += 1
        try:
            _write(file, bucket)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"weight_sync.folder: cannot write {file}: {error}") from error
        self._files.append(file)
        return msgspec.structs.replace(bucket.info, file=file.name)

    def send(self, bucket: Bucket) -> None:
        """Do nothing: ``stage`` has written the bytes."""

    def unstage(self) -> None:
        """Delete the oldest file; engines that still map it keep their mapping."""
        if self._files:
            self._files.popleft().unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the folder. A thread that still writes after a deadline may leave a file, which the next trainer
        deletes.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._files.clear()


class DiskReceiver:
    """Reads the files that manifests name, on the engine's side."""

    def __init__(self, info: InitInfo) -> None:
        self._folder = Path(info.folder)
        try:
            usable = self._folder.is_dir()
        except OSError:
            # The name is too long.
            usable = False
        if not usable:
            raise WeightSyncError(
                f"{self._folder} is not a folder on this host; set weight_sync.folder to one that trainer and "
                "engines share"
            )

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return the bytes sent for one bucket, uint8[nbytes], mapped from its file."""
        if not info.file or "/" in info.file:
            raise WeightSyncError(f"{info.file!r} is not a plain file name")
        path = self._folder / info.file
        try:
            data = load_file(path)[KEY]
        except (OSError, SafetensorError, KeyError) as error:
            raise WeightSyncError(f"cannot read weights from {path}: {type(error).__name__}: {error}") from error
        if data.numel() != wire_bytes(info):
            raise WeightSyncError(f"{path} has {data.numel()} bytes of weights, its manifest {wire_bytes(info)}")
        return data

    def close(self) -> None:
        """Do nothing: mappings end with the tensors over them."""


def delete_files(folder: Path) -> None:
    """Delete the folder with its files, if it exists. Raises WeightSyncError if that fails."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise WeightSyncError(f"weight_sync.folder: cannot delete old weights in {folder}: {error}") from error


def _write(path: Path, bucket: Bucket) -> None:
    """Complete and durable before it has its name, on other hosts too."""
    with written_whole(path) as unfinished:
        save_file({KEY: bucket.data}, unfinished)
        force_to_disk(unfinished)
    force_to_disk(path.parent)


def exported(data: Tensor) -> DeviceMemory:
    """Return a handle of ``data``, uint8[nbytes], a whole tensor of its own, which the caller keeps alive.

    Raises WeightSyncError if the memory cannot be shared.
    """
    try:
        _, arguments = cast(tuple[Any, Any], reductions.reduce_tensor(data))
    except RuntimeError as error:
        raise WeightSyncError(
            f"cannot share memory of {data.device} with other processes: {error}; containers need --ipc=host for it; "
            "otherwise choose weight_sync.way=gloo or disk"
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
            "weight_sync.way=ipc is for engines on the trainer's devices, use nccl, gloo or disk"
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
            "lower weight_sync.bucket_bytes, or choose another weight_sync.way"
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


CHOICE = "nearest"
MEMORY, NETWORK = "memory", "network"


class NearestSender:
    """A `Sender` to the ``workers`` of each engine, who meet as gloo's do. Two buckets of ``bucket_bytes`` must fit."""

    def __init__(
        self,
        workers: Sequence[int],
        group_name: str,
        timeout_s: float,
        bucket_bytes: int,
        host: str = "127.0.0.1",
        folder: Path | None = None,
    ) -> None:
        self._gloo, self._memory = GlooSender(workers, group_name, timeout_s, host, folder), SharedMemorySender()
        self._chosen: GlooSender | SharedMemorySender = self._gloo
        self._name, self._timeout_s = group_name, timeout_s
        self._members = [_key(rank) for rank in range(1, 1 + sum(workers))]
        try:
            self._segment = self._memory.reserve(bucket_bytes)
        except WeightSyncError:
            # /dev/shm is too small, as it is in a container by default.
            self._segment = ""

    def init_info(self, member: int) -> InitInfo:
        """Describe how engine ``member`` joins: as gloo's, with the name of shared memory to try."""
        return msgspec.structs.replace(self._gloo.init_info(member), backend="nearest", shm_name=self._segment)

    def connect(self) -> None:
        """Choose what all engines can do, once they have said so, and form the gloo group if it is that."""
        store = self._gloo.store()
        try:
            store.wait(self._members, timedelta(seconds=self._timeout_s))
            choice = MEMORY if all(store.get(member).decode() == MEMORY for member in self._members) else NETWORK
            store.set(CHOICE, choice)
        except RuntimeError as error:
            raise WeightSyncError(f"{self._name}: not all of {len(self._members)} workers came: {error}") from error
        if choice == MEMORY:
            self._chosen = self._memory
        else:
            self._memory.close()
            self._gloo.connect()

    def stage(self, bucket: Bucket) -> UpdateInfo:
        return self._chosen.stage(bucket)

    def send(self, bucket: Bucket) -> None:
        self._chosen.send(bucket)

    def unstage(self) -> None:
        self._chosen.unstage()

    def close(self) -> None:
        self._memory.close()
        self._gloo.close()


class NearestReceiver:
    """The engine's `Receiver`; the constructor joins."""

    def __init__(self, info: InitInfo) -> None:
        store = store_of(info)
        try:
            store.set(_key(info.rank_offset), MEMORY if _opens(info.shm_name) else NETWORK)
            choice = store.get(CHOICE).decode()
        except RuntimeError as error:
            raise WeightSyncError(f"{info.group_name}: the sender did not choose a transport: {error}") from error
        near = choice == MEMORY
        self._chosen: GlooReceiver | SharedMemoryReceiver = SharedMemoryReceiver(info) if near else GlooReceiver(info)

    def receive(self, info: UpdateInfo) -> Tensor:
        return self._chosen.receive(info)

    def close(self) -> None:
        self._chosen.close()


def _opens(segment: str) -> bool:
    """Whether this process can open the sender's memory. The mapping is dropped at once."""
    try:
        mapped(segment)
    except WeightSyncError:
        return False
    return True


def _key(rank: int) -> str:
    return f"{CHOICE}/{rank}"


class Sender(Protocol):
    """Sends buckets to one fixed set of engines. Each method blocks no longer than the sender's deadline.

    Methods raise WeightSyncError; a sender that has failed is closed and never used again. The caller goes through
    ``stage``, ``send``, ``unstage`` for each bucket in turn. It may stage the next bucket, from another thread, before
    it unstages the current one, so at most two are staged at a time.
    """

    def init_info(self, member: int) -> InitInfo:
        """Describe how the engine with this number (from 0) joins."""
        ...

    def connect(self) -> None:
        """Form the group with all engines, which join at the same time."""
        ...

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Prepare a bucket, or start sending it; return the manifest to give to the engines."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Transfer ``bucket``, the oldest staged one, while the engines receive it.

        Returning does not prove that it arrived; only the engines' replies do.
        """
        ...

    def unstage(self) -> None:
        """Release the oldest staged bucket: no engine will read it any more."""
        ...

    def close(self) -> None:
        """Release everything; may be called twice."""
        ...


class Receiver(Protocol):
    """The engine's end of a transport. The constructor joins the transfer. Methods raise WeightSyncError."""

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return the bytes of one bucket, uint8[nbytes], valid until the next call."""
        ...

    def close(self) -> None:
        """Leave the transfer at once, even while a bucket is in flight."""
        ...


class SenderSetup(NamedTuple):
    """Everything a sender may be built from; each transport uses a part of it.

    ``workers`` counts those of each engine. ``group_name`` is unique within the run. ``timeout_s`` is for forming the
    group and for each transfer. ``host`` is the address of this process as engines reach it; engines on this machine
    meet it in files of the folder ``stores`` instead. The disk transport makes its folder in ``folder``. No bucket is
    larger than ``bucket_bytes``.
    """

    workers: tuple[int, ...]
    group_name: str
    timeout_s: float
    host: str
    folder: Path
    bucket_bytes: int
    stores: Path | None = None


class Transport(NamedTuple):
    """Names the sender and the receiver of a transport."""

    sender: Callable[[SenderSetup], Sender]
    receiver: Callable[[InitInfo], Receiver]


TRANSPORTS: dict[TransportName, Transport] = {
    "gloo": Transport(lambda s: GlooSender(s.workers, s.group_name, s.timeout_s, s.host, s.stores), GlooReceiver),
    "nearest": Transport(
        lambda s: NearestSender(s.workers, s.group_name, s.timeout_s, s.bucket_bytes, s.host, s.stores), NearestReceiver
    ),
    "ipc": Transport(lambda s: SharedMemorySender(s.workers), SharedMemoryReceiver),
    "nccl": Transport(lambda s: NcclSender(s.workers, s.group_name, s.timeout_s, s.host, s.stores), NcclReceiver),
    "disk": Transport(lambda s: DiskSender(s.folder / s.group_name), DiskReceiver),
}


def bucket_device(transport: TransportName, device: str) -> str:
    """Return where a trainer with its model on ``device`` fills buckets: there, or on the host if the transport cannot
    send from there.
    """
    there = transport == "nccl" or (transport == "ipc" and shares_memory(device.partition(":")[0]))
    return device if there else "cpu"
