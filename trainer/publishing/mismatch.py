"""Checks, every few publications, that engines sample from the weights that they were given.

    publish(v) ──> every engine samples a few tokens while the trainer waits for its next batch
    before_train ──> the trainer, whose weights are still v, computes the same log-probabilities ──> warn, stop, resync

On shared devices the engines have answered and sleep by then, and the trainer has its device. Versions and checksums
prove what an engine received; only its log-probabilities prove what it computes with.
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
    """Statistics of d = log pi(trainer) - log mu(engine) over the canaries' tokens of all engines."""

    means: list[float]  # mean of |d| per engine
    largest: float  # largest |d|
    kl: float  # mean of exp(d) - 1 - d, an estimate of KL(mu || pi) (k3)

    def metrics(self) -> dict[str, float]:
        """Return the metrics ``mismatch/...`` of a step."""
        return {
            "mismatch/mean": sum(self.means) / len(self.means),
            "mismatch/worst_engine_mean": max(self.means),
            "mismatch/max": self.largest,
            "mismatch/kl": self.kl,
        }


class WatchedPublisher:
    """A publisher that compares log-probabilities. All ranks call it alike; only rank 0 has ``canaries``."""

    def __init__(
        self, publisher: Publisher, canaries: Canaries | None, config: MismatchConfig, temperature: float
    ) -> None:
        self._publisher, self._canaries, self._config, self._temperature = publisher, canaries, config, temperature
        self._published: tuple[Version, Backend] | None = None  # to be compared in the next step
        self._metrics: dict[str, float] = {}  # of the last comparison
        self._publications = 0
        self._resynced = False

    def before_train(self) -> None:
        """Compare while the trainer still has the published weights; publish them again if that is configured.

        Raises WeightSyncError, on all ranks alike, if the mismatch is to end the run.
        """
        drawn = self._canaries.collect() if self._published is not None and self._canaries is not None else []
        self._publisher.before_train()  # before it the weights may not be on the device
        if self._published is not None:
            version, backend = self._published
            self._published = None
            if self._beyond_limit(version, backend, drawn):
                self._publisher.publish(version, backend)
                self._publisher.before_train()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """Publish, and let the engines sample. The metrics include those of the last comparison."""
        metrics = self._publisher.publish(version, backend)
        if self._publications % self._config.every == 0 or self._resynced:
            self._published = version, backend
            if self._canaries is not None:
                self._canaries.send(version)
        self._publications += 1
        compared, self._metrics = self._metrics, {}
        return metrics | compared

    def _beyond_limit(self, version: Version, backend: Backend, drawn: Sequence[Canary]) -> bool:
        """Compare, log or raise as configured, and return whether to publish the weights again."""
        mismatch = compare(backend, drawn, self._temperature)
        silent = self._canaries.requested - len(drawn) if self._canaries is not None else 0
        if silent:
            log.warning("version %s: %d engines returned nothing to compare within the deadline", version, silent)
        self._metrics = {"mismatch/engines": float(len(drawn)), "mismatch/silent": float(silent)}
        if mismatch is None:
            return False
        self._metrics |= mismatch.metrics()
        worse = [n for n, mean in enumerate(mismatch.means) if not mean <= self._config.limit]  # also true of NaN
        if not worse:
            self._resynced = False
            return False
        names = [drawn[n].engine_id if drawn else f"engine number {n}" for n in worse]  # only rank 0 has the names
        by = ", ".join(f"{mismatch.means[n]:.3g} from {name}" for n, name in zip(worse, names, strict=True))
        what = (
            f"engines do not sample from version {version}: the trainer's log-probabilities differ on average by {by} "
            f"(weight_sync.mismatch.limit = {self._config.limit:g})"
        )
        if self._config.action == "stop" or (self._config.action == "resync" and self._resynced):
            again = "; publishing the weights again did not help" if self._resynced else ""
            raise WeightSyncError(f"{what}{again}. Compare trainer and engine with `rl-async engine verify`")
        log.warning("%s", what)
        self._resynced = self._config.action == "resync"
        return self._resynced


def compare(backend: Backend, drawn: Sequence[Canary], temperature: float) -> Mismatch | None:
    """Compare rank 0's canaries with the backend's weights, on all ranks; None if there are none. A collective."""
    tokens, lengths, behaviour, mask = _broadcast(drawn)
    experts = _broadcast_experts(drawn, tokens.shape)
    if len(tokens) == 0:
        return None
    device = backend.device
    outputs = backend.forward(
        Tensors(
            tokens=tokens.to(device),
            lengths=lengths,
            mask=mask.to(device),
            temperature=torch.full((len(tokens), 1, 1), temperature, device=device),
            experts=experts,
        )
    )
    assert outputs.logprobs is not None
    difference = (outputs.logprobs.cpu() - behaviour).double()
    sampled = difference[mask]
    means = [row[used].abs().mean().item() for row, used in zip(difference, mask, strict=True)]
    found = torch.tensor([sampled.abs().max().item(), (sampled.exp() - 1 - sampled).mean().item(), *means])
    dist.broadcast(found, 0)  # rounding differs between ranks, and all must decide alike
    largest, kl, *means = found.tolist()
    return Mismatch(means, largest, kl)


def _broadcast(drawn: Sequence[Canary]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Broadcast rank 0's canaries.

    Returns tokens int64 [B, T], lengths int64 [B], log-probabilities float32 [B, T-1] and mask bool [B, T-1].
    """
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


def _broadcast_experts(drawn: Sequence[Canary], shape: Sequence[int]) -> Tensor | None:
    """Broadcast the experts that rank 0's canaries went through, int16 [B, T, layers, k], -1 where none were recorded.

    None if no engine records any.
    """
    recorded = {
        row: torch.from_numpy(c.experts.astype("int32")) for row, c in enumerate(drawn) if c.experts is not None
    }
    sizes = torch.tensor(next((part.shape[1:] for part in recorded.values()), (0, 0)))
    dist.broadcast(sizes, 0)
    if not sizes.all():
        return None
    experts = torch.full((*shape, *sizes.tolist()), -1, dtype=torch.int32)  # gloo knows no int16
    for row, part in recorded.items():
        experts[row, : len(part)] = part
    dist.broadcast(experts, 0)
    return experts.to(torch.int16)
