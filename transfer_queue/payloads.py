"""Trajectory payloads, kept as they were received and never decoded."""

from collections.abc import Sequence

from rl_async.codec import Frame
from rl_async.transfer_queue.transitions import DeadLettered, EvalClosed, GroupDropped, Retired, Transition


class Payloads:
    """Frames by (group, sample); a group's are freed when the store forgets the group."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, Sequence[Frame]]] = {}

    def put(self, group: int, sample: int, frames: Sequence[Frame]) -> None:
        """Keep the frames of one trajectory."""
        self._groups.setdefault(group, {})[sample] = frames

    def get(self, group: int, sample: int) -> Sequence[Frame] | None:
        """The frames of one trajectory; None if there are none."""
        return self._groups.get(group, {}).get(sample)

    def consume(self, transition: Transition) -> None:
        """Free what the transition makes unreachable."""
        match transition:
            case GroupDropped(group=group) | DeadLettered(group=group):
                self._groups.pop(group, None)
            case Retired(groups=groups) | EvalClosed(groups=groups):
                for group in groups:
                    self._groups.pop(group, None)
