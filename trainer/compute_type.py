"""Measures in which type this machine multiplies the matrices of a model's layers faster.

The launcher runs it as a process of its own before a run starts, since importing torch takes seconds and keeps its
memory; it prints one line of JSON, a ``Measured``:

    python -m rl_async.trainer.compute_type --device cpu --hidden 576 --inner 1536 --threads 1
"""

import argparse
import sys
import time

import msgspec
import torch
from torch import Tensor

from rl_async.accelerators import accelerator_here

TOKENS = 128
# Larger layers are measured in part: beyond this many multiplications rates hardly change, and a type that a processor
# only emulates would take seconds.
PRODUCTS = 1 << 27
TRIES = 5
# A type this many times slower than another is not measured a second time.
HOPELESS = 4.0
TYPES = (torch.float32, torch.bfloat16)


class Measured(msgspec.Struct, frozen=True):
    """Describes what torch finds here. ``rates``: GFLOP/s of each type on the CPU; ``accelerator``: its name, or empty
    on the CPU; ``has_bfloat16``: whether the accelerator has units for it."""

    torch: str
    rates: dict[str, float] = {}
    accelerator: str = ""
    has_bfloat16: bool = False


def measure_rates(hidden: int, inner: int, threads: int) -> dict[str, float]:
    """Time one layer's product ``x [TOKENS, hidden] @ W [inner, hidden].T`` with its two gradients in each type.

    Types alternate, and each counts with its fastest try, so that a moment in which the processor is busy elsewhere
    changes little. Returns GFLOP/s by type.
    """
    torch.set_num_threads(threads)
    hidden = min(hidden, PRODUCTS // TOKENS)
    inner = max(1, min(inner, PRODUCTS // (TOKENS * hidden)))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    drawn = draw(TOKENS, hidden), draw(inner, hidden), draw(TOKENS, inner)
    operands = {kind: [tensor.to(kind) for tensor in drawn] for kind in TYPES}

    def timed(kind: torch.dtype) -> float:
        inputs, weight, gradient = operands[kind]
        begun = time.perf_counter()
        _ = inputs @ weight.T, gradient @ weight, gradient.T @ inputs
        return time.perf_counter() - begun

    # The first try also pays for what a kernel sets up once.
    first = {kind: timed(kind) for kind in TYPES}
    fastest = dict(first)
    for _ in range(TRIES):
        for kind in TYPES:
            if first[kind] <= HOPELESS * min(first.values()):
                fastest[kind] = min(fastest[kind], timed(kind))
    operations = 3 * 2 * TOKENS * hidden * inner
    return {str(kind).removeprefix("torch."): operations / seconds / 1e9 for kind, seconds in fastest.items()}


def measure(device: str, hidden: int, inner: int, threads: int) -> Measured:
    """Look at the accelerator, or for ``device`` "cpu" time the products."""
    if device == "cpu" or not torch.accelerator.is_available():
        rates = measure_rates(hidden, inner, threads)
        return Measured(str(torch.__version__), rates)
    module = torch.get_device_module()
    return Measured(str(torch.__version__), accelerator=module.get_device_name(0), has_bfloat16=has_bfloat16())


def has_bfloat16() -> bool:
    """Whether every visible accelerator multiplies bfloat16 numbers in hardware.

    torch's own answer also counts emulation on CUDA; there, hardware has it from compute capability 8.0 on.
    """
    module = torch.get_device_module()
    if accelerator_here().torch_device == "cuda" and torch.version.hip is None:
        return all(module.get_device_capability(index) >= (8, 0) for index in range(module.device_count()))
    supported = getattr(module, "is_bf16_supported", None)
    return bool(supported is not None and supported())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rl_async.trainer.compute_type", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--hidden", type=int, required=True, help="size of a token's hidden state")
    parser.add_argument("--inner", type=int, required=True, help="size of the hidden layer of the MLP")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    found = measure(given.device, given.hidden, given.inner, given.threads)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
