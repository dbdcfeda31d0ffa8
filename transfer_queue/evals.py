"""Evaluations: the held-out tasks, admitted outside the slots, never trained."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_async.messages import Done, NotReady, Refused, Reserved, Task
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.delivery import Delivery
from rl_async.transfer_queue.groups import EVAL, State
from rl_async.transfer_queue.transitions import Admitted, EvalClosed, EvalOpened


@dataclass(slots=True)
class Evaluation:
    """One round over the held-out tasks."""

    groups: list[int]
    answered: bool = False  # its result was given out at least once


class Evaluations:
    """Evaluations by id. One whose result was given out is forgotten when the next begins."""

    def __init__(self, book: Book, delivery: Delivery, tasks: Sequence[Task]) -> None:
        self._book, self._delivery, self._tasks = book, delivery, tasks
        self._evals: dict[int, Evaluation] = {}

    def open(self, eval_id: int) -> Done | Refused:
        """Admit the held-out tasks; an evaluation that exists is left alone."""
        if eval_id in self._evals:
            return Done()
        if self._book.finished:
            return Refused(code="finished", reason="the run is over")
        self.close_answered()
        samples = self._book.settings.eval_samples
        first = self._book.next_eval_group
        groups = list(range(first, first + len(self._tasks)))
        self._book.next_eval_group += len(groups)
        for group_id, task in zip(groups, self._tasks, strict=True):
            self._book.emit(Admitted(group=group_id, partition=EVAL, samples=samples, task=task))
            self._delivery.admit(group_id, task, EVAL, samples)
        self._evals[eval_id] = Evaluation(groups)
        self._book.emit(EvalOpened(eval_id=eval_id, groups=groups))
        return Done()

    def result(self, eval_id: int) -> Reserved | NotReady | Refused:
        """What there is of it, once nothing more is to come; samples that failed for good are missing."""
        evaluation = self._evals.get(eval_id)
        if evaluation is None:
            return Refused(code="unknown_eval", reason=f"there is no evaluation {eval_id}, or it was answered before")
        groups = [self._book.groups[group_id] for group_id in evaluation.groups]
        unfinished = [group for group in groups if group.state is not State.READY]
        if unfinished:
            first = unfinished[0]
            return NotReady(
                why=f"{len(unfinished)} of {len(groups)} groups of evaluation {eval_id} are unfinished, "
                f"the first is {first.group_id} ({first.state})"
            )
        evaluation.answered = True
        return Reserved(
            step=eval_id,
            headers=[header for group in groups for header in group.headers()],
            tasks={group.group_id: group.task for group in groups},
        )

    def close_answered(self) -> None:
        """Forget the evaluations whose result was given out."""
        for eval_id in [key for key, evaluation in self._evals.items() if evaluation.answered]:
            self._close(eval_id)

    def close_all(self) -> None:
        """Forget every evaluation."""
        for eval_id in list(self._evals):
            self._close(eval_id)

    def _close(self, eval_id: int) -> None:
        groups = self._evals.pop(eval_id).groups
        for group_id in groups:
            self._book.remove(self._book.groups[group_id])
        self._book.emit(EvalClosed(eval_id=eval_id, groups=groups))
