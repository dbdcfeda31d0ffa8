"""Which transport ``weight_sync.transport: auto`` means."""

from typing import Literal

from rl_async.configs.schema.run import RunConfig

Transport = Literal["gloo", "ipc", "disk", "nccl"]


def resolve_transport(config: RunConfig) -> Transport:
    """``ipc`` (shared memory) where engines and trainer share a device, else ``gloo``.

    ``nccl`` is never chosen by itself: nobody has run it yet.
    """
    if config.weight_sync.transport != "auto":
        return config.weight_sync.transport
    return "ipc" if config.mode == "colocated" else "gloo"
