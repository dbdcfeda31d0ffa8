"""Handles of device memory, by which processes on one machine read one another's tensors without a copy (CUDA IPC,
or HIP's).

torch counts who has opened a handle; memory that its owner drops is reused once nobody has it open.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.protocol import DeviceMemory


def exported(data: Tensor) -> DeviceMemory:
    """Return a handle of ``data``, uint8[nbytes], a whole tensor of its own, which the caller keeps alive.

    Raises WeightSyncError if the memory cannot be shared.
    """
    try:
        _, arguments = cast(tuple[Any, Any], reductions.reduce_tensor(data))
    except RuntimeError as error:
        raise WeightSyncError(
            f"cannot share memory of {data.device} with other processes: {error}; containers need --ipc=host for it; "
            "otherwise choose weight_sync.transport=gloo or disk"
        ) from error
    _, _, _, _, _, _, index, handle, nbytes, offset, _, counter, counter_offset, event, wait = arguments
    return DeviceMemory(
        device=_names(data.device.type)[index],
        handle=handle,
        nbytes=nbytes,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        wait=wait,
    )


def opened(memory: DeviceMemory) -> Tensor:
    """Return the memory of another process as uint8[nbytes]; it stays open as long as the tensor and its views.

    Raises WeightSyncError if this process does not see the device, or if the handle is no longer valid.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    names = _names(found.type) if found is not None else []
    if found is None or memory.device not in names:
        raise WeightSyncError(
            f"the trainer's weights are on device {memory.device}, and this engine sees {names or 'none'}; "
            "weight_sync.transport=ipc is for engines on the trainer's devices, use nccl, gloo or disk"
        )
    rebuild = getattr(reductions, f"rebuild_{found.type}_tensor")
    try:
        return rebuild(
            Tensor,
            torch.Size([memory.nbytes]),
            (1,),
            0,
            torch.UntypedStorage,
            torch.uint8,
            names.index(memory.device),
            memory.handle,
            memory.nbytes,
            memory.offset,
            False,
            memory.counter,
            memory.counter_offset,
            memory.event,
            memory.wait,
        )
    except RuntimeError as error:
        raise WeightSyncError(f"cannot open memory of device {memory.device}: {error}") from error


def _names(kind: str) -> list[str]:
    """Return the UUIDs of the devices that this process sees; indices of the same device differ between processes."""
    module: Any = torch.get_device_module(kind)
    return [str(module.get_device_properties(index).uuid) for index in range(torch.accelerator.device_count())]
