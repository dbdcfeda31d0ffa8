"""How training and generation share devices: side by side; in turns; or both, with further engines on devices that the
trainer lends. The trainer calls a phase and never asks which.

before_train ──> train ──> export the weights ──> after_train        on every rank, in this order, every step
"""

import time
from collections.abc import Callable
from typing import Literal, Protocol

from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync.fleet import Weights
from rl_async.weight_sync.protocol import SyncReport
from rl_async.weight_sync.ranks.shipment import RankShards

Mode = Literal["colocated", "disaggregated"]


class EngineUpdater(Protocol):
    """What a phase needs of the coordinator. All ranks call each method alike, and return when rank 0 has done it."""

    def publish(self, version: Version, weights: Weights) -> SyncReport:
        """Bring all engines to ``version``; suspended ones wake up and continue their requests."""
        ...

    def publish_beside(self, version: Version, weights: Weights) -> SyncReport:
        """Bring the engines to ``version`` that are not suspended."""
        ...

    def suspend(self) -> None:
        """Pause the engines on the trainer's devices, and take their device memory. Their requests move to others."""
        ...

    def defer_late(self) -> None:
        """Serve no late engine until the next publication; return when none is being served."""
        ...


class IdleCoordinator:
    """Stands in for the coordinator on every rank but 0, which has no engines to talk to: waits for rank 0.

    ``meet`` is a collective that returns on every rank whether rank 0 is still at it, so that rank 0 may take longer
    than a single collective may.
    """

    def __init__(self, meet: Callable[[bool], bool]) -> None:
        self._meet = meet

    def publish(self, version: Version, weights: Weights) -> SyncReport:
        """Wait until rank 0 has published; return an empty report."""
        self._until_rank_0_is_done()
        return SyncReport(
            version=version, seconds=0.0, waiting_seconds=0.0, pause_seconds=0.0, nbytes=0, engines=[], failures=[]
        )

    def publish_beside(self, version: Version, weights: Weights) -> SyncReport:
        """Wait until rank 0 has published; return an empty report."""
        return self.publish(version, weights)

    def suspend(self) -> None:
        """Wait until rank 0 has suspended the engines."""
        self._until_rank_0_is_done()

    def defer_late(self) -> None:
        """Wait until rank 0 serves no late engine."""
        self._until_rank_0_is_done()

    def _until_rank_0_is_done(self) -> None:
        while self._meet(False):
            pass


class Phase(Protocol):
    """One trainer step from the devices' point of view. All ranks call both methods alike."""

    def before_train(self) -> None:
        """Return when this rank may use its device for training. Idempotent."""
        ...

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Publish the weights, including the initial ones before any training.

        Raises what WeightCoordinator.publish raises.
        """
        ...


class Overlapped:
    """Engines and trainer have devices of their own: generation pauses only while weights are transferred."""

    def __init__(self, updater: EngineUpdater) -> None:
        self._updater = updater

    def before_train(self) -> None:
        """Do nothing: the trainer's devices are always its own."""

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Publish while the trainer's models stay on their devices."""
        return self._updater.publish(version, weights)


class TakeTurns:
    """Engines and trainer share devices.

        pause, sleep ──> onload ──> train ──> offload ──> wake(weights) ──> transfer ──> wake(kv_cache) ──> resume

    Requests in flight stay in their engines during training and continue with the new weights. ``offload`` is told
    whether the engines sleep: then the weights that travel may wait on the device until their caches wake.
    """

    def __init__(
        self,
        updater: EngineUpdater,
        barrier: Callable[[], None],
        onload: Callable[[], None],
        offload: Callable[[bool], None],
    ) -> None:
        self._updater, self._barrier, self._onload, self._offload = updater, barrier, onload, offload
        self._asleep = False  # whether the engines are, which they are not at the start

    def before_train(self) -> None:
        """Put the engines to sleep, then move the models onto the device.

        Every rank waits for rank 0, which alone knows when the engines sleep.
        """
        self._updater.suspend()
        self._onload()
        self._asleep = True

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Move the trainer's models off all devices; then the engines wake and take the weights.

        Buckets, which one rank has gathered, leave its device too: all the weights would be too much for it.
        """
        self._offload(self._asleep)
        self._asleep = False
        moved = weights if isinstance(weights, RankShards) else [bucket.offloaded() for bucket in weights]
        self._barrier()
        return self._updater.publish(version, moved)


class Lending:
    """Engines have devices of their own; further ones run on the trainer's devices while it waits for a batch.

        withdraw, pause, sleep the lent engines ──> onload ──> train ──> worth it?
            yes: serve no late engine ──> offload ──> publish to all; lent engines wake and join the pool
            no:  publish to the others; the trainer's models stay, and the lent engines sleep on

    It is worth it if the trainer's devices last idled for longer than the switch takes there and back. The way back is
    taken to be as long as the way there, which is measured. Rank 0 decides (``agree``).
    """

    def __init__(
        self,
        updater: EngineUpdater,
        turns: TakeTurns,
        agree: Callable[[bool], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._updater, self._turns, self._agree, self._clock = updater, turns, agree, clock
        self._lent = False
        self._switch_s = self._idle_s = 0.0
        self._published_at = clock()

    def before_train(self) -> None:
        """Take the devices back, if they are lent."""
        began = self._clock()
        self._idle_s = began - self._published_at
        if self._lent:
            self._turns.before_train()
            self._switch_s, self._lent = self._clock() - began, False

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Publish, and lend the devices if that is worth it.

        An engine of the trainer's own that came late may still be sent the weights before these, from copies on all
        ranks that offloading overwrites. No rank goes on before rank 0 has deferred it.
        """
        self._lent = self._agree(self._idle_s >= 2 * self._switch_s)
        if self._lent:
            self._updater.defer_late()
        publish = self._turns.after_train if self._lent else self._updater.publish_beside
        report = publish(version, weights)
        self._published_at = self._clock()
        return report


def shares_devices(mode: Mode) -> Callable[[EngineRecord], bool]:
    """Return which engines are on the trainer's devices: colocated all of them, else those that run on lent ones."""
    return (lambda record: True) if mode == "colocated" else (lambda record: record.is_lent)


def build_phase(
    mode: Mode,
    updater: EngineUpdater,
    *,
    lends: bool,
    agree: Callable[[bool], bool],
    barrier: Callable[[], None],
    onload: Callable[[], None],
    offload: Callable[[bool], None],
) -> Phase:
    """Return the phase of a mode, in which the trainer ``lends`` its devices or not. ``onload`` and ``offload`` move
    this rank's models; both must be idempotent. For what ``offload`` is told see ``TakeTurns``. ``agree`` returns what
    rank 0 gives it, on all ranks."""
    turns = TakeTurns(updater, barrier, onload, offload)
    if mode == "colocated":
        return turns
    return Lending(updater, turns, agree) if lends else Overlapped(updater)
