"""Publishes the policy's weights to engines, which confirm the version, and checks that they sample from them.

    publish(v) ──> every engine samples a few tokens while the trainer waits for its next batch
    before_train ──> the trainer, whose weights are still v, computes the same log-probabilities ──> warn, stop, resync

In: a version and the policy's backend, after a step. Out: engines that confirmed the version, and metrics
``sync/...`` and ``mismatch/...``. The training loop calls a ``Publisher`` on every rank. A ``WeightSource`` says
where weights are sent from: gathered on rank 0, or every rank's own shards. How training and generation share devices
is up to the phase (``weight_sync.coordinator``). ``WatchedPublisher`` wraps a publisher and compares log-probabilities
of canaries. On shared devices the engines have answered and sleep by then, and the trainer has its device. Versions
and checksums prove what an engine received; only its log-probabilities prove what it computes with. To add a check of
publications, write another wrapper with the same two methods.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async import tracing
from rl_async.concurrency import gather_or_cancel, in_daemon_thread
from rl_async.configs.schema.trainer import LoraConfig, MismatchConfig
from rl_async.errors import EngineError, WeightSyncError
from rl_async.messages import EngineList, EngineRecord, Sampling, Version
from rl_async.process.run_files import enter
from rl_async.rollout_server.api import GenerateRequest
from rl_async.rollout_server.pool import EngineClient
from rl_async.tracing import Value
from rl_async.trainer.backend import Backend
from rl_async.trainer.packing import Tensors
from rl_async.weight_sync.buckets import Bucket, as_adapters
from rl_async.weight_sync.coordinator import Phase, Weights
from rl_async.weight_sync.protocol import SyncReport
from rl_async.weight_sync.reshard import Gathering
from rl_async.weight_sync.sender import Outlet, RankShards
from rl_async.weight_sync.wave import CUT_OFF

log = logging.getLogger("rl_async.mismatch")


class WeightSource(Protocol):
    """Prepares this rank's weights for a publication. All ranks call it alike."""

    def __call__(self, version: Version, backend: Backend) -> Weights:
        """Return the weights that the phase publishes, on rank 0; other ranks return an empty sequence."""
        ...

    def keep(self, *, stays: bool) -> None:
        """Copy weights that still lie in the backend, whose memory is about to be given to the engines.

        If ``stays``, the copy may wait on the device until it is sent.
        """
        ...

    def rest(self, backend: Backend) -> None:
        """Note that the backend sleeps: a copy that ``stays`` need not follow weights that moved to the host."""
        ...


class GatheredWeights:
    """Gathers whole tensors in buckets on rank 0, as deltas, adapters and SGLang need them.

    With ``lora`` it gathers adapters, and once their base, which is kept for engines that do not hold it. Engines that
    loaded the base by themselves, named ``own_base``, get nothing but adapters.
    """

    def __init__(self, gathering: Gathering, lora: LoraConfig | None = None, own_base: str = "") -> None:
        self._gathering, self._lora, self._own_base = gathering, lora, own_base
        self._base: list[Bucket] | None = None

    def __call__(self, version: Version, backend: Backend) -> Weights:
        if self._lora is None:
            return self._gathering.buckets(backend.sharded_weights())
        if self._base is None and not self._own_base:
            self._base = [bucket.offloaded() for bucket in self._gathering.buckets(backend.sharded_weights("base"))]
        learned = self._gathering.buckets(backend.sharded_weights("adapters"))
        return [*(self._base or ()), *as_adapters(learned, self._lora.scale, self._own_base)]

    def keep(self, *, stays: bool) -> None:
        """Do nothing: the buckets are copies."""

    def rest(self, backend: Backend) -> None:
        """Do nothing: the buckets are copies."""


class ShardedByRank:
    """Sends every rank's shards from where they are. Only rank 0 has ``shards``, which directs all ranks."""

    def __init__(self, outlet: Outlet, shards: RankShards | None) -> None:
        self._outlet, self._shards = outlet, shards

    def __call__(self, version: Version, backend: Backend) -> Weights:
        self._outlet.offer(backend.sharded_weights())
        return self._shards if self._shards is not None else ()

    def keep(self, *, stays: bool) -> None:
        self._outlet.keep(stays=stays)

    def rest(self, backend: Backend) -> None:
        self._outlet.rest(backend.sharded_weights().held)


class Publisher(Protocol):
    """Publishes weights to engines. All ranks call it alike."""

    def before_train(self) -> None:
        """Return when this rank may use its device for training."""
        ...

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """Send the weights, and wait until the engines confirm. Returns the metrics ``sync/...``."""
        ...


class EnginePublisher:
    """Publishes the ranks' weights, as ``source`` has them, through a phase."""

    def __init__(self, phase: Phase, source: WeightSource) -> None:
        self._phase, self._source = phase, source

    def before_train(self) -> None:
        self._phase.before_train()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        with of_publication(version, is_first_rank=dist.get_rank() == 0) as ended:
            report = self._phase.after_train(version, self._source(version, backend))
            ended(report)
        return {
            "sync/without_engines_s": report.waiting_seconds,
            "sync/pause_s": report.pause_seconds,
            "sync/total_s": report.seconds,
            "sync/bytes": float(report.nbytes),
            "sync/engines": float(len(report.engines)),
            "sync/failures": float(len(report.failures)),
        }


class NoEngines:
    """The publisher of a replay, which has no engines: it only announces versions, to the queue if the run has one."""

    def __init__(self, announce: Callable[[Version], object] = lambda version: None) -> None:
        self._announce = announce

    def before_train(self) -> None:
        """Do nothing: no engine shares this device."""

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        self._announce(version)
        return {}


# --- Spans of a publication

PUBLISH = "publish"
# The stage of an engine that waits for its trainer.
ASLEEP = "asleep"


@contextmanager
def of_publication(version: Version, *, is_first_rank: bool) -> Iterator[Callable[[SyncReport], None]]:
    """Span a publication, which the first rank exports. Yields a function that adds the result to the span."""
    trace = f"{PUBLISH} {version}" if is_first_rank else ""
    with tracing.span(trace, PUBLISH, {"rl_async.version": str(version)}, key=PUBLISH, parent="") as about:

        def ended(report: SyncReport) -> None:
            about["rl_async.engines"] = len(report.engines)
            about["rl_async.bytes"] = report.nbytes
            about["rl_async.pause_s"] = report.pause_seconds
            if report.failures:
                about["error.type"] = "engines_cut_off"
                about["rl_async.failures"] = report.failures

        yield ended


class EngineUpdates:
    """Records the update of each engine, as the coordinator notes its stages: in the run's timeline and as spans."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The version and the time of the first stage, by engine.
        self._began: dict[str, tuple[str, int]] = {}

    def __call__(self, engine: str, version: str, stage: str) -> None:
        """Record that an update of an engine has entered a stage; the empty stage and CUT_OFF end it."""
        enter(self._folder, "weights", engine, "" if stage == CUT_OFF else stage, version=version)
        known, began = self._began.get(engine, ("", 0))
        if stage not in ("", ASLEEP, CUT_OFF):
            # An older version that was noted, as by a probe, never ends.
            if known != version:
                self._began[engine] = version, tracing.now()
            return
        self._began.pop(engine, None)
        if stage != ASLEEP and known == version:
            about: dict[str, Value] = {"rl_async.engine": engine, "rl_async.version": version}
            tracing.add(f"{PUBLISH} {version}", "update engine", began, about, parent=PUBLISH, error=stage)


# --- The comparison with the engines

PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Canary:
    """A sample of one engine: ``logprobs`` belong to the last ``len(logprobs)`` tokens of ``token_ids``.

    ``experts`` [tokens, layers, k] are those of the first tokens, from an engine that records them.
    """

    engine_id: str
    token_ids: list[int]
    logprobs: list[float]
    experts: np.ndarray | None = None


class Canaries:
    """Has each engine of ``directory()`` sample ``tokens`` tokens after a random prompt of ids below ``vocabulary``.

    The prompt has no ``image_token``, since some engines would look for its image.
    """

    def __init__(
        self,
        directory: Callable[[], EngineList],
        connect: Callable[[EngineRecord], EngineClient],
        *,
        vocabulary: int,
        tokens: int,
        temperature: float,
        timeout_s: float,
        image_token: int | None = None,
    ) -> None:
        self._directory, self._connect, self._vocabulary = directory, connect, vocabulary
        self._image_token = image_token
        self._tokens, self._sampling, self._timeout_s = tokens, Sampling(temperature=temperature), timeout_s
        self._pending: Future[list[Canary]] | None = None
        # The number of engines that the latest ``send`` addressed.
        self.requested = 0

    def send(self, version: Version) -> None:
        """Start sampling, in a thread, on the engines that serve exactly this version. Raises QueueLost."""
        engines = [record for record in self._directory().engines if record.version == version]
        self.requested = len(engines)
        self._pending = in_daemon_thread(lambda: asyncio.run(self._sample_all(engines, version)), "canaries")

    def collect(self) -> list[Canary]:
        """Return the samples requested by ``send``. Blocks until all engines answered or timed out."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else []

    async def _sample_all(self, engines: Sequence[EngineRecord], version: Version) -> list[Canary]:
        answers = await gather_or_cancel(*(self._sample(record, version) for record in engines))
        return [canary for canary in answers if canary is not None]

    async def _sample(self, record: EngineRecord, version: Version) -> Canary | None:
        """Sample from one engine. Returns None if it is lost or busy beyond the deadline, which others notice."""
        prompt = np.random.default_rng([version.lineage, version.step]).integers(0, self._vocabulary, PROMPT_TOKENS)
        prompt[prompt == self._image_token] = 0
        request = GenerateRequest(
            request_id=f"canary-{version}",
            token_ids=prompt.tolist(),
            sampling=self._sampling,
            max_tokens=self._tokens,
            stop_token_ids=[],
            min_version=version,
        )
        engine = self._connect(record)
        try:
            async with asyncio.timeout(self._timeout_s):
                got = await engine.generate(request, session="")
        except (EngineError, TimeoutError) as error:
            log.warning(
                "engine %s returned no tokens to compare: %s", record.engine_id, str(error) or type(error).__name__
            )
            return None
        finally:
            await engine.close()
        # The engine aborted the request before its first token.
        if not got.token_ids:
            return None
        experts = None if got.routes is None else got.routes.experts
        return Canary(record.engine_id, request.token_ids + got.token_ids, got.logprobs, experts)


@dataclass(frozen=True)
class Mismatch:
    """Statistics of d = log pi(trainer) - log mu(engine) over the canaries' tokens of all engines.

    ``means`` are of |d| per engine, ``largest`` is the largest |d|, and ``kl`` the mean of exp(d) - 1 - d, an estimate
    of KL(mu || pi) (k3).
    """

    means: list[float]
    largest: float
    kl: float

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
        # The publication that the next step compares, and the metrics of the previous comparison.
        self._published: tuple[Version, Backend] | None = None
        self._metrics: dict[str, float] = {}
        self._publications = 0
        self._resynced = False

    def before_train(self) -> None:
        """Compare while the trainer still has the published weights; publish them again if that is configured.

        Raises WeightSyncError on all ranks if the mismatch ends the run.
        """
        drawn = self._canaries.collect() if self._published is not None and self._canaries is not None else []
        # Until this returns, the weights may not be on the device.
        self._publisher.before_train()
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
        # The negation also catches NaN.
        worse = [n for n, mean in enumerate(mismatch.means) if not mean <= self._config.limit]
        if not worse:
            self._resynced = False
            return False
        # Only rank 0 has the names.
        names = [drawn[n].engine_id if drawn else f"engine number {n}" for n in worse]
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
    """Compare rank 0's canaries with the backend's weights, on all ranks. A collective. None without canaries."""
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
    # Rounding differs between ranks, and all must decide alike.
    dist.broadcast(found, 0)
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
    """Broadcast the experts of rank 0's canaries, int16 [B, T, layers, k], with -1 where none were recorded.

    Returns None if no engine records experts.
    """
    recorded = {
        row: torch.from_numpy(c.experts.astype("int32")) for row, c in enumerate(drawn) if c.experts is not None
    }
    sizes = torch.tensor(next((part.shape[1:] for part in recorded.values()), (0, 0)))
    dist.broadcast(sizes, 0)
    if not sizes.all():
        return None
    # Gloo cannot send int16.
    experts = torch.full((*shape, *sizes.tolist()), -1, dtype=torch.int32)
    for row, part in recorded.items():
        experts[row, : len(part)] = part
    dist.broadcast(experts, 0)
    return experts.to(torch.int16)
