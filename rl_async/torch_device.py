"""Where a model computes: the CPU, or this process's accelerator as torch knows it."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from rl_async.accelerators import accelerator_here
from rl_async.errors import UserError

ON_THE_HOST = ("can't allocate memory", "not enough memory")  # what PyTorch's allocators for the host say

log = logging.getLogger("rl_async.device")


def pick_device(device: str) -> str:
    """Resolve ``auto``, ``cpu`` or ``gpu`` to torch's type of device; ``auto`` is the accelerator here, else the CPU.

    Raises UserError for ``gpu`` where torch sees none.
    """
    if device == "cpu":
        return "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        if device == "gpu":
            raise UserError("device gpu, but torch sees none here; use auto or cpu, or install a torch built for it")
        return "cpu"
    return found.type


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; on the host PyTorch raises RuntimeErrors known only by their text."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in ON_THE_HOST)


def give_back(device: torch.device) -> None:
    """Return to a device what torch keeps of its memory for further tensors: other processes are about to need it."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def settle(data: Tensor) -> None:
    """Wait until everything that was started on the tensor's device has ended; a CPU has nothing to wait for."""
    if data.device.type != "cpu":
        torch.accelerator.synchronize(data.device)


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor's copy in host memory, or the tensor if it is there.

    What comes from this process's accelerator gets pinned memory, if there is enough: copies from and to it are several
    times as fast. PyTorch keeps it for later copies when this one is dropped.
    """
    if tensor.device.type == "cpu":
        return tensor
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None and here.type == tensor.device.type:
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        except RuntimeError as error:
            _warn_unpinned(str(error).partition("\n")[0])
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


@functools.cache
def _warn_unpinned(why: str) -> None:
    log.warning("memory of the host could not be pinned, so copies from the device and back are slower: %s", why)


@functools.cache
def has_flash_attention(device: torch.device) -> bool:
    """Return whether torch's FlashAttention for rows of several sequences runs on a device; False where that has not
    been tried."""
    here = accelerator_here()
    if here.flash_capability is None or device.type != here.torch_device:
        return False
    module: Any = torch.get_device_module(device)
    return bool(module.get_device_capability(device) >= here.flash_capability)
