"""The filter of system calls, run by an interpreter of classic BPF, and where control groups are looked for."""

import errno
import struct
from pathlib import Path

import pytest

from rl_async.errors import ConfigError
from rl_async.sandbox.bubblewrap import V1, V2, Place, _candidates, system_call_filter

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
NO_MEMORY = 0x00050000 | errno.ENOMEM
X86_64, AARCH64, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def verdict(machine: str, arch: int, number: int, argument: int = 0, fourth: int = 0, *, shared: bool = True) -> int:
    """Run the machine's filter on one system call."""
    program = list(struct.iter_unpack("=HBBI", system_call_filter(machine, shared=shared)))
    data = struct.pack("=IIQ6Q", number, arch, 0, argument, 0, 0, fourth, 0, 0)
    at = loaded = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            loaded &= operand
        else:
            holds = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: loaded & operand != 0}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "arch", "read", "ptrace", "memfd_create", "socket"),
    [("x86_64", X86_64, 0, 101, 319, 41), ("aarch64", AARCH64, 63, 117, 279, 198)],
)
def test_calls_by_machine(machine: str, arch: int, read: int, ptrace: int, memfd_create: int, socket: int) -> None:
    assert verdict(machine, arch, read) == ALLOW
    assert verdict(machine, arch, ptrace) == verdict(machine, arch, memfd_create) == REFUSE
    assert [verdict(machine, arch, socket, family) for family in (1, 2, 10, 16)] == [ALLOW] * 4
    assert [verdict(machine, arch, socket, family) for family in (0, 17, 38, 40)] == [REFUSE] * 4
    assert verdict(machine, arch, socket, 17, shared=False) == REFUSE
    assert verdict(machine, I386, read) == KILL
    assert verdict(machine, arch, 0x40000000 | ptrace) == REFUSE


@pytest.mark.parametrize(("machine", "arch", "mmap"), [("x86_64", X86_64, 9), ("aarch64", AARCH64, 222)])
def test_memory_that_only_a_control_group_counts(machine: str, arch: int, mmap: int) -> None:
    shared, private, file, huge = 0x21, 0x22, 0x01, 0x40022
    for with_shared in (True, False):
        found = [verdict(machine, arch, mmap, 0, flags, shared=with_shared) for flags in (private, file, huge)]
        assert found == [ALLOW, ALLOW, NO_MEMORY]
    assert verdict(machine, arch, mmap, 0, shared) == ALLOW
    # MAP_NORESERVE and the like change nothing.
    assert verdict(machine, arch, mmap, 0, shared | 0x4000, shared=False) == NO_MEMORY


def test_an_unknown_machine_has_none() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.kind"):
        system_call_filter("riscv64")


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
