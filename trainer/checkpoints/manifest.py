"""The manifest of a checkpoint: size and checksum of every other file in it.

It is the last file written before the folder gets its name. It needs no checksum of its own, since a damaged manifest
does not match the files.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from rl_async.files import UNDECODABLE

MANIFEST = "manifest.json"
BLOCK_BYTES = 2**22


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a file in bytes and its xxh3-128 in hex."""

    bytes: int
    xxh3: str


def digest(path: Path) -> FileDigest:
    """Return size and checksum of a file, read in blocks."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            state.update(block)
            size += len(block)
    return FileDigest(size, state.hexdigest())


def files_in(folder: Path) -> list[str]:
    """List every file below ``folder`` except the manifest, as sorted relative paths."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def write_manifest(folder: Path, digests: Mapping[str, FileDigest]) -> None:
    """Write the manifest with the digests of all other files."""
    (folder / MANIFEST).write_bytes(msgspec.json.encode(dict(digests), order="sorted"))


def damage(folder: Path) -> str | None:
    """Describe the first damaged file of a checkpoint; None if all files match the manifest."""
    path = folder / MANIFEST
    try:
        digests = msgspec.json.decode(path.read_bytes(), type=dict[str, FileDigest])
    except (OSError, *UNDECODABLE) as error:
        return f"{path}: {error}"
    for name, written in digests.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        size = (folder / name).stat().st_size
        if size != written.bytes:
            return f"{folder / name} has {size} bytes instead of {written.bytes}"
        if digest(folder / name) != written:
            return f"{folder / name} has another checksum than the manifest"
    return None
