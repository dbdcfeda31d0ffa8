"""Which file system a path is on, and a refusal of those that hosts share."""

import re
from pathlib import Path

from rl_async.errors import UserError

MOUNTS = Path("/proc/self/mountinfo")  # Linux'
NETWORK = re.compile(
    "nfs4?|lustre|gpfs|ceph|cifs|smb3|smbfs|afs|beegfs|panfs|wekafs|glusterfs|orangefs|pvfs2|ocfs2|gfs2|coda"
)
# Others of FUSE, such as fuse.fuse-overlayfs, are local.
NETWORK_FUSE = re.compile(
    r"fuse\.(sshfs|ceph|ceph-fuse|glusterfs|juicefs|s3fs|s3ql|gcsfuse|goofys|mount-s3|rclone|blobfuse2?|lizardfs|mfs|"
    "moosefs|seaweedfs|cvmfs2|dfuse|hdfs|alluxio-fuse|davfs|smbnetfs|beegfs|mfsmount)"
)


def file_system(path: Path, mounts: Path | None = None) -> str:
    """The type of the file system that holds ``path``, which need not exist; empty if this machine does not tell."""
    try:
        table = (MOUNTS if mounts is None else mounts).read_text(errors="replace")
    except OSError:
        return ""
    path = path.resolve()
    found, longest = "", -1
    for line in table.splitlines():
        mount, _, source = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= longest:  # a later mount hides an earlier one
            found, longest = source.split()[0], len(point.parts)
    return found


def require_local(path: Path, remedy: str, mounts: Path | None = None) -> None:
    """Raise UserError with the ``remedy`` if ``path`` is on a file system that several hosts share."""
    kind = file_system(path, mounts)
    if NETWORK.fullmatch(kind) or NETWORK_FUSE.fullmatch(kind):
        raise UserError(f"{path} is on a file system of type {kind}, which hosts share; {remedy}")
