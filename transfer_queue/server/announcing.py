"""When those who follow the registry of engines hear of its changes.

Every worker follows it. Were each change answered at once, W workers would be sent all E engines for each engine that
confirms a version: W * E * E records for a publication. So each answer puts the next announcement off by the time that
answers take, and changes come together: soon with few workers, in batches with many.
"""

from rl_async.transfer_queue.state.registry import Engines

# By which an answer puts the next announcement off. It takes 60 us of processor time, the reader's next question
# included, and several times as long where cores are shared. Until all readers have asked again, other requests wait
# behind theirs, so that most of the time must be left between two announcements.
ANSWER_S = 1e-3


class Announcing:
    """The revision of the registry that is announced, which the newest one may be ahead of for a moment."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._revision, self._next = engines.revision, 0.0

    def has_news(self, after: int, now: float) -> bool:
        """Whether a reader that asks now and knows revision ``after`` is to be answered; one that knows none is."""
        announced = self._engines.revision if now >= self._next else self._revision
        return after < 0 or after < announced

    def is_due(self, now: float) -> bool:
        """Whether there are changes that waiting readers have not been told, and it is time."""
        return self._revision != self._engines.revision and now >= self._next

    def announce(self) -> None:
        """All waiting readers are answered now."""
        self._revision = self._engines.revision

    def answered(self, now: float) -> None:
        """Note that a reader was told of a change."""
        self._next = max(self._next, now) + ANSWER_S
