"""Lets Megatron-Core 0.16 run on gloo and the CPU, so that ``trainer.backend=megatron`` can be tried on a laptop.

Megatron-Core hard-codes CUDA devices, even where its mathematics needs none. Inside ``megatron_on_cpu()``

- ``torch.cuda.current_device`` returns ``cpu``; ``set_device``, ``synchronize`` and ``empty_cache`` do nothing;
- there is one stream, on which all work is complete;
- token counts of experts, which Megatron moves to the host as NumPy arrays, are converted to these directly;
- the random state of "the GPU" is that of the CPU;
- a factory's ``device="cuda"``, ``Tensor.cuda()`` and ``Tensor.to("cuda")`` stay on the CPU;
- ``Tensor.type()`` returns ``torch.cuda.FloatTensor``, which Megatron's optimizer compares as text.

Everything is restored on exit. Other threads see the first four too, but on a machine without CUDA none of them calls
these; the others apply to this thread only. The layers, sharding, schedules and collectives that run this way are
Megatron's own; streams, kernels and NCCL are not exercised.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return func(args[0]).replace("torch.", "torch.cuda.")
        if _is_cuda(named.get("device")):
            named["device"] = "cpu"
        if func is torch.Tensor.to:
            args = ["cpu" if _is_cuda(value) else value for value in args]
        return func(*args, **named)


class _Stream:
    """The stream of a device without streams, on which all work is complete."""

    def wait_stream(self, other: "_Stream") -> None:
        """Do nothing: all work is complete."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""


_STREAM = _Stream()


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


def _on_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Within this context, run Megatron-Core's CUDA calls on the CPU."""
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing: there is no device."""

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        *((torch.cuda, name, nothing) for name in ("set_device", "synchronize", "empty_cache")),
        *((torch.cuda, name, lambda *_, **__: _STREAM) for name in ("Stream", "current_stream")),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (megatron_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (megatron_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]
    with ExitStack() as undo:
        for owner, name, substitute in replaced:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, substitute)
        undo.enter_context(_CudaMeansCpu())
        yield
