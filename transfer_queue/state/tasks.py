"""Which task is admitted next, and what a person or a producer may do about it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rl_async.configs.derived.code import code_problem
from rl_async.errors import DataError
from rl_async.messages import Done, Refused, Task
from rl_async.transfer_queue.state.book import Book
from rl_async.transfer_queue.state.transitions import Drained, Effects, Requeued, Submitted, Transition

MOST_SUBMITTED = 100_000  # tasks that wait to be admitted; they are held in memory
REMEMBERED = 4096  # newest requests that submitted tasks


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
    """A source of given tasks, once each. Implements TaskSource."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks, self._taken = tasks, 0

    def next(self, step: int = 0) -> Task | None:
        """The next task, the same at any step; None behind the last."""
        if self._taken >= len(self._tasks):
            return None
        self._taken += 1
        return self._tasks[self._taken - 1]

    def cursor(self) -> bytes:
        """How many were taken, and of how many."""
        return f"{self._taken}/{len(self._tasks)}".encode()

    def seek(self, cursor: bytes) -> None:
        """Continue from a cursor. Raises DataError if it is not of a list of this length."""
        taken, _, total = cursor.decode(errors="replace").partition("/")
        if total != str(len(self._tasks)) or not taken.isdecimal() or int(taken) > len(self._tasks):
            raise DataError(f"the queue continues a list of {total or '?'} tasks, here are {len(self._tasks)}")
        self._taken = int(taken)


class TaskStream(TaskList):
    """The beginning of a list that others continue: a resumed run may know more of it. Implements TaskSource."""

    def cursor(self) -> bytes:
        """How many were taken."""
        return str(self._taken).encode()

    def seek(self, cursor: bytes) -> None:
        """Continue from a cursor, whatever was known of the list when it was made."""
        self._taken = int(cursor)


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
        """The number of tasks taken."""
        return str(self.taken).encode()

    def seek(self, cursor: bytes) -> None:
        """Continue from the place that a cursor names."""
        self.taken = int(cursor)


class Tasks:
    """Submitted tasks first, then those of the source. Slots and the bound on staleness do not depend on the order."""

    def __init__(self, book: Book, change: Callable[[Transition], None], source: TaskSource) -> None:
        self._book, self._change, self._source = book, change, source
        self.effects: Effects = {Submitted: self.submitted, Requeued: self.requeued, Drained: self.drained}

    def take(self) -> tuple[Task, bytes, bool] | None:
        """The next task, the source's cursor behind it, and whether it was submitted. The caller must admit it."""
        book = self._book
        if book.submitted:
            return book.submitted[0], book.cursor, True
        task = self._source.next(book.next_step + len(book.open) // book.settings.batch_groups)
        return None if task is None else (task, self._source.cursor(), False)

    def refused(self, tasks: Sequence[Task]) -> Refused | None:
        """Return the refusal of the first of a client's tasks that names code not listed in the config."""
        for task in tasks:
            if problem := code_problem(task, self._book.settings.code):
                return Refused(code="code", reason=f"task {task.task_id:.80}: {problem}")
        return None

    def submit(self, tasks: Sequence[Task], request: bytes = b"") -> Done | Refused:
        """Queue tasks for admission; the same ``request`` again changes nothing."""
        book = self._book
        if request in book.submissions:
            return Done()
        if refused := self.refused(tasks):
            return refused
        if book.settings.replays:
            return Refused(code="replay", reason="this run trains recorded groups alone (rollout.replay)")
        if book.finished:
            return Refused(code="finished", reason="the run is over")
        if len(book.submitted) + len(tasks) > MOST_SUBMITTED:
            reason = f"{len(book.submitted)} submitted tasks wait, and at most {MOST_SUBMITTED} may; submit more later"
            return Refused(code="full", reason=reason)
        self._change(Submitted(tasks=list(tasks), request=request))
        return Done()

    def requeue(self, group: int, request: bytes = b"") -> Done | Refused:
        """The task of a dead letter comes next, as a new group: the old one's slot is gone, and its attempts fenced.

        The new group waits for a slot as any other does, so the bound on staleness and the length of the run hold.
        The same ``request`` again changes nothing.
        """
        book = self._book
        if request in book.submissions:
            return Done()
        if group not in book.dead_letters:
            known = ", ".join(map(str, book.dead_letters)) or "none"
            return Refused(code="unknown_group", reason=f"group {group} is no dead letter; those kept: {known}")
        if book.finished:
            return Refused(code="finished", reason="the run is over")
        if len(book.open) >= book.wanted:
            reason = f"all groups of the run are admitted, so group {group} could not be trained any more"
            return Refused(code="too_late", reason=reason)
        self._change(Requeued(group=group, request=request))
        return Done()

    def drain(self, on: bool) -> Done:
        """Stop admission, or resume it with ``on=False``."""
        if on != self._book.draining:
            self._change(Drained(on=on))
        return Done()

    # --- what a change does -----------------------------------------------------------------------------------------

    def submitted(self, event: Submitted) -> None:
        """Apply `Submitted`: queue the tasks before those of the source."""
        self._book.submitted.extend(event.tasks)
        self._remember(event.request)

    def requeued(self, event: Requeued) -> None:
        """Apply `Requeued`: queue the task of a dead letter first."""
        book = self._book
        book.submitted.appendleft(book.dead_letters.pop(event.group).task)
        book.counters["requeued"] += 1
        self._remember(event.request)

    def _remember(self, request: bytes) -> None:
        submissions = self._book.submissions
        if request:
            submissions[request] = None
            if len(submissions) > REMEMBERED:
                submissions.popitem(last=False)

    def drained(self, event: Drained) -> None:
        """Apply `Drained`: admission stops, or resumes."""
        self._book.draining = event.on
