"""Evaluations: the held-out tasks, admitted outside the slots, never trained."""

from collections.abc import Callable, Sequence

import msgspec

from rl_async.messages import Done, NotReady, Refused, Reserved, Task
from rl_async.transfer_queue.state.book import Book
from rl_async.transfer_queue.state.groups import EVAL, State
from rl_async.transfer_queue.state.transitions import (
    Admitted,
    Effects,
    EvalAnswered,
    EvalClosed,
    EvalOpened,
    Transition,
)


class EvalRound(msgspec.Struct):
    """One evaluation: a round over the held-out tasks."""

    groups: list[int]
    answered: bool = False  # its result was given out at least once


class EvalRounds:
    """Evaluations by id. One whose result was given out is forgotten when the next begins."""

    def __init__(self, book: Book, change: Callable[[Transition], None], tasks: Sequence[Task]) -> None:
        self._book, self._change, self._tasks = book, change, tasks
        self._evals: dict[int, EvalRound] = {}
        self.effects: Effects = {EvalOpened: self.opened, EvalAnswered: self.answered, EvalClosed: self.closed}

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
        for group_id, task in zip(groups, self._tasks, strict=True):
            self._change(Admitted(group=group_id, partition=EVAL, samples=samples, task=task))
        self._change(EvalOpened(eval_id=eval_id, groups=groups))
        return Done()

    def result(self, eval_id: int, so_far: bool = False) -> Reserved | NotReady | Refused:
        """What there is of it ``so_far``, or once nothing more is to come."""
        evaluation = self._evals.get(eval_id)
        if evaluation is None:
            return Refused(code="unknown_eval", reason=f"there is no evaluation {eval_id}, or it was answered before")
        groups = [self._book.groups[group_id] for group_id in evaluation.groups]
        unfinished = [group for group in groups if group.state is not State.READY]
        if unfinished and not so_far:
            first = unfinished[0]
            return NotReady(
                why=f"{len(unfinished)} of {len(groups)} groups of evaluation {eval_id} are unfinished, "
                f"the first is {first.group_id} ({first.state})",
                finished=len(groups) - len(unfinished),
                groups=len(groups),
            )
        if not unfinished and not evaluation.answered:
            self._change(EvalAnswered(eval_id=eval_id))
        return Reserved(
            step=eval_id,
            headers=[header for group in groups for header in group.headers()],
            tasks={group.group_id: group.task for group in groups},
            failed=[(group.group_id, index) for group in groups for index, s in enumerate(group.samples) if s.dead],
        )

    def close_answered(self) -> None:
        """Forget the evaluations whose result was given out."""
        for eval_id in [key for key, evaluation in self._evals.items() if evaluation.answered]:
            self._close(eval_id)

    def close_all(self) -> None:
        """Forget every evaluation and its groups."""
        for eval_id in list(self._evals):
            self._close(eval_id)

    def _close(self, eval_id: int) -> None:
        self._change(EvalClosed(eval_id=eval_id, groups=self._evals[eval_id].groups))

    # --- what a change does -----------------------------------------------------------------------------------------

    def opened(self, event: EvalOpened) -> None:
        """Apply `EvalOpened`: the groups just admitted form an evaluation."""
        self._evals[event.eval_id] = EvalRound(event.groups)

    def answered(self, event: EvalAnswered) -> None:
        """Apply `EvalAnswered`: the evaluation may be forgotten when the next begins."""
        self._evals[event.eval_id].answered = True

    def closed(self, event: EvalClosed) -> None:
        """Apply `EvalClosed`: forget the evaluation and its groups."""
        del self._evals[event.eval_id]
        for group_id in event.groups:
            if group_id in self._book.groups:
                self._book.remove(self._book.groups[group_id])

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> dict[int, EvalRound]:
        """The state for a dump; equal for equal evaluations."""
        return {eval_id: self._evals[eval_id] for eval_id in sorted(self._evals)}

    def load(self, evals: dict[int, EvalRound]) -> None:
        """Restore a dumped state; only a new store can."""
        self._evals = evals
