"""Where the members of a process group meet: a store, and the keys of a group inside it.

On one machine the store is a file that only the user can open. Between machines it listens on one address; it asks for
no credential, and nor does gloo, so both listen only where the members are.
"""

import logging
import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
from torch import distributed as dist

from rl_async.accelerators import accelerator_here
from rl_async.concurrency import in_daemon_thread
from rl_async.errors import UserError, WeightSyncError
from rl_async.process.private_folder import require_private

GRACE_S = 1.0  # torch's own error, if there is one, says more

log = logging.getLogger("rl_async.rendezvous")


def file_store(path: Path, rank: int, members: int, timeout_s: float) -> dist.FileStore:
    """Meet the other members at this file, which the first makes and the last removes; it must be new.

    Who waits for a key looks every 10 ms. Raises DistStoreError if a member does not arrive in time.
    """
    store = dist.FileStore(str(path), members)
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"arrived/{rank}", "")
    try:
        store.wait([f"arrived/{member}" for member in range(members)])
    except RuntimeError as error:
        raise dist.DistStoreError(f"not all of {members} members met at {path}: {error}") from error
    return store


def transfer_store(path: Path, timeout_s: float) -> dist.FileStore:
    """Open the store of a weight transfer, a file that is there and that only this user can reach.

    Raises WeightSyncError if it is not. Who waits for a key looks every 10 ms.
    """
    try:
        require_private(path.parent)
        if not path.is_file():
            raise FileNotFoundError
    except (UserError, OSError) as error:
        why = "it does not exist" if isinstance(error, OSError) else str(error)
        raise WeightSyncError(
            f"the trainer's store {path} cannot be used here: {why}; an engine that sees other files than the trainer, "
            "as one in a container does, needs weight_sync.transport=disk"
        ) from error
    store = dist.FileStore(str(path))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def listening_store(host: str, port: int, timeout_s: float, members: int | None = None) -> dist.TCPStore:
    """Open a store on this one IPv4 address, on a free port if ``port`` is 0. Waits for ``members`` if they are given.

    By default a store listens on all interfaces and over IPv6, where it looks up the name of every peer, which takes
    seconds with a slow resolver. Raises OSError if the address cannot be used.
    """
    listener = socket.create_server((host, port))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        world_size=members,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=members is not None,
        master_listen_fd=listener.detach(),
    )


def joined_store(host: str, port: int, timeout_s: float, members: int | None = None) -> dist.TCPStore:
    """Connect to the store at this address. Raises RuntimeError if it does not answer in time.

    The constructor looks up the name of the address before it connects, and nothing turns that off: where a resolver
    does not answer, each group forms that much later, by default 5 s for one lost packet. It also waits for ever for a
    peer that takes the connection and is silent, so a thread calls it.
    """

    def join() -> dist.TCPStore:
        return dist.TCPStore(host, port, members, is_master=False, timeout=timedelta(seconds=timeout_s))

    try:
        return in_daemon_thread(join, "store").result(timeout_s + GRACE_S)
    except TimeoutError as error:
        raise dist.DistStoreError(f"{host}:{port} took the connection, but did not answer as a store") from error


def own_address(peer: str, port: int) -> str:
    """Return the IPv4 address from which this host reaches ``peer``; sends nothing.

    Raises WeightSyncError if there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, port))
        except OSError as error:
            raise WeightSyncError(f"gloo: {peer} cannot be reached from here: {error}") from error
        return probe.getsockname()[0]


def bind_groups(address: str, *, devices: bool = True) -> None:
    """Let the groups that torch makes from now on, whose options it chooses itself, listen on ``address`` only:
    gloo's, and with ``devices`` also those of accelerators.

    They take the name of an interface. A user's own setting stays. By default gloo takes the address of the host's
    name, and NCCL the first interface that is not loopback.
    """
    variable = accelerator_here().interface
    name = interface_of(address)
    if name is None:
        log.warning("no interface has the address %s; set GLOO_SOCKET_IFNAME and %s", address, variable)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if devices:
        os.environ.setdefault(variable, f"={name}")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has the IPv4 address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            return name
    return None


def group_store(store: dist.Store, name: str, device: str) -> dist.Store:
    """Return the part of ``store`` that a backend of group ``name`` uses; ``device`` is torch's type.

    The prefixes are those that torch's ``_new_process_group_helper`` applies to a store which already carries the
    group's name. Engines that create their side with torch's own functions (SGLang's ``init_custom_process_group``,
    after OpenRLHF and slime) therefore meet us there.
    """
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
