"""Do engines sample from the weights that they were given? Asked of every engine after every few publications.

    publish(v) ──> every engine samples a few tokens, while the batch of the next step comes in
    before_train ──> the trainer, whose weights are still v, computes the same log-probabilities ──> warn, stop, resync

When they share devices, the engines have answered and sleep by then, and the trainer has its device.

Versions and checksums tell what an engine received; only its log-probabilities tell what it computes with.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.weight_sync import MismatchConfig
from rl_async.errors import WeightSyncError
from rl_async.messages import Version
from rl_async.trainer.backends.interface import Backend
from rl_async.trainer.batches.tensors import Tensors
from rl_async.trainer.publishing.canaries import Canaries, Canary
from rl_async.trainer.publishing.publisher import Publisher

log = logging.getLogger("rl_async.mismatch")


@dataclass(frozen=True)
class Mismatch:
    """Of all engines: d = log pi(trainer) - log mu(engine) over the canaries' tokens."""

    means: list[float]  # of |d|, per engine
    largest: float  # |d|
    kl: float  # mean of exp(d) - 1 - d, an estimate of KL(mu || pi) (k3)

    def metrics(self) -> dict[str, float]:
        """For the step's line."""
        return {
            "mismatch/mean": sum(self.means) / len(self.means),
            "mismatch/worst_engine_mean": max(self.means),
            "mismatch/max": self.largest,
            "mismatch/kl": self.kl,
        }


class WatchedPublisher:
    """A publisher that compares. All ranks call it alike; only rank 0 has ``canaries``."""

    def __init__(
        self, publisher: Publisher, canaries: Canaries | None, config: MismatchConfig, temperature: float
    ) -> None:
        self._publisher, self._canaries, self._config, self._temperature = publisher, canaries, config, temperature
        self._published: tuple[Version, Backend] | None = None  # until it was compared
        self._found: dict[str, float] = {}
        self._publications = 0
        self._resynced = False

    def before_train(self) -> None:
        """Compare, while the weights are those that the engines were given.

        Raises WeightSyncError, on all ranks alike, when the run is to end.
        """
        drawn = self._canaries.collect() if self._published is not None and self._canaries is not None else []
        self._publisher.before_train()  # without it the weights need not be where they can compute
        if self._published is not None:
            version, backend = self._published
            self._published = None
            if self._beyond_limit(version, backend, drawn):
                self._publisher.publish(version, backend)
                self._publisher.before_train()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """As the publisher does, and let the engines sample. The metrics are those of the last comparison."""
        metrics = self._publisher.publish(version, backend)
        if self._publications % self._config.every == 0 or self._resynced:
            self._published = version, backend
            if self._canaries is not None:
                self._canaries.send(version)
        self._publications += 1
        found, self._found = self._found, {}
        return metrics | found

    def _beyond_limit(self, version: Version, backend: Backend, drawn: Sequence[Canary]) -> bool:
        """Whether the weights are to be sent again."""
        agreement = compare(backend, drawn, self._temperature)
        silent = self._canaries.asked - len(drawn) if self._canaries is not None else 0
        if silent:
            log.warning("version %s: %d engines sampled nothing to compare within the deadline", version, silent)
        self._found = {"mismatch/engines": float(len(drawn)), "mismatch/silent": float(silent)}
        if agreement is None:
            return False
        self._found |= agreement.metrics()
        worse = [n for n, mean in enumerate(agreement.means) if not mean <= self._config.limit]  # or not-a-number
        if not worse:
            self._resynced = False
            return False
        names = [drawn[n].engine_id if drawn else f"engine number {n}" for n in worse]  # rank 0 alone knows them
        by = ", ".join(f"{agreement.means[n]:.3g} from those of {name}" for n, name in zip(worse, names, strict=True))
        what = (
            f"version {version} is not what engines sample from: the trainer's log-probabilities differ, on average, "
            f"by {by} (weight_sync.mismatch.limit = {self._config.limit:g})"
        )
        if self._config.action == "stop" or (self._config.action == "resync" and self._resynced):
            again = "; sending the weights again did not help" if self._resynced else ""
            raise WeightSyncError(f"{what}{again}. Compare them with `rl-async engine verify`")
        log.warning("%s", what)
        self._resynced = self._config.action == "resync"
        return self._resynced


def compare(backend: Backend, drawn: Sequence[Canary], temperature: float) -> Mismatch | None:
    """Rank 0's canaries under the backend's weights, on all ranks; None if there are none. A collective."""
    tokens, lengths, behaviour, mask = _broadcast(drawn)
    if len(tokens) == 0:
        return None
    device = backend.device
    outputs = backend.forward(
        Tensors(
            tokens=tokens.to(device),
            lengths=lengths,
            mask=mask.to(device),
            temperature=torch.full((len(tokens), 1, 1), temperature, device=device),
        )
    )
    assert outputs.logprobs is not None
    difference = (outputs.logprobs.cpu() - behaviour).double()
    sampled = difference[mask]
    means = [row[used].abs().mean().item() for row, used in zip(difference, mask, strict=True)]
    found = torch.tensor([sampled.abs().max().item(), (sampled.exp() - 1 - sampled).mean().item(), *means])
    dist.broadcast(found, 0)  # rounding differs between ranks, and all must come to the same verdict
    largest, kl, *means = found.tolist()
    return Mismatch(means, largest, kl)


def _broadcast(drawn: Sequence[Canary]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rank 0's canaries on every rank: tokens int64 [B, T], lengths int64 [B], log-probabilities float32 and mask
    bool [B, T-1]."""
    shape = torch.tensor([len(drawn), max((len(canary.token_ids) for canary in drawn), default=1)])
    dist.broadcast(shape, 0)
    rows, width = shape.tolist()
    tokens, lengths = torch.zeros((rows, width), dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    behaviour, mask = torch.zeros((rows, width - 1)), torch.zeros((rows, width - 1), dtype=torch.bool)
    for row, canary in enumerate(drawn):
        end = len(canary.token_ids)
        tokens[row, :end], lengths[row] = torch.tensor(canary.token_ids), end
        behaviour[row, end - 1 - len(canary.logprobs) : end - 1] = torch.tensor(canary.logprobs)
        mask[row, end - 1 - len(canary.logprobs) : end - 1] = True
    for tensor in (tokens, lengths, behaviour, mask) if rows else ():
        dist.broadcast(tensor, 0)
    return tokens, lengths, behaviour, mask
