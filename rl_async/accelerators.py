"""The makes of accelerator that torch drives. Besides Megatron's backend, which runs on CUDA only, no other module
names one of them, its device type in torch or its collectives; only the transport of weights ``nccl`` has one name
everywhere.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rl_async.errors import UserError

DEVICES = Path("/dev")
# Torch reads it when it makes a group for NVIDIA's or AMD's devices: then ``wait`` raises at its deadline, and no
# watchdog, which would end the process, watches that group.
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


class Accelerator(NamedTuple):
    """How devices of one make are found, selected, addressed in torch, and connected.

    Below /dev, ``files`` is the pattern of the devices' files, and only this make's ``driver`` creates that file. The
    environment variable ``visible`` lists the devices that a process may use. ``collectives`` is torch.distributed's
    backend. With ``handles``, torch shares its memory with other processes on the machine. Devices of at least
    ``flash_capability`` run torch's FlashAttention for rows of several sequences (None: it has not been tried), and
    those of at least ``bfloat16_capability`` have units for bfloat16 (None: torch is asked).
    """

    make: str
    files: str
    driver: str
    visible: str
    torch_device: str
    collectives: str
    handles: bool
    flash_capability: tuple[int, int] | None
    bfloat16_capability: tuple[int, int] | None

    @property
    def interface(self) -> str:
        """The variable that names the network interface of the collectives; ``=NAME`` stands for exactly this one."""
        return f"{self.collectives.upper()}_SOCKET_IFNAME"


ACCELERATORS = (
    Accelerator("NVIDIA", "nvidia[0-9]*", "nvidiactl", "CUDA_VISIBLE_DEVICES", "cuda", "nccl", True, (8, 0), (8, 0)),
    # ROCm keeps torch's names.
    Accelerator("AMD", "dri/renderD[0-9]*", "kfd", "HIP_VISIBLE_DEVICES", "cuda", "nccl", True, None, None),
    Accelerator(
        "Ascend", "davinci[0-9]*", "davinci_manager", "ASCEND_RT_VISIBLE_DEVICES", "npu", "hccl", False, None, None
    ),
)


def accelerator_here(devices: Path = DEVICES) -> Accelerator:
    """Return the make of this machine's accelerators, by the files in ``devices``; NVIDIA without accelerators."""
    return next((one for one in ACCELERATORS if (devices / one.driver).exists()), ACCELERATORS[0])


def count_gpus(environment: Mapping[str, str] = os.environ, devices: Path = DEVICES) -> int:
    """Count the accelerators that processes started from here may use."""
    accelerator = accelerator_here(devices)
    visible = environment.get(accelerator.visible)
    if visible is None:
        return len(list(devices.glob(accelerator.files)))
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def select_devices(indices: Iterable[int], devices: Path = DEVICES) -> dict[str, str]:
    """Return the environment variables that give a process these of the machine's accelerators."""
    return {accelerator_here(devices).visible: ",".join(map(str, indices))}


def collectives_of(torch_device: str) -> str:
    """Return torch.distributed's backend for tensors on accelerators of a torch type. Raises UserError if unknown."""
    known = {one.torch_device: one.collectives for one in ACCELERATORS}
    if torch_device not in known:
        raise UserError(
            f"no collectives are known for torch's devices of the type {torch_device}, only for {', '.join(known)}; "
            "set model.device=cpu"
        )
    return known[torch_device]


def backends_of(torch_device: str) -> str:
    """Return torch.distributed's backends for tensors on devices of a torch type and, by gloo, on the host."""
    return "gloo" if torch_device == "cpu" else f"cpu:gloo,{torch_device}:{collectives_of(torch_device)}"


def shares_memory(torch_device: str) -> bool:
    """Return whether processes on one machine can map one another's memory on devices of a torch type."""
    return any(one.handles for one in ACCELERATORS if one.torch_device == torch_device)


def graphs_of(device_module: Any) -> Callable[[Callable[[], None]], Callable[[], None]] | None:
    """Return a function that captures a call in a graph, by ``torch.cuda`` or the like; None where there are no graphs.

    What it returns for the call replays its operations on the same tensors. Graphs that exist at the same time share
    their working memory, so no two of them may run at once. It raises RuntimeError for what a graph cannot hold.
    """
    if not hasattr(device_module, "CUDAGraph"):
        return None
    graphs, pools = weakref.WeakSet[Any](), list[Any]()

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        # The pool of graphs that are all gone cannot be used again.
        if not graphs:
            pools[:] = [device_module.graph_pool_handle()]
        graph = device_module.CUDAGraph()
        # Other threads may be receiving weights; only this one must not do anything that a graph cannot hold.
        with device_module.graph(graph, pool=pools[0], capture_error_mode="thread_local"):
            call()
        graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    return capture


def collectives_version(device_module: Any) -> str:
    """Return the version of the collectives of ``torch.cuda`` or the like; empty where they tell none."""
    collectives = getattr(device_module, "nccl", None)
    return "" if collectives is None else ".".join(map(str, collectives.version()))
