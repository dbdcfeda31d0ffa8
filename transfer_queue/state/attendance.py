"""Whether anybody plays episodes: agent workers, or gateways, whose programs may be away. Not journaled."""

from collections import OrderedDict

HEARD_S = 60.0  # a worker that was silent for this long is gone
AWAY_S = 10.0  # programs pause for less than this between two episodes
REMEMBERED = 4096  # workers


class Attendance:
    """Which workers were heard, and since when the programs of each gateway have been away."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, float] = OrderedDict()
        self._away_since: dict[str, float | None] = {}  # of gateways; None: a program is there

    def hear(self, worker: str, now: float, idle_s: float | None = None) -> None:
        """Note a request of a worker; a gateway says for how many seconds no program has played or asked."""
        self._heard[worker] = now
        self._heard.move_to_end(worker)
        if idle_s is not None:
            self._away_since[worker] = now - idle_s if idle_s > 0 else None
        if len(self._heard) > REMEMBERED:
            self._away_since.pop(self._heard.popitem(last=False)[0], None)

    def unattended_s(self, now: float) -> float:
        """Return for how many seconds nobody has played, since all workers are gateways and their programs are away.

        0 if somebody plays, or if no worker is left at all.
        """
        away = list[float]()
        for worker, heard in self._heard.items():
            if now - heard > HEARD_S:
                continue
            since = self._away_since.get(worker)
            if since is None:
                return 0.0
            away.append(now - since)
        shortest = min(away, default=0.0)
        return shortest if shortest >= AWAY_S else 0.0
