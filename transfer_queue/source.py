"""Where the queue gets its tasks from."""

from typing import Protocol

from rl_async.messages import Task


class TaskSource(Protocol):
    """An endless, resumable stream of tasks. ``seek(cursor())`` makes ``next`` repeat itself exactly."""

    def next(self) -> Task:
        """The next task. Raises DataError naming the row if it is bad."""
        ...

    def cursor(self) -> bytes:
        """The place after the last task taken; opaque to the queue."""
        ...

    def seek(self, cursor: bytes) -> None:
        """Continue from a place that ``cursor`` returned, perhaps in another process."""
        ...
