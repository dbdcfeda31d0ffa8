"""How weights travel: the transport that ``weight_sync.transport: auto`` stands for, and who sends."""

from typing import Literal

from rl_async.configs.derived.engines import engine_traits
from rl_async.configs.schema.run import RunConfig

Transport = Literal["nearest", "gloo", "ipc", "disk", "nccl"]


def resolve_transport(config: RunConfig) -> Transport:
    """Choose ``ipc`` (shared memory) if engines and trainer share devices, else ``nearest``, or ``gloo`` if an engine
    lacks it.

    ``nccl`` is never chosen automatically, because it has never been run.
    """
    if config.weight_sync.transport != "auto":
        return config.weight_sync.transport
    if config.mode == "colocated":
        return "ipc"
    return "nearest" if all("nearest" in traits.transports for traits in engine_traits(config).values()) else "gloo"


def sends_shards(config: RunConfig) -> bool:
    """Whether every trainer rank sends its own shards to the engines; otherwise rank 0 gathers and sends whole tensors,
    of which deltas and adapters are made.
    """
    sync = config.weight_sync
    return not (sync.delta or sync.adapters) and all(traits.takes_slices for traits in engine_traits(config).values())
