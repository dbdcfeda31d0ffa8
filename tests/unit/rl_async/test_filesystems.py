"""Which file system a folder is on, by the kernel's table of mounts."""

from pathlib import Path

import pytest

from rl_async.errors import UserError
from rl_async.transfer_queue.journal.sqlite import file_system, require_local

MOUNTS = """22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /home rw shared:2 - nfs4 server:/home rw,vers=4.2
31 30 259:2 / /home/me/scratch rw - xfs /dev/nvme1n1 rw
32 22 0:40 / /data\\040sets rw - fuse.sshfs host:/ rw
33 22 0:41 / /lustre rw - ext4 /dev/sdb rw
34 33 0:42 / /lustre rw master:9 - lustre 10.0.0.1@tcp:/fs rw
35 22 0:43 / /overlay rw - fuse.fuse-overlayfs fuse-overlayfs rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    return table


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/runs/x", "nfs4"),
        ("/home/me/scratch/runs/x", "xfs"),
        ("/homestead", "ext4"),
        ("/data sets/x", "fuse.sshfs"),
        ("/lustre/x", "lustre"),
        ("/overlay/x", "fuse.fuse-overlayfs"),
    ],
)
def test_the_innermost_mount_decides(mounts: Path, path: str, kind: str) -> None:
    assert file_system(Path(path), mounts) == kind
    if kind in ("nfs4", "fuse.sshfs", "lustre"):
        with pytest.raises(UserError, match=rf"(?s){path}.*{kind}.*the way out"):
            require_local(Path(path), "the way out", mounts)
    else:
        require_local(Path(path), "the way out", mounts)


def test_a_machine_without_the_table_refuses_nothing(tmp_path: Path) -> None:
    assert file_system(tmp_path, tmp_path / "missing") == ""
    require_local(tmp_path, "", tmp_path / "missing")


def test_links_are_followed(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/lustre")
    assert file_system(tmp_path / "link" / "runs", mounts) == "lustre"
