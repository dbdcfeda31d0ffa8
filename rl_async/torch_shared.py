"""What trainer and engines must compute alike with torch, and where they compute.

The device of a process and its memory. The output layer, with logits in float32: rounded to bfloat16 a logit of 20 is
off by up to 0.06, and the engine's log-probability may differ from the trainer's by as much, whereas products of
bfloat16 numbers that are summed in float32 have no such error. Causal attention through a window, in blocks of
queries, each with the keys that its windows reach: time and memory grow with the length times the window. Rounding to
8 bits.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rl_async.accelerators import accelerator_here
from rl_async.errors import UserError

# Messages of PyTorch's allocators for the host.
ON_THE_HOST = ("can't allocate memory", "not enough memory")

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
    return host_buffer(tensor, tensor.device.type).copy_(tensor)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor's copy on a device, without waiting for it, or the tensor if the device is the host.

    The copy is made from pinned memory if there is enough, in the order of other work of the device.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return tensor
    return host_buffer(tensor, kind).copy_(tensor).to(device, non_blocking=True)


def host_buffer(like: Tensor, kind: str) -> Tensor:
    """Return host memory of a tensor's shape: pinned, if this process's accelerator is of this kind."""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is not None and here.type == kind:
        try:
            return torch.empty_like(like, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _warn_unpinned(str(error).partition("\n")[0])
    return torch.empty_like(like, device="cpu")


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


# Two threads would restore each other's setting.
_changing = threading.Lock()


def widened(weight: Tensor) -> Tensor:
    """Return the weight in the form that ``output_logits`` need not convert: on a CPU in at least float32.

    Keep the result for a weight that is read many times before it changes, such as by an engine's steps.
    """
    return weight if weight.device.type != "cpu" else weight.to(torch.promote_types(weight.dtype, torch.float32))


def output_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return hidden [N, H] times weight [V, H], plus bias [V], summed and returned in at least float32.

    The weight may have been widened before. Gradient flows through it, at the price of a copy of the weight in float32.
    """
    if torch.finfo(hidden.dtype).bits >= 32:
        return linear(hidden, weight, bias)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    if hidden.device.type != "cpu":
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        with bfloat16_products(hidden.dtype):
            logits = torch.mm(hidden.float(), widened(weight).t())
    return logits if bias is None else logits.add_(bias)


@contextmanager
def bfloat16_products(kind: torch.dtype) -> Iterator[None]:
    """Have a CPU multiply float32 matrices as bfloat16 ones, summed in float32, if ``kind`` is bfloat16.

    Nothing is lost where their elements were bfloat16 before, and a CPU that has such instructions needs half the time.
    The setting is PyTorch's and holds for all threads: float32 products of another thread lose precision meanwhile.
    """
    if kind != torch.bfloat16:
        yield
        return
    # Its type stubs are incomplete.
    mkldnn: Any = torch.backends.mkldnn
    with _changing:
        before = mkldnn.matmul.fp32_precision
        mkldnn.matmul.fp32_precision = "bf16"
        try:
            yield
        finally:
            mkldnn.matmul.fp32_precision = before


# Of [B, heads, L, D] tensors and a mask.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# A block has at least so many queries: narrow windows would otherwise make many small calls.
BLOCK = 512


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int | None, attend: Attend) -> Tensor:
    """Attention of the last L of S tokens, q [B, heads, L, D] to k and v [B, key heads, S, D], as [B, heads, L, D].

    A token sees those up to itself, or the last ``window`` of them.
    """
    length, tokens = q.shape[2], k.shape[2]
    block = length if window is None else max(window, BLOCK)
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        begin, end = tokens - length + start, tokens - length + stop
        first = 0 if window is None else max(0, begin - window + 1)
        distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        sees = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        parts.append(attend(q[:, :, start:stop], k[:, :, first:end], v[:, :, first:end], sees))
    return torch.cat(parts, 2)


DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return numbers [..., rows, columns] of ``dtype`` and scales float32 [..., rows, 1], whose product is near
    ``weight``.

    Rounds to the nearest number. A row of zeros has the scale 0; of one with an element that is not finite no product
    is.
    """
    whole = not dtype.is_floating_point
    most = torch.iinfo(dtype).max if whole else torch.finfo(dtype).max
    wide = weight.float()
    scales = wide.abs().amax(-1, keepdim=True) / most
    numbers = (wide / torch.where(scales > 0, scales, 1.0)).clamp_(-most, most)
    return (numbers.round_() if whole else numbers).to(dtype), scales
