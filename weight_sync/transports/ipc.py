"""Sends buckets through shared memory to engines on the same host: no sockets, one copy in, no copy out.

The sender owns each segment and unlinks it; if the sender is killed, Python's resource tracker unlinks it, or whoever
started the sender (``rl_async.process.shared_memory``).
"""

import _posixshmem
import mmap
import os
import threading
from collections import deque
from multiprocessing.shared_memory import SharedMemory

import msgspec
import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.process.shared_memory import segment_name
from rl_async.weight_sync.buckets.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo


class SharedMemorySender:
    """One segment per staged bucket, read by any number of engines. Engines need no connection to it."""

    def __init__(self) -> None:
        self._segments: deque[SharedMemory] = deque()
        self._lock = threading.Lock()  # a thread may still stage a bucket while the sender is closed
        self._closed = False

    def init_info(self, member: int) -> InitInfo:
        """Tell engines the transport; the manifest of each bucket names its segment."""
        return InitInfo(backend="ipc")

    def connect(self) -> None:
        """Do nothing: there is no group to form."""

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Copy the bucket into a new segment, named in the manifest."""
        with self._lock:
            if self._closed:
                raise WeightSyncError("a bucket was staged after the transfer was closed")
            segment = new_segment(bucket.nbytes)
            assert segment.buf is not None  # only after close
            segment.buf[: bucket.nbytes] = bucket.data.numpy().data
            self._segments.append(segment)
        return msgspec.structs.replace(bucket.info, shm_name=segment.name)

    def send(self, bucket: Bucket) -> None:
        """Do nothing: ``stage`` has copied the bytes."""

    def unstage(self) -> None:
        """Unlink the oldest segment; engines that still map it keep their mapping."""
        if self._segments:
            segment = self._segments.popleft()
            segment.close()
            segment.unlink()

    def close(self) -> None:
        """Unlink all segments that are left and refuse further ones."""
        with self._lock:
            self._closed = True
            while self._segments:
                self.unstage()


class SharedMemoryReceiver:
    """Maps the segments that manifests name, on the engine's side."""

    def __init__(self, info: InitInfo) -> None:
        """Do nothing: there is no group to join."""

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return one bucket's bytes, uint8[nbytes], mapped; the mapping lives as long as the tensor and its views."""
        return mapped(info.shm_name, wire_bytes(info))

    def close(self) -> None:
        """Do nothing: mappings end with the tensors over them."""


def new_segment(nbytes: int) -> SharedMemory:
    """Create a segment with all its pages allocated.

    Otherwise a write to a full /dev/shm would end the process with SIGBUS. Raises WeightSyncError if there is no room.
    """
    segment = None
    try:
        segment = SharedMemory(segment_name(), create=True, size=nbytes)
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


def mapped(name: str, nbytes: int, *, shared: bool = False) -> Tensor:
    """Map the first bytes of a segment, uint8[nbytes]; the mapping lives as long as the tensor and its views.

    Writes to it stay private unless ``shared``. Raises WeightSyncError if there is no such segment.
    """
    if not name or "/" in name:
        raise WeightSyncError(f"{name!r} is not a name of a shared memory segment")
    flags, access = (os.O_RDWR, mmap.ACCESS_WRITE) if shared else (os.O_RDONLY, mmap.ACCESS_COPY)
    try:
        # Not SharedMemory: until Python 3.13 it makes the reader's resource tracker unlink the sender's segment.
        descriptor = _posixshmem.shm_open(f"/{name}", flags, mode=0o600)
        try:
            region = mmap.mmap(descriptor, nbytes, access=access)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"cannot map {nbytes} bytes of shared memory {name}: {error}") from error
    return torch.frombuffer(region, dtype=torch.uint8, count=nbytes)
