"""Decode steps over tensors of fixed shapes and addresses, which a GPU captures once and then replays.

A step feeds the last token of each row, samples the next ones, and leaves these and their positions where the following
step reads them, so it needs nothing from the host. Rows are padded to a bucket of rows, which use free slots, and keys
to a bucket of lengths, so that few steps have different shapes. Random numbers are drawn before a step, because rows
with a seed have generators of their own.

The host launches a step, then reads the results of the previous one. It learns one step late that a row has ended with
a stop token, and drops the surplus token that was sampled meanwhile.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rl_async.accelerators import graphs_of
from rl_async.rollout_server.embedded.sampler import Sampler
from rl_async.torch_shared import host_buffer, to_device

# Computes logits [rows, V] from the last tokens [rows], their positions [rows] and the number of keys to read.
Compute = Callable[[Tensor, Tensor, int], Tensor]
Step = Callable[[], None]
# Returns a step that does the same without running its Python; the step itself has run once before.
Capture = Callable[[Step], Step]
# Rows are padded to a power of two up to this number, then to a multiple of it.
ROWS = 16
# The smallest bucket of keys; the others are powers of two.
KEYS = 64


def uncaptured(step: Step) -> Step:
    """Return the step itself, for devices without graphs."""
    return step


def capture_for(decode: str | None, device: torch.device) -> Capture | None:
    """Return how steps are captured with ``--decode=static``; None for eager steps, which are the default.

    Static steps on devices without graphs run their Python each time.
    """
    if decode != "static":
        return None
    return graphs_of(torch.get_device_module(device)) or uncaptured


class StaticSteps:
    """The rows of a batch of at most ``max_rows``, as tensors on ``device``, and the steps that were captured.

    ``place`` writes the rows; afterwards only steps and ``compact`` change them.
    """

    def __init__(self, max_rows: int, device: torch.device, capture: Capture) -> None:
        self._max_rows, self._device, self._capture = max_rows, device, capture
        self._last = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions, self._active = torch.zeros_like(self._last), torch.zeros_like(self._last)
        self._drawn = torch.zeros((max_rows, 1), dtype=torch.float64, device=device)
        # Tokens and log-probabilities side by side: float64 holds both exactly, and one copy takes them to the host.
        self._results = torch.zeros((max_rows, 2), dtype=torch.float64, device=device)
        self._ring = [host_buffer(self._results, device.type) for _ in range(2)]
        self._copied = [torch.get_device_module(device).Event() for _ in range(2)]
        self._turn = 0
        self._view: Tensor | None = None
        # The first sampler of each kind, whose tensors steps read, and the one that was adopted last.
        self._samplers: dict[tuple[int, object], Sampler] = {}
        self._sampler: Sampler | None = None
        self._warm: set[tuple[int, int, object]] = set()
        self._captured: dict[tuple[int, int, object], Step] = {}

    def rows(self, count: int) -> int:
        """Return the number of rows that ``count`` rows are padded to."""
        bucket = 1 << (count - 1).bit_length() if count <= ROWS else -(-count // ROWS) * ROWS
        return min(bucket, self._max_rows)

    def holds(self, last: Tensor) -> bool:
        """Whether ``last`` was returned by the latest ``place`` or ``compact``, so the rows are still those."""
        return last is self._view

    def place(self, last: Tensor, positions: Sequence[int]) -> Tensor:
        """Write rows with these last tokens [N] at these positions; return the view of the tokens that steps update."""
        self._last[: len(last)] = last
        self._positions[: len(last)] = to_device(torch.tensor(positions), self._device)
        return self._show(len(last))

    def compact(self, count: int, gaps: Sequence[int], movers: Sequence[int]) -> Tensor:
        """Move the positions of rows ``movers`` to rows ``gaps``, and keep ``count`` rows; return as ``place`` does.

        The caller has moved the last tokens.
        """
        for gap, mover in zip(gaps, movers, strict=True):
            self._positions[gap] = self._positions[mover]
        return self._show(count)

    def _show(self, count: int) -> Tensor:
        # Padding rows stay at position 0 of free slots.
        self._positions[count:] = 0
        self._active.fill_(0)[:count] = 1
        self._view = self._last[:count]
        return self._view

    def forget(self) -> None:
        """Drop captured steps, since tensors that they read have moved or modules have changed."""
        self._warm.clear()
        self._captured.clear()

    def launch(self, sampler: Sampler, longest: int, most: int, compute: Compute) -> Callable[[], list[list[float]]]:
        """Start a step for the placed rows, at most ``longest`` tokens each, of which slots can hold ``most``.

        ``sampler`` is for as many rows as ``rows`` returns. The result waits until the step has ended, and returns the
        token and its log-probability for each row; call it before the step after the next is launched,
        since two buffers alternate.
        """
        assert self._view is not None
        count, view = len(self._view), min(max(KEYS, 1 << (longest - 1).bit_length()), most)
        rows = self.rows(count)
        held = self._samplers.setdefault((rows, sampler.kind), sampler)
        if sampler is not self._sampler:
            held.adopt(sampler)
            self._sampler = sampler
        held.draw_numbers(self._drawn[:rows])
        key = rows, view, sampler.kind
        step = self._captured.get(key)
        if step is None:
            step = partial(self._step, rows, view, held, compute)
            if key in self._warm:
                step = self._captured[key] = self._capture(step)
            self._warm.add(key)
        step()
        ring, copied = self._ring[self._turn], self._copied[self._turn]
        self._turn ^= 1
        ring[:count].copy_(self._results[:count], non_blocking=True)
        copied.record()

        def results() -> list[list[float]]:
            copied.synchronize()
            found: list[list[float]] = ring[:count].tolist()
            return found

        return results

    def _step(self, rows: int, view: int, sampler: Sampler, compute: Compute) -> None:
        last, positions = self._last[:rows], self._positions[:rows]
        distribution = sampler.distribution(compute(last, positions, view))
        tokens, logprobs = sampler.choose(distribution, self._drawn[:rows])
        last.copy_(tokens)
        positions.add_(self._active[:rows])
        self._results[:rows, 0] = tokens
        self._results[:rows, 1] = logprobs
