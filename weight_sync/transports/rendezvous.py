"""Key prefixes under which the members of a process group meet inside a store."""

from typing import Literal

from torch import distributed as dist


def group_store(store: dist.Store, name: str, device: Literal["cpu", "cuda"]) -> dist.Store:
    """Return the part of ``store`` that a backend of group ``name`` uses; ``cpu`` for gloo, ``cuda`` for NCCL.

    The prefixes are those that torch's ``_new_process_group_helper`` applies to a store which already carries the
    group's name. Engines that create their side with torch's own functions (SGLang's ``init_custom_process_group``,
    after OpenRLHF and slime) therefore meet us there.
    """
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
