"""Where the members of a process group meet inside a store."""

from typing import Literal

from torch import distributed as dist


def group_store(store: dist.Store, name: str, device: Literal["cpu", "cuda"]) -> dist.Store:
    """The part of ``store`` that a backend of group ``name`` uses; ``cpu`` for gloo, ``cuda`` for NCCL.

    The prefixes are those under which torch's ``_new_process_group_helper`` makes a backend on a store that carries the
    group's name already. Engines that open their side with torch's own functions (SGLang's
    ``init_custom_process_group``, OpenRLHF's and slime's before it) therefore meet us there.
    """
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
