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
        """Bring all engines to ``version``; suspended ones wake up and go on with their requests."""
        ...

    def suspend(self) -> None:
        """Pause all engines, keeping their requests, and take their device memory."""
        ...


class IdleCoordinator:
    """The publisher of every rank but 0, which has no engines to speak to."""

    def publish(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Nothing to do; the report is empty."""
        return SyncReport(
            version=version, seconds=0.0, waiting_seconds=0.0, pause_seconds=0.0, nbytes=0, engines=[], failures=[]
        )

    def suspend(self) -> None:
        """Nothing to do."""


class Phase(Protocol):
    """One trainer step as the devices see it. All ranks call both methods alike."""

    def before_train(self) -> None:
        """Returns when this rank may use its device for training. Calling it twice is calling it once."""
        ...

    def after_train(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Publish the weights; also for the initial ones, before any training.

        Raises as WeightCoordinator.publish.
        """
        ...


class Overlapped:
    """Engines and trainer have devices of their own: generation pauses only while weights are transferred."""

    def __init__(self, publisher: EngineUpdater) -> None:
        self._publisher = publisher

    def before_train(self) -> None:
        """Training needs nothing from the engines."""

    def after_train(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Publish while the trainer's models stay where they are."""
        return self._publisher.publish(version, buckets)


class TakeTurns:
    """Engines and trainer share devices.

        pause, sleep ──> onload ──> train ──> offload ──> wake(weights) ──> transfer ──> wake(kv_cache) ──> resume

    Requests in flight stay in their engines while it trains and go on with the new weights.
    """

    def __init__(
        self,
        publisher: EngineUpdater,
        barrier: Callable[[], None],
        onload: Callable[[], None],
        offload: Callable[[], None],
    ) -> None:
        self._publisher, self._barrier, self._onload, self._offload = publisher, barrier, onload, offload

    def before_train(self) -> None:
        """Engines to sleep, then models onto the device. The barrier: rank 0 alone knows that they sleep."""
        self._publisher.suspend()
        self._barrier()
        self._onload()

    def after_train(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """The trainer's models off all devices, then engines wake and take the weights."""
        self._offload()
        self._barrier()
        return self._publisher.publish(version, buckets)


def build_phase(
    mode: Literal["colocated", "disaggregated"],
    publisher: EngineUpdater,
    *,
    barrier: Callable[[], None],
    onload: Callable[[], None],
    offload: Callable[[], None],
) -> Phase:
    """The phase of a mode. ``onload`` and ``offload`` move this rank's models; both must be idempotent."""
    if mode == "disaggregated":
        return Overlapped(publisher)
    return TakeTurns(publisher, barrier, onload, offload)
