"""How much of what happened during the last minute. Times are the caller's, in seconds, never decreasing."""

from collections import Counter, deque

from rl_async.transfer_queue.state.groups import TRAIN
from rl_async.transfer_queue.state.transitions import BatchReserved, GroupReady, SampleStored, Transition

WINDOW_S = 60
NAMES = ("groups_ready", "groups_reserved", "rows", "bytes")


class Rates:
    """Sums by second, as many as the window has, so that the cost does not depend on the traffic."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._seconds: deque[tuple[int, Counter[str]]] = deque()  # oldest first

    def see(self, transition: Transition, now: float) -> None:
        """Count what the transition stands for; training groups only."""
        match transition:
            case SampleStored(headers=headers) if headers[0].partition == TRAIN:
                counts = self._second(now)
                counts["rows"] += len(headers)
                counts["bytes"] += sum(header.nbytes for header in headers)
            case GroupReady(partition=partition) if partition == TRAIN:
                self._second(now)["groups_ready"] += 1
            case BatchReserved(groups=groups):
                self._second(now)["groups_reserved"] += len(groups)

    def _second(self, now: float) -> "Counter[str]":
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append((int(now), Counter()))
            self._trim(now)
        return self._seconds[-1][1]

    def _trim(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()

    def per_second(self, now: float) -> dict[str, float]:
        """By name, over the last WINDOW_S or since the beginning, whichever is shorter; over one second at least."""
        self._trim(now)
        window = max(1.0, min(now - self._began, float(WINDOW_S)))
        total: Counter[str] = Counter()
        for _, counts in self._seconds:
            total.update(counts)
        return {name: total[name] / window for name in NAMES}
