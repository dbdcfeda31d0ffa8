"""The model of the trainer's side: what each step's batch was, and what it may be when it comes again."""

from rl_async.messages import Reserved, Task, TrajectoryHeader
from tests.support.nothing_lost import stale, twice
from tests.unit.transfer_queue.state.history import BATCH, GROUP, Announced, segments


class Batches:
    """Members and rows by step."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.members: dict[int, list[int]] = {}
        self.rows: dict[int, list[TrajectoryHeader]] = {}
        self._saved: dict[int, list[int]] = {}
        self._same_rows = True  # batches seen before come with the same trajectories, not only the same members

    def save(self) -> None:
        """A checkpoint has what was reserved so far."""
        self._saved = dict(self.members)

    def start_over(self) -> None:
        """The queue starts from the checkpoint, which has no rows and nothing of what was reserved later."""
        self.members = dict(self._saved)
        self._same_rows = False

    def reserved(self, step: int, batch: Reserved, tasks: dict[int, Task], seen: Announced) -> None:
        """The batch of a step that is not trained yet."""
        members = sorted({header.group_id for header in batch.headers})
        assert len(members) == BATCH and sorted(batch.tasks) == members
        rows = [(g, s, i) for g in members for s in range(GROUP) for i in range(segments(g, s))]
        assert [header.key for header in batch.headers] == rows
        assert all(task == tasks[group] for group, task in batch.tasks.items())
        for header in batch.headers:
            assert not stale(step, min(run.version.step for run in header.versions), self._bound)
        assert twice({**self.members, step: members}) == []
        assert self.members.setdefault(step, members) == members
        if self._same_rows and step in self.rows:
            self._check_rows(step, batch, seen)
        self.rows[step] = batch.headers

    def reserved_again(self, step: int, batch: Reserved, seen: Announced) -> None:
        """The same question once more, by the same trainer, which has not trained the step."""
        self._check_rows(step, batch, seen)
        self.rows[step] = batch.headers

    def trained_before(self, step: int, batch: Reserved, seen: Announced) -> None:
        """What was lost of a batch that was trained is missing, and nobody needs it."""
        kept = {header.key for header in batch.headers}
        assert all(header.key in kept or header.key[:2] in seen.lost() for header in self.rows[step])

    def _check_rows(self, step: int, batch: Reserved, seen: Announced) -> None:
        """Only what went with a shard comes as another attempt."""
        for old, new in zip(self.rows[step], batch.headers, strict=True):
            assert old == new or ((new.group_id, new.sample) in seen.lost() and new.attempt > old.attempt)
