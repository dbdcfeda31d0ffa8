"""Who works on what, and since when. A lease lives as long as its worker is heard of."""

from typing import NamedTuple


class Lost(NamedTuple):
    """What a silent worker was holding: samples by group."""

    worker: str
    held: dict[int, list[int]]


class Leases:
    """Samples by worker and group. Times are the caller's, in seconds, never decreasing."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard: dict[str, float] = {}  # by worker, least recently heard first
        self._held: dict[str, dict[int, set[int]]] = {}
        self._since: dict[tuple[str, int], float] = {}  # (worker, group), oldest first

    @property
    def workers(self) -> int:
        """Workers heard of within the lease time."""
        return len(self._heard)

    def hears(self, worker: str) -> bool:
        """Whether the worker was heard of within the lease time."""
        return worker in self._heard

    def hear(self, worker: str, now: float) -> None:
        """The worker lives."""
        self._heard.pop(worker, None)
        self._heard[worker] = now

    def give(self, worker: str, group: int, samples: list[int], now: float) -> None:
        """The worker, just heard of, takes these samples."""
        self._held.setdefault(worker, {}).setdefault(group, set()).update(samples)
        self._since.setdefault((worker, group), now)

    def revive(self, now: float) -> None:
        """After a replay, which knows no times: whoever holds something was heard of just now, and took it just now."""
        for worker in self._held:
            self.hear(worker, now)
        self._since = dict.fromkeys(self._since, now)

    def end(self, worker: str, group: int, sample: int) -> None:
        """The worker holds this sample no longer."""
        held = self._held.get(worker, {})
        samples = held.get(group, set())
        samples.discard(sample)
        if not samples:
            self._forget(worker, group)

    def _forget(self, worker: str, group: int) -> None:
        self._since.pop((worker, group), None)
        held = self._held.get(worker)
        if held is not None:
            held.pop(group, None)
            if not held:
                del self._held[worker]

    def holding(self) -> list[Lost]:
        """All that is leased, by worker."""
        return [self._lost(worker) for worker in self._held]

    def expired(self, now: float) -> list[Lost]:
        """Forget the workers that were silent for too long; what they held, which the caller must end."""
        lost: list[Lost] = []
        while self._heard:
            worker, heard = next(iter(self._heard.items()))
            if now - heard < self._lease_s:
                break
            del self._heard[worker]
            if worker in self._held:
                lost.append(self._lost(worker))
        return lost

    def _lost(self, worker: str) -> Lost:
        return Lost(worker, {group: sorted(samples) for group, samples in self._held[worker].items()})

    def age(self, worker: str, group: int, now: float) -> float:
        """Seconds since the worker took the group; 0 if it has not."""
        return now - self._since.get((worker, group), now)

    def oldest(self) -> tuple[str, int] | None:
        """The (worker, group) of the oldest lease."""
        return next(iter(self._since), None)

    def oldest_s(self, now: float) -> float:
        """Age of the oldest lease in seconds; 0 without one."""
        return now - next(iter(self._since.values()), now)
