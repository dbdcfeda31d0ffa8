"""A device of torch's that is made of Python: tensors on it compute on the CPU, and refuse tensors that are not on it.

With it code runs as it does on a GPU, values and gradients included, on a machine without one: a host tensor that gets
among device tensors is an error, as it would be there, and bytes that come to the host are counted. Collectives of
tensors on it go through gloo. It has no streams, no kernels and no memory of its own, so it says nothing about those.
``install`` changes torch for the rest of the process.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "rehearsal"
DEVICE = f"{NAME}:0"
# The bytes of memory that the device reports.
MEMORY = 16 << 30
SCALARS = 16  # bytes: more that comes to the host at a time is no scalar or checksum
aten = torch.ops.aten
moved: list[int] = []  # sizes in bytes of what came to the host
# Those of them that the host waits for.
waited: list[int] = []
# The sizes in bytes of copies from the host.
sent: list[int] = []
_memory: dict[int, StorageWeakRef] = {}  # of all tensors that are or were on the device
# Tensors are made in several threads.
_memory_lock = threading.RLock()
_at_return = 0  # bytes that were held when torch last gave back what it does not use
_library: torch.library.Library | None = None


class OnDevice(Tensor):
    """A tensor on the device. ``inner`` holds its elements, in host memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        with torch.inference_mode(False):  # views of tensors that are made in that mode, or outside it, differ
            made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=DEVICE,
            )
        made.inner = inner
        memory = inner.untyped_storage()
        with _memory_lock:
            _memory[memory._cdata] = StorageWeakRef(memory)
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnDevice({self.inner!r})"

    def tolist(self) -> Any:
        """torch itself refuses it of subclasses."""
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        """The one that has the bytes; FSDP frees and allocates it, and compares addresses."""
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled():  # in which operations made of others arrive here whole
            parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if function is aten.copy_.default:
            target, source = args[0], args[1]
            if isinstance(target, OnDevice) and not isinstance(source, OnDevice):
                sent.append(source.nbytes)
            if not isinstance(target, OnDevice) and args[2:3] == (True,):
                moved.append(source.nbytes)
                target.copy_(_in(source))
                return target
            _in(target).copy_(_in(source) if isinstance(target, OnDevice) else _out(source))
            return target
        given: list[Any] = []
        tree_map(given.append, (args, kwargs))
        hosts = [x for x in given if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim() > 0]
        if hosts:
            raise RuntimeError(f"{function} got tensors on {DEVICE} and on the host, of shape {list(hosts[0].shape)}")
        where = torch.device(kwargs.get("device") or DEVICE)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):  # for which torch needs a backend that is not made of Python
            kwargs["pin_memory"] = False
        found = _KERNELS.get(function, function)(*tree_map(_in, args), **tree_map(_in, kwargs))
        own = {id(x.inner): x for x in given if isinstance(x, OnDevice)}
        if where.type == "cpu" and function is aten.empty_like.default:
            # Room for a copy, which is counted when it is made.
            return found
        if where.type == "cpu":
            return tree_map(lambda x: _counted(x) if isinstance(x, Tensor) else x, found)
        return tree_map(lambda x: _same(own, x), found)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Tensor, ...]:
    """``aten._flash_attention_forward``, in plain torch: sums are [heads, N], and the rest is not for use."""
    out, sums = _attended(q, k, v, rest[0], rest[1], bool(rest[5]), scale)
    return out, sums, *(torch.zeros(2, dtype=torch.int64) for _ in range(3))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    """Gradients with the weights exp(score - sum), whichever keys the sum was over; FlashAttention 2, algorithm 2."""
    borders, causal, repeats = (rest[0], rest[1]), bool(rest[5]), q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = _scores(q, keys, *borders, causal, scale)
    weights = (scores - sums[:, :, None]).exp()
    by_weights = torch.einsum("nhd,mhd->hnm", grad, values) - (grad * out).sum(-1).t()[:, :, None]
    by_scores = weights * by_weights * scale
    d_q = torch.einsum("hnm,mhd->nhd", by_scores, keys)
    d_k = torch.einsum("hnm,nhd->mhd", by_scores, q).unflatten(1, (-1, repeats)).sum(2)
    d_v = torch.einsum("hnm,nhd->mhd", weights, grad).unflatten(1, (-1, repeats)).sum(2)
    return d_q, d_k, d_v


def _attended(
    q: Tensor, k: Tensor, v: Tensor, q_borders: Tensor, k_borders: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = _scores(q, keys, q_borders, k_borders, causal, scale)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values), scores.logsumexp(-1)


def _scores(q: Tensor, k: Tensor, q_borders: Tensor, k_borders: Tensor, causal: bool, scale: float) -> Tensor:
    """Scores [heads, N, M], minus infinity among different sequences and, if causal, for later keys."""
    of_q, of_k = (
        torch.bucketize(torch.arange(len(x)), borders, right=True) for x, borders in ((q, q_borders), (k, k_borders))
    )
    sees = of_q[:, None] == of_k
    if causal:
        sees &= torch.arange(len(q))[:, None] >= torch.arange(len(k))
    return (torch.einsum("nhd,mhd->hnm", q, k) * scale).masked_fill(~sees, float("-inf"))


# Kernels of a GPU that a CPU lacks.
_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._flash_attention_forward.default: _flash_forward,
    aten._flash_attention_backward.default: _flash_backward,
}


def held() -> int:
    """Return how many bytes of tensors are on the device. What waits for Python to collect garbage counts: on a GPU it
    is in the way of whoever shares the device."""
    with _memory_lock:
        for key in [key for key, memory in _memory.items() if memory.expired()]:
            del _memory[key]
        alive = [torch.UntypedStorage._new_with_weak_ptr(memory.cdata) for memory in _memory.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def reserved() -> int:
    """Return how many bytes of the device torch has, at the least: what is held, and what was when it last gave the
    rest back."""
    return max(held(), _at_return)


def _empty_cache() -> None:
    global _at_return
    _at_return = held()


def _in(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _out(value: Tensor) -> Tensor:
    return _counted(value.inner) if isinstance(value, OnDevice) else value


def _counted(value: Tensor) -> Tensor:
    moved.append(value.nbytes)
    waited.append(value.nbytes)
    return value


class _Module:
    """What torch asks of a device."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        pass


def install() -> None:
    """Make the device known to torch, which calls it an accelerator."""
    global _library
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # A backend in Python has no way to offer these three.
    accelerator: Any = torch.accelerator
    accelerator.synchronize, accelerator.empty_cache = lambda device=None: None, _empty_cache
    accelerator.get_memory_info = lambda device=None: (MEMORY - held(), MEMORY)
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    plain: Any = Tensor.data

    def replace_data(tensor: Tensor, value: Tensor) -> None:
        """``tensor.data = value``, also when a tensor changes between host and device, which torch refuses here."""
        if isinstance(tensor, OnDevice) != isinstance(value, OnDevice):
            torch.utils.swap_tensors(tensor, value)
            return
        plain.__set__(tensor, value)
        if isinstance(tensor, OnDevice) and isinstance(value, OnDevice):
            tensor.inner = value.inner

    changed: Any = Tensor
    changed.data = property(plain.__get__, replace_data)


def _empty(size: Any, *, dtype: Any = None, **_: object) -> Tensor:
    return OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: object) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(target, OnDevice) and not isinstance(source, OnDevice):
        sent.append(source.nbytes)
    _in(target).copy_(_in(source))  # called by ``torch.tensor``, which bypasses __torch_dispatch__
    return target


def _same(own: dict[int, OnDevice], value: Any) -> Any:
    """The tensor that an operation changed in place, or a new one."""
    if not isinstance(value, Tensor):
        return value
    return own[id(value)] if id(value) in own else OnDevice(value)
