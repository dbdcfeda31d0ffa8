"""The Protocol of a model that may be spread over ranks; ``fsdp2.py`` and ``megatron/`` implement it.

In: micro-batches (``Tensors``) and a loss function. Out: ``Outputs`` per token, updated weights, and ``ShardedWeights``
that say which rank holds what. ``update.py`` and fine-tuning's loop call it. To add a backend, implement ``Backend``,
build it in ``actor_critic.py``, and run ``tests/contracts/backends``.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.pictures import PictureProcessor
from rl_async.trainer.batch_layout import RowCost
from rl_async.trainer.packing import Tensors
from rl_async.trainer.ranks import DataParallel
from rl_async.weight_sync.reshard import ShardedWeights

OutputName = Literal["entropy", "sum_squares", "distribution", "values"]
# What AdamW keeps of the mean of earlier gradients, in every step.
ADAM_BETA1 = 0.9
Published = Literal["merged", "base", "adapters"]


class Outputs(msgspec.Struct, frozen=True):
    """Results of one forward pass for tokens 1..T-1 of a micro-batch, at the recorded temperature.

    ``values`` comes from a value head (always for a critic, on request for a policy that shares its backbone with one),
    everything else from a policy head. Outputs that were not requested are None, and so is ``agreement`` unless experts
    are replayed. Beyond the end of a row (``Tensors.lengths``) the numbers are finite and meaningless.

    Attributes:
        logprobs: Log-probabilities of the tokens in the row.
        entropy: Entropy of the distribution over the next token.
        sum_squares: Sum of the squared probabilities of all tokens of the vocabulary.
        distribution: Log-probabilities of all tokens of the vocabulary.
        values: Value of the state before each token.
        agreement: Share of the layers whose router would have chosen the experts that were replayed.
    """

    logprobs: Tensor | None = None  # [B, T-1]
    entropy: Tensor | None = None  # [B, T-1]
    sum_squares: Tensor | None = None  # [B, T-1]
    distribution: Tensor | None = None  # [B, T-1, V]
    values: Tensor | None = None  # [B, T-1]
    agreement: Tensor | None = None  # [B, T-1]


def policy_outputs(logits: Tensor, chosen: Tensor, requested: frozenset[OutputName]) -> Outputs:
    """Compute outputs from logits [B, T, V] and the tokens that follow them, int64 [B, T]."""
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(2, chosen[..., None]).squeeze(2) - normaliser
    if not requested:
        # A distribution over the vocabulary is never built.
        return Outputs(logprobs)
    distribution = logits - normaliser[..., None]
    return Outputs(
        logprobs=logprobs,
        entropy=-(distribution.exp() * distribution).sum(-1) if "entropy" in requested else None,
        sum_squares=(2 * distribution).exp().sum(-1) if "sum_squares" in requested else None,
        distribution=distribution if "distribution" in requested else None,
    )


# Computes a scalar loss from a micro-batch's number and its outputs, which carry gradient.
LossFn = Callable[[int, Outputs], Tensor]


class Reference(Protocol):
    """A model that only scores. Every method is a collective, as ``Backend`` describes it."""

    row_cost: RowCost

    def forward(self, batch: Tensors, requested: frozenset[OutputName] = frozenset()) -> Outputs: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class Backend(Protocol):
    """One model, sharded over the ranks of a process group. Every method is a collective.

    The processes of one data-parallel rank pass the same micro-batches. In ``step`` each of them calls ``loss_fn`` on
    every micro-batch in turn, on equal numbers; these carry gradient only where the logits are. A loss may therefore
    keep sums over its inputs, and all processes get the same sums.

    Attributes:
        row_cost: How much work a row is; rows are divided among ranks by it.
        replays_routers: Whether tokens go through the experts that engines recorded (``Tensors.experts``).
        pictures: Encodes the images of rows; None if the model reads none.
    """

    device: str
    row_cost: RowCost
    replays_routers: bool
    pictures: PictureProcessor | None
    data_parallel: DataParallel

    def forward(self, batch: Tensors, requested: frozenset[OutputName] = frozenset()) -> Outputs:
        """Compute outputs of a micro-batch without gradient."""
        ...

    def step(
        self, batches: Sequence[Tensors], loss_fn: LossFn, requested: frozenset[OutputName] = frozenset()
    ) -> tuple[float, float]:
        """Take one optimizer step. Returns the loss, summed over this data-parallel rank, and the global gradient norm.

        Raises TrainingDiverged, before any weight changes, when either is not finite.
        """
        ...

    def sharded_weights(self, what: Published = "merged") -> ShardedWeights:
        """Return this rank's shards of the weights that engines get, and the layout over all ranks.

        Names are those of published checkpoints (``weight_sync/layout.py`` for experts); tied duplicates and a value
        head are left out. Weights are sent in the model's dtype, without a copy if they are held as they are published.
        A backend that trains adapters gives the weights merged with them, the base without them, or the adapters alone,
        in float32 and named as in ``weight_sync/buckets.py``.
        """
        ...

    def stage(self, folder: Path, group: dist.ProcessGroup | None) -> Callable[[], None]:
        """Copy what this rank saves to the host and return a function that writes the copy into ``folder``.

        That function may run in another thread while training continues. It is a collective of ``group``, by default
        of all ranks, and raises CheckpointFailed on all ranks if one of them could not write.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write model and optimizer into ``folder`` and return when they are written."""
        ...

    def load(self, folder: Path) -> None:
        """Read model and optimizer from ``folder``, which any number of ranks may have written."""
        ...

    def sleep(self) -> None:
        """Release device memory: the optimizer's, and the weights' if the backend can.

        Until ``wake`` only ``stage``, ``save`` and ``sharded_weights`` may be called.
        """
        ...

    def wake(self) -> None:
        """Move back to the device what ``sleep`` released."""
        ...


def learning_rate_factor(config: TrainerConfig) -> Callable[[int], float]:
    """Return the factor on the peak learning rate by optimizer step: warm-up, then constant, linear or cosine to 0."""
    total = config.steps * config.epochs * config.minibatches

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
        if config.schedule == "linear":
            return 1.0 - done
        if config.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0

    return factor
