"""Measures whether this machine multiplies the matrices of a model's layers faster in bfloat16 or in float32.

The launcher runs it as a process of its own before a run starts, since importing torch takes seconds and keeps its
memory; it prints one line of JSON, ``Measured`` of ``launcher/plan/machine.py``:

    python -m rl_async.trainer.compute_type --device cpu --hidden 576 --inner 1536 --threads 1
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rl_async.accelerators import accelerator_here

TOKENS = 128
# Larger layers are measured in part: beyond this many multiplications rates hardly change, and a type that a processor
# only emulates would take seconds.
PRODUCTS = 1 << 27
TRIES = 5
# A type this many times slower than another, and slower than this, is not measured a second time.
HOPELESS = 4.0
BRIEF_S = 0.1
TYPES = (torch.float32, torch.bfloat16)


def measure_rates(hidden: int, inner: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Time one layer's product ``x [TOKENS, hidden] @ W [inner, hidden].T`` with its two gradients in each type.

    Types alternate, and each counts with its fastest try, so that a moment when the processor is busy elsewhere
    changes little. Returns GFLOP/s by type.
    """
    hidden = min(hidden, PRODUCTS // TOKENS)
    inner = max(1, min(inner, PRODUCTS // (TOKENS * hidden)))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    drawn = draw(TOKENS, hidden), draw(inner, hidden), draw(TOKENS, inner)
    operands = {kind: [tensor.to(kind) for tensor in drawn] for kind in TYPES}

    def timed(kind: torch.dtype) -> float:
        inputs, weight, gradient = operands[kind]
        begun = clock()
        _ = inputs @ weight.T, gradient @ weight, gradient.T @ inputs
        return clock() - begun

    # The first try also pays for a kernel's setup.
    first = {kind: timed(kind) for kind in TYPES}
    fastest = dict(first)
    for _ in range(TRIES):
        for kind in TYPES:
            if first[kind] <= max(BRIEF_S, HOPELESS * min(first.values())):
                fastest[kind] = min(fastest[kind], timed(kind))
    operations = 3 * 2 * TOKENS * hidden * inner
    return {str(kind).removeprefix("torch."): operations / seconds / 1e9 for kind, seconds in fastest.items()}


def measure(device: str, hidden: int, inner: int) -> dict[str, Any]:
    """Look at the accelerator if torch finds one and ``device`` is "auto"; else time the products on the CPU."""
    found: dict[str, Any] = {"torch": str(torch.__version__)}
    if device == "cpu":
        return found | {"rates": measure_rates(hidden, inner)}
    if not torch.accelerator.is_available():
        return found
    name = torch.get_device_module().get_device_name(0)
    return found | {"accelerator": name, "has_bfloat16": has_bfloat16()}


def has_bfloat16() -> bool:
    """Whether every visible accelerator has units for bfloat16; torch's own answer also counts emulation."""
    module, least = torch.get_device_module(), accelerator_here().bfloat16_capability
    if least is not None:
        return all(module.get_device_capability(index) >= least for index in range(module.device_count()))
    supported = getattr(module, "is_bf16_supported", None)
    return bool(supported is not None and supported())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rl_async.trainer.compute_type", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--hidden", type=int, required=True, help="size of a token's hidden state")
    parser.add_argument("--inner", type=int, required=True, help="size of the hidden layer of the MLP")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(json.dumps(measure(given.device, given.hidden, given.inner)))


if __name__ == "__main__":
    main()
