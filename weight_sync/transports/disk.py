"""Sends buckets as safetensors files in a folder that trainer and engines share, on any file system, without sockets.

A file holds one tensor, ``bucket`` uint8[nbytes]. It appears under its name only when it is complete and durable, and
is deleted as soon as every engine has read it. Files that a killed trainer left are deleted by the next one.
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
from rl_async.weight_sync.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo

KEY = "bucket"


class DiskSender:
    """Writes one file per staged bucket into ``folder``, which belongs to this sender alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0
        self._files: deque[Path] = deque()
        clear(folder)
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


def clear(folder: Path) -> None:
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
