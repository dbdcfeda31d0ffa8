"""What the trainer needs of a model that may be spread over ranks. ``fsdp2.py`` and ``megatron.py`` provide it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch.distributed as dist
from torch import Tensor

from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.batches.tensors import Tensors
from rl_async.weight_sync.reshard.gather import ShardedWeights

OutputName = Literal["entropy", "sum_squares", "distribution", "values"]
Published = Literal["merged", "base", "adapters"]


class Outputs(msgspec.Struct, frozen=True):
    """What one forward pass says about tokens 1..T-1 of a micro-batch, at the recorded temperature.

    ``values`` comes from a value head (of a critic always, of a policy that shares its backbone when asked for),
    everything else from a policy head; what was not asked for is None. Where a row has no token any more
    (``Tensors.lengths``) the numbers are finite and mean nothing.
    """

    logprobs: Tensor | None = None  # [B, T-1] of the tokens that are there
    entropy: Tensor | None = None  # [B, T-1] of the distribution over the next token
    sum_squares: Tensor | None = None  # [B, T-1] sum over the vocabulary of pi^2
    distribution: Tensor | None = None  # [B, T-1, V] log-probabilities of all tokens
    values: Tensor | None = None  # [B, T-1] value of the state in which each token was chosen


def policy_outputs(logits: Tensor, chosen: Tensor, requested: frozenset[OutputName]) -> Outputs:
    """Outputs from logits [B, T, V] and the tokens that follow them, int64 [B, T]."""
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(2, chosen[..., None]).squeeze(2) - normaliser
    if not requested:
        return Outputs(logprobs)  # a distribution over the vocabulary is never built
    distribution = logits - normaliser[..., None]
    return Outputs(
        logprobs=logprobs,
        entropy=-(distribution.exp() * distribution).sum(-1) if "entropy" in requested else None,
        sum_squares=(2 * distribution).exp().sum(-1) if "sum_squares" in requested else None,
        distribution=distribution if "distribution" in requested else None,
    )


LossFn = Callable[[int, Outputs], Tensor]  # (micro-batch number, outputs that carry gradient) -> scalar


class Backend(Protocol):
    """One model, sharded over the ranks of a process group. Every method is a collective.

    The processes of one data-parallel rank pass the same micro-batches. In ``step`` each of them calls ``loss_fn`` on
    every micro-batch in turn, on equal numbers; these carry gradient only where the logits are. A loss may therefore
    keep sums of what it sees, and all processes get the same sums.
    """

    device: str
    row_cost: RowCost  # what a row costs it
    data_parallel: DataParallel

    def forward(self, batch: Tensors, requested: frozenset[OutputName] = frozenset()) -> Outputs:
        """Outputs without gradient."""
        ...

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[OutputName] = frozenset()
    ) -> tuple[float, float]:
        """Take one optimizer step. Returns the loss, summed over this data-parallel rank, and the global gradient norm.

        Raises TrainingDiverged, before any weight changes, when either is not finite.
        """
        ...

    def sharded_weights(self, what: Published = "merged") -> ShardedWeights:
        """Who holds what of the weights that engines get, under Hugging Face names, to travel in the model's dtype;
        tied duplicates left out, and a value head, which no engine knows. Of what is published as it is held, no
        copy is made. Of a backend that trains adapters: merged with them, without them, or they alone as
        ``weight_sync/buckets/adapters.py`` names them, in float32."""
        ...

    def stage(self, folder: Path, group: dist.ProcessGroup | None) -> Callable[[], None]:
        """Copy model and optimizer to the host; what is returned writes the copy into ``folder``, and may be called in
        another thread while training goes on. It is a collective of ``group`` alone (None: of all ranks).

        It raises CheckpointFailed on all ranks if one of them could not write.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write model and optimizer at once."""
        ...

    def load(self, folder: Path) -> None:
        """Read what was written, on any number of ranks."""
        ...

    def sleep(self) -> None:
        """Give the device's memory back: that of the optimizer, and of the weights if the backend can. Until ``wake``
        only ``stage``, ``save`` and ``export`` may be called."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``."""
        ...
