"""The transport that ``weight_sync.transport: auto`` stands for."""

from typing import Literal

from rl_async.configs.schema.run import RunConfig

Transport = Literal["gloo", "ipc", "disk", "nccl"]


def resolve_transport(config: RunConfig) -> Transport:
    """Choose ``ipc`` (shared memory) if engines and trainer share devices, else ``gloo``.

    ``nccl`` is never chosen automatically, because it has never been run.
    """
    if config.weight_sync.transport != "auto":
        return config.weight_sync.transport
    return "ipc" if config.mode == "colocated" else "gloo"
