"""A filter of system calls: what namespaces and limits leave open, such as memory that belongs to no process.

A filter is a classic BPF program, the form that bwrap's ``--seccomp`` takes. It refuses by errno, so a program that
tries something harmlessly goes on.
"""

import errno
import os
import socket
import struct

from rl_async.errors import ConfigError

# Calls by number, on x86_64 and aarch64.
# fmt: off
_REFUSED = {
    # memory that is charged to no process and so to no limit
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    # a page in a pipe keeps the huge page that it is part of
    "vmsplice": (278, 75),
    # reading and writing other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    # new or other namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # large parts of the kernel that programs of this kind do not need
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "syslog": (103, 116),
    "personality": (135, 92), "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
}
# fmt: on
_SOCKET, _MMAP = (41, 198), (9, 222)
# Flags of mmap(2). Huge pages count in no process's memory and in no control group's.
_TYPE, _SHARED, _ANONYMOUS, _HUGE = 0x0F, 0x01, 0x20, 0x40000
# Network namespaces do not contain the others: AF_VSOCK, for one, reaches the host of a virtual machine.
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
_X32 = 0x40000000  # x86_64: the same calls by other numbers

_LOAD, _EQUAL, _AT_LEAST, _HAS, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_NO_MEMORY = 0x00050000 | errno.ENOMEM
_NUMBER, _ARCH, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40  # offsets in struct seccomp_data


def system_call_filter(machine: str | None = None, *, shared: bool = True) -> bytes:
    """Return the filter for this machine. Without ``shared`` no memory is shared by anonymous mappings: a page of one
    that no process shows any more is held all the same, and only a control group counts it.

    Raises ConfigError for a machine whose system calls are not known here.
    """
    machine = machine or os.uname().machine
    if machine not in _MACHINES:
        raise ConfigError(f"sandbox.kind: bubblewrap and container work on {' and '.join(_MACHINES)}, not on {machine}")
    column, arch = _MACHINES[machine]
    numbers = sorted(call[column] for call in _REFUSED.values())
    refusal = [(_RETURN, 0, 0, _REFUSE)]
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        *refusal,
    ]
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), *refusal]
    refused = () if shared else (_SHARED | _ANONYMOUS,)
    program += [(_EQUAL, 0, len(refused) + 5, _MMAP[column]), (_LOAD, 0, 0, _FOURTH_ARGUMENT)]
    program += [(_HAS, len(refused) + 2, 0, _HUGE), (_AND, 0, 0, _TYPE | _ANONYMOUS)]
    program += [(_EQUAL, len(refused) - place, 0, flags) for place, flags in enumerate(refused)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NO_MEMORY)]
    program += [(_EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    program += [*refusal, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
