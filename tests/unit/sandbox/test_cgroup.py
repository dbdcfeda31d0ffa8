"""Where control groups are looked for."""

from pathlib import Path

import pytest

from rl_async.sandbox.bubblewrap import V1, V2, Place, _candidates

UNIFIED = "41 31 0:38 {root} {at} rw,relatime shared:4 - cgroup2 cgroup2 rw"
DIVIDED = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n36 31 0:33 / /x rw - cgroup c rw,cpu"
)


@pytest.mark.parametrize(
    ("own", "mounts", "found"),
    [
        ("0::/a/b", UNIFIED.format(root="/", at="/sys/fs/cgroup"), ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a"]),
        ("0::/", UNIFIED.format(root="/", at="/sys/fs/cgroup"), ["/sys/fs/cgroup"]),
        # A container that shows its own part alone, or a part that this process is not in.
        ("0::/a/b/c", UNIFIED.format(root="/a/b", at="/cgroup"), ["/cgroup/c", "/cgroup"]),
        ("0::/../other", UNIFIED.format(root="/", at="/cgroup"), []),
        ("0::/a", UNIFIED.format(root="/b", at="/cgroup"), []),
        ("4:memory:/a\n1:cpu:/b\n0::/", DIVIDED, ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"]),
        ("1:cpu:/b\n0::/", DIVIDED, []),
    ],
)
def test_groups_that_may_be_divided(own: str, mounts: str, found: list[str]) -> None:
    version = V2 if "cgroup2" in mounts else V1
    assert _candidates(own, mounts) == [Place(Path(folder), version) for folder in found]
