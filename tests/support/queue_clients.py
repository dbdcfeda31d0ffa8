"""Clients of a run's queue, each with the key of its role."""

from pathlib import Path

from rl_async.configs.load import load_resolved
from rl_async.transfer_queue.auth.keys import provide_keys, read_client_keys
from rl_async.transfer_queue.auth.roles import Role
from rl_async.transfer_queue.client import ClientSettings, QueueClient, SyncQueueClient


def make_run_keys(run: Path) -> None:
    """Make the keys of a run folder that has its config, as the launcher does."""
    provide_keys(load_resolved(run / "config.yaml"), run)


def settings(run: Path, role: Role, timeout_s: float = 60.0, patience_s: float = 3.0) -> ClientSettings:
    return {
        "role": "test",
        "name": role,
        "timeout_s": timeout_s,
        "patience_s": patience_s,
        "keys": read_client_keys(run / "keys", role),
    }


def sync_client(run: Path, address: str, role: Role, timeout_s: float = 60.0) -> SyncQueueClient:
    """A client of the queue of ``run``, which listens at ``address``."""
    return SyncQueueClient(address, **settings(run, role, timeout_s))


def async_client(run: Path, address: str, role: Role, timeout_s: float = 60.0, patience_s: float = 3.0) -> QueueClient:
    """The same for an event loop."""
    return QueueClient(address, **settings(run, role, timeout_s, patience_s))
