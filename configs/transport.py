"""Which transport ``weight_sync.transport: auto`` means."""

from typing import Literal

from rl_async.configs.schema import RunConfig

Transport = Literal["gloo", "ipc", "disk"]


def resolve_transport(config: RunConfig) -> Transport:
    """``ipc`` (shared memory) where engines and trainer share a device, else ``gloo``.

    ``configs/check.py`` has refused the transports that are not built yet.
    """
    if config.weight_sync.transport in ("gloo", "ipc", "disk"):
        return config.weight_sync.transport
    return "ipc" if config.mode == "colocated" else "gloo"
