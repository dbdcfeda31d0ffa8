"""Where the queue gets its tasks from."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rl_async.errors import DataError
from rl_async.messages import Task


class TaskSource(Protocol):
    """A resumable stream of tasks, of a run without end.

    ``seek(cursor())`` makes ``next`` repeat itself exactly, for the same steps.
    """

    def next(self, step: int) -> Task | None:
        """The next task, which ``step`` trains if nothing comes in between; None at the end.

        Raises DataError naming the row if it is bad.
        """
        ...

    def cursor(self) -> bytes:
        """The place after the last task taken; opaque to the queue."""
        ...

    def seek(self, cursor: bytes) -> None:
        """Continue from a place that ``cursor`` returned, perhaps in another process."""
        ...


class TaskList:
    """These tasks, once each. Implements TaskSource."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks, self._taken = tasks, 0

    def next(self, step: int = 0) -> Task | None:
        """The next task, the same at any step; None behind the last."""
        if self._taken == len(self._tasks):
            return None
        self._taken += 1
        return self._tasks[self._taken - 1]

    def cursor(self) -> bytes:
        """How many were taken, and of how many."""
        return f"{self._taken}/{len(self._tasks)}".encode()

    def seek(self, cursor: bytes) -> None:
        """Go on from a cursor. Raises DataError if it is not of a list of this length."""
        taken, _, total = cursor.decode(errors="replace").partition("/")
        if total != str(len(self._tasks)) or not taken.isdecimal() or int(taken) > len(self._tasks):
            raise DataError(f"the queue goes on with a list of {total or '?'} tasks, here are {len(self._tasks)}")
        self._taken = int(taken)


def numbered(number: int) -> Task:
    """A task that is nothing but its number."""
    return Task(task_id=f"t{number}", data_source="", prompt=[], ground_truth="")


class Counted:
    """Tasks without end, made of their numbers from 0. Implements TaskSource."""

    def __init__(self, make: Callable[[int], Task] = numbered) -> None:
        self._make, self.taken = make, 0

    def next(self, step: int = 0) -> Task:
        """The next task, the same at any step."""
        self.taken += 1
        return self._make(self.taken - 1)

    def cursor(self) -> bytes:
        """How many were taken."""
        return str(self.taken).encode()

    def seek(self, cursor: bytes) -> None:
        """Go on from a cursor."""
        self.taken = int(cursor)
