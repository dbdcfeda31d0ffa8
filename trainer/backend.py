"""What the trainer needs of a model that may be spread over ranks. ``fsdp2.py`` provides it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rl_async.trainer.batching import Tensors

LossFn = Callable[[int, Tensor], Tensor]  # (micro-batch number, log-probabilities [B, T-1]) -> scalar


class Backend(Protocol):
    """One policy, sharded over the ranks of a process group. Every method is a collective."""

    device: str

    def logprobs(self, batch: Tensors) -> Tensor:
        """Log-probabilities [B, T-1] of tokens 1..T-1 at the recorded temperature, without gradient."""
        ...

    def step(self, batches: Sequence[Tensors], loss_fn: LossFn) -> tuple[float, float]:
        """One optimizer step over micro-batches. Returns the summed loss of this rank and the global gradient norm.

        Raises TrainingDiverged, before any weight changes, when either is not finite.
        """
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under Hugging Face names in the model's dtype, one at a time; tied duplicates left out."""
        ...

    def save(self, folder: Path) -> None:
        """Write model and optimizer; rank 0 writes, all ranks take part."""
        ...

    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote, on any number of ranks."""
        ...

    def sleep(self) -> None:
        """Give the device's memory of the optimizer back."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``."""
        ...
