"""Where a model computes: the CPU, or this process's accelerator as torch knows it."""

import torch
from torch import Tensor

from rl_async.errors import UserError

ON_THE_HOST = ("can't allocate memory", "not enough memory")  # what PyTorch's allocators for the host say


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

    What comes from this process's accelerator gets pinned memory, which copies cross several times as fast. PyTorch
    keeps it for later copies when this one is dropped.
    """
    if tensor.device.type == "cpu":
        return tensor
    here = torch.accelerator.current_accelerator(check_available=True)
    pinned = here is not None and here.type == tensor.device.type
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)
