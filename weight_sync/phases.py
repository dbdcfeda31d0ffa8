"""How training and generation share devices: side by side, or in turns. The trainer calls a phase and never asks which.

before_train ──> train ──> export to buckets ──> after_train        on every rank, in this order, every step
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from rl_async.messages import Version
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.protocol import SyncReport


class EngineUpdater(Protocol):
    """What a phase needs of the coordinator."""

    def publish(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Bring all engines to ``version``; suspended ones wake up and continue their requests."""
        ...

    def suspend(self) -> None:
        """Pause all engines, keeping their requests, and take their device memory."""
        ...


class IdleCoordinator:
    """Stands in for the coordinator on every rank but 0, which has no engines to talk to."""

    def publish(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Return an empty report; rank 0 publishes."""
        return SyncReport(
            version=version, seconds=0.0, waiting_seconds=0.0, pause_seconds=0.0, nbytes=0, engines=[], failures=[]
        )

    def suspend(self) -> None:
        """Do nothing; rank 0 suspends the engines."""


class Phase(Protocol):
    """One trainer step from the devices' point of view. All ranks call both methods alike."""

    def before_train(self) -> None:
        """Return when this rank may use its device for training. Idempotent."""
        ...

    def after_train(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
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

    def after_train(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Publish while the trainer's models stay on their devices."""
        return self._updater.publish(version, buckets)


class TakeTurns:
    """Engines and trainer share devices.

        pause, sleep ──> onload ──> train ──> offload ──> wake(weights) ──> transfer ──> wake(kv_cache) ──> resume

    Requests in flight stay in their engines during training and continue with the new weights.
    """

    def __init__(
        self,
        updater: EngineUpdater,
        barrier: Callable[[], None],
        onload: Callable[[], None],
        offload: Callable[[], None],
    ) -> None:
        self._updater, self._barrier, self._onload, self._offload = updater, barrier, onload, offload

    def before_train(self) -> None:
        """Put the engines to sleep, then move the models onto the device.

        The barrier is needed because only rank 0 knows when the engines sleep.
        """
        self._updater.suspend()
        self._barrier()
        self._onload()

    def after_train(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Move the trainer's models off all devices; then the engines wake and take the weights."""
        self._offload()
        self._barrier()
        return self._updater.publish(version, buckets)


def build_phase(
    mode: Literal["colocated", "disaggregated"],
    updater: EngineUpdater,
    *,
    barrier: Callable[[], None],
    onload: Callable[[], None],
    offload: Callable[[], None],
) -> Phase:
    """Return the phase of a mode. ``onload`` and ``offload`` move this rank's models; both must be idempotent."""
    if mode == "disaggregated":
        return Overlapped(updater)
    return TakeTurns(updater, barrier, onload, offload)
