"""Buckets as safetensors files in a folder that trainer and engines share: no sockets between them, any file system.

A file holds one tensor, ``bucket`` uint8[nbytes]. It appears under its name only when it is complete and on the disk,
and is deleted as soon as every engine has read it; what a killed trainer left is deleted by the next one.
"""

import shutil
from collections import deque
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.files import force_to_disk, written_whole
from rl_async.weight_sync.buckets.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo

KEY = "bucket"


class DiskSender:
    """Writes into ``folder``, which belongs to this sender alone: a file per staged bucket, read by all engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0
        self._files: deque[Path] = deque()
        clear(folder)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise WeightSyncError(f"weight_sync.folder: no folder for weights at {folder}: {error}") from error

    def init_info(self, member: int) -> InitInfo:
        """Engines need to know the folder only."""
        return InitInfo(backend="disk", folder=str(self._folder.resolve()))

    def connect(self) -> None:
        """Nobody to meet."""

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Write the bucket into a new file, whose name no engine can have cached."""
        file = self._folder / f"{self._written:06d}.safetensors"
        self._written += 1
        try:
            _write(file, bucket)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"weight_sync.folder: cannot write {file}: {error}") from error
        self._files.append(file)
        return msgspec.structs.replace(bucket.info, file=file.name)

    def send(self, bucket: Bucket) -> None:
        """The bytes are already there."""

    def unstage(self) -> None:
        """Delete the oldest file; engines that still map it keep their mapping."""
        if self._files:
            self._files.popleft().unlink(missing_ok=True)

    def close(self) -> None:
        """Delete what is left. After a deadline a thread may still write; the next trainer deletes that."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._files.clear()


class DiskReceiver:
    """One engine's side; needs the folder only."""

    def __init__(self, info: InitInfo) -> None:
        self._folder = Path(info.folder)
        if not self._folder.is_dir():
            raise WeightSyncError(
                f"{self._folder} is no folder here; set weight_sync.folder to one that trainer and engines share"
            )

    def receive(self, info: UpdateInfo) -> Tensor:
        """The bytes that travelled for one bucket, uint8[nbytes], mapped."""
        if not info.file or "/" in info.file:
            raise WeightSyncError(f"{info.file!r} is not the name of a file with weights")
        path = self._folder / info.file
        try:
            data = load_file(path)[KEY]
        except (OSError, SafetensorError, KeyError) as error:
            raise WeightSyncError(f"cannot read weights from {path}: {type(error).__name__}: {error}") from error
        if data.numel() != wire_bytes(info):
            raise WeightSyncError(f"{path} has {data.numel()} bytes of weights, its manifest {wire_bytes(info)}")
        return data

    def close(self) -> None:
        """Nothing to leave."""


def clear(folder: Path) -> None:
    """Delete the folder and all in it, if there is one. Raises WeightSyncError if that is not allowed."""
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
