"""What makes a checkpoint whole: a manifest with the size and the checksum of every other file in it.

The manifest is the last file written before the folder gets its name. It needs no checksum of its own: whatever is
wrong with it does not agree with the files.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

MANIFEST = "manifest.json"
BLOCK_BYTES = 2**22


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one file: its size in bytes and xxh3-128."""

    bytes: int
    xxh3: str


def digest(path: Path) -> FileDigest:
    """Read the file and sum it up."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            state.update(block)
            size += len(block)
    return FileDigest(size, state.hexdigest())


def files_in(folder: Path) -> list[str]:
    """Every file below ``folder`` but the manifest, in order."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def write_manifest(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Write the digests of all files."""
    (folder / MANIFEST).write_bytes(msgspec.json.encode(dict(digests), order="sorted"))


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, naming the first such file; None if all files are as they were written."""
    path = folder / MANIFEST
    try:
        digests = msgspec.json.decode(path.read_bytes(), type=dict[str, FileDigest])
    except (OSError, msgspec.MsgspecError) as error:
        return f"{path}: {error}"
    for name, written in digests.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        size = (folder / name).stat().st_size
        if size != written.bytes:
            return f"{folder / name} has {size} bytes instead of {written.bytes}"
        if digest(folder / name) != written:
            return f"{folder / name} is not what was written: its checksum differs"
    return None
