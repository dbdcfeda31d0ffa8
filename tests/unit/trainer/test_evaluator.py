"""Evaluations are named by the version that was sampled, and every result is returned and recorded once."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from rl_async.errors import RlAsyncError
from rl_async.evaluation import wilson
from rl_async.messages import Done, NotReady, Reserved, RowKey, Task, Trajectory, Version, VersionRun
from rl_async.trainer.records import Evaluator, FinishedEvaluation
from tests.conftest import make_rows

ROWS = [msgspec.structs.replace(row, reward=0.5) for row in make_rows(0)[:2]]

IMAGES = {"ab": b"image"}


class Queue:
    """Evaluations that are done when the test says so, sampled by the versions ``steps``."""

    def __init__(self, done: bool, steps: tuple[int, ...] = (), unattended_s: float = 0.0) -> None:
        self.asked: list[int] = []
        self.unattended_s = unattended_s
        self.done, self.steps = done, steps

    def evaluate(self, eval_id: int) -> Done:
        self.asked.append(eval_id)
        return Done()

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        assert eval_id == self.asked[-1]
        headers = [row.header() for row in self.rows()]
        return Reserved(step=eval_id, headers=headers) if self.done else self.not_ready()

    def not_ready(self) -> NotReady:
        return NotReady(why="one is missing", unattended_s=self.unattended_s)

    def rows(self) -> list[Trajectory]:
        return ROWS

    def fetch(self, rows: Sequence[RowKey]) -> list[Trajectory]:
        versions = [VersionRun(Version(0, step), i, i + 1) for i, step in enumerate(self.steps or self.asked[-1:])]
        return [msgspec.structs.replace(row, versions=versions, reward=row.reward) for row in self.rows()]

    def fetch_media(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
        return IMAGES


class Branching(Queue):
    """Its first episode has three rows."""

    def rows(self) -> list[Trajectory]:
        segments = [msgspec.structs.replace(ROWS[0], segment=segment, reward=1.0) for segment in range(3)]
        return [*segments, msgspec.structs.replace(ROWS[1], reward=0.0)]


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.results: list[FinishedEvaluation] = []

    def __call__(self, result: FinishedEvaluation, rows: list[Trajectory], media: Mapping[str, bytes]) -> None:
        assert media is IMAGES
        assert len({row.episode_id for row in rows}) == result.trajectories
        self.results.append(result)


def test_the_name_is_the_published_step_and_no_version_is_evaluated_twice() -> None:
    queue, recorder = Queue(done=True), Recorder()
    evaluations = Evaluator(queue, 1, recorder)
    results = [
        evaluations.after_step(completed, published) for completed, published in ((3, 2), (4, 4), (5, 4), (6, 4))
    ]
    assert queue.asked == [2, 4]
    assert [result and result.step for result in results] == [None, 2, 4, None]
    assert [result.step for result in recorder.results] == [2, 4]
    assert results[1] is not None
    metrics = results[1].metrics()
    assert {name: value for name, value in metrics.items() if name.count("/") == 1} == {
        "eval/step": 2.0,
        "eval/newest_step": 2.0,
        "eval/reward": 0.5,
        "eval/trajectories": 2.0,
        "eval/failed": 0.0,
    }


def test_training_that_goes_on_meanwhile_shows_in_the_newest_step() -> None:
    evaluations = Evaluator(Queue(done=True, steps=(2, 3)), 1, Recorder())
    evaluations.after_step(2, 2)
    result = evaluations.after_step(3, 2)
    assert result is not None and (result.step, result.newest_step) == (2, 3)


def test_the_end_returns_the_pending_and_the_final_evaluation() -> None:
    queue, recorder = Queue(done=False), Recorder()
    evaluations = Evaluator(queue, 2, recorder)
    assert evaluations.after_step(4, 4) is None and evaluations.after_step(5, 5) is None
    queue.done = True
    assert [result.step for result in evaluations.finish(5, 10.0)] == [4, 5]
    assert [result.step for result in recorder.results] == [4, 5]


def test_the_end_does_not_ask_again_for_what_runs() -> None:
    queue = Queue(done=False)
    evaluations = Evaluator(queue, 2, Recorder())
    evaluations.after_step(4, 4)
    queue.done = True
    assert [result.step for result in evaluations.finish(4, 10.0)] == [4]
    assert queue.asked == [4]


def test_an_evaluation_that_does_not_end_is_named() -> None:
    with pytest.raises(RlAsyncError, match="version 7"):
        Evaluator(Queue(done=False), 0, Recorder()).finish(7, 0.0)


def test_an_episode_of_several_rows_counts_once() -> None:
    recorder = Recorder()
    (result,) = Evaluator(Branching(done=True), 0, recorder).finish(7, 1.0)
    assert (result.reward, result.trajectories) == (0.5, 2)


class Mixed(Queue):
    """Two samples each of two tasks of one source and of one of another; the last one could not be scored."""

    def rows(self) -> list[Trajectory]:
        places = [("math", 0, 1.0), ("math", 0, 0.0), ("math", 1, 1.0), ("math", 1, 1.0), ("code", 2, 0.5)]
        rows = [
            msgspec.structs.replace(
                ROWS[0], data_source=source, task_id=f"t:{group}", group_id=group, sample=at % 2, reward=reward
            )
            for at, (source, group, reward) in enumerate(places)
        ]
        return [*rows, msgspec.structs.replace(rows[-1], sample=1, reward=7.0, scored=False)]


def test_each_source_is_recorded_with_its_estimates_and_their_intervals() -> None:
    results: list[FinishedEvaluation] = []
    (result,) = Evaluator(Mixed(done=True), 0, lambda found, *_: results.append(found), solved=0.5).finish(3, 1.0)
    assert results == [result]
    metrics = result.metrics()
    expected = {  # of tasks [1, 0] and [1, 1], and of [0.5, 0]
        "math/avg": 0.75,
        "math/pass@1": 0.75,
        "math/pass@2": 1.0,
        "math/tasks": 2.0,
        "math/samples": 2.0,
        "code/avg": 0.25,
        "code/pass@1": 0.5,
        "code/pass@2": 1.0,
        "all/avg": 7 / 12,
        "all/pass@1": 2 / 3,
        "all/tasks": 3.0,
    }
    assert {name: metrics[f"eval/{name}"] for name in expected} == pytest.approx(expected)
    assert (metrics["eval/math/avg/low"], metrics["eval/math/avg/high"]) == wilson(0.75, 2)
    assert metrics["eval/reward"] == pytest.approx(3.5 / 6), "the mean over episodes keeps its name"


class Failing(Queue):
    """Four tasks with four samples, half of them right; ``failed`` ones have no row."""

    failed: frozenset[tuple[int, int]] = frozenset()

    def rows(self) -> list[Trajectory]:
        return [
            msgspec.structs.replace(
                ROWS[0],
                data_source="math",
                task_id=f"t{group}",
                group_id=group,
                sample=sample,
                reward=float(sample % 2),
            )
            for group in range(4)
            for sample in range(4)
            if (group, sample) not in self.failed
        ]

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        tasks = {g: Task(task_id=f"t{g}", data_source="math", prompt=[], ground_truth="") for g in range(4)}
        headers = [row.header() for row in self.rows()]
        return Reserved(step=eval_id, headers=headers, tasks=tasks, failed=sorted(self.failed))


WRONG = frozenset((group, sample) for group in range(4) for sample in (0, 2))
ALL = frozenset((group, sample) for group in range(4) for sample in range(4))


@pytest.mark.parametrize(
    ("failed", "reward"),
    [(frozenset(), 0.5), (WRONG, 0.5), (WRONG | {(3, 1), (3, 3)}, 0.375), (ALL, 0.0)],
)
def test_episodes_that_fail_for_good_count_as_zero(failed: frozenset[tuple[int, int]], reward: float) -> None:
    queue = Failing(done=True)
    queue.failed = failed
    recorded: list[Trajectory] = []
    (result,) = Evaluator(queue, 0, lambda _, rows, __: recorded.extend(rows)).finish(3, 1.0)
    metrics = result.metrics()
    names = ("reward", "trajectories", "failed", "math/avg", "math/pass@1", "math/samples", "math/tasks")
    assert [metrics[f"eval/{name}"] for name in names] == [reward, 16, len(failed), reward, reward, 4, 4]
    assert "eval/math/pass@4" in metrics
    assert {(row.group_id, row.sample) for row in recorded if not row.scored} == failed


def test_roles_are_recorded_by_source() -> None:
    class Game(Queue):
        def rows(self) -> list[Trajectory]:
            return [
                msgspec.structs.replace(ROWS[0], data_source="go", segment=at, role=role, reward=reward)
                for at, (role, reward) in enumerate([("black", 1.0), ("white", -1.0)])
            ]

    (result,) = Evaluator(Game(done=True), 0, lambda *_: None).finish(3, 1.0)
    metrics = result.metrics()
    assert (metrics["eval/go as black/avg"], metrics["eval/go as white/avg"]) == (1.0, -1.0)
    assert (metrics["eval/reward/black"], metrics["eval/reward/white"]) == (1.0, -1.0)


def test_the_initial_weights_can_be_evaluated_once_before_the_first_step() -> None:
    queue, recorder = Queue(done=False), Recorder()
    evaluator = Evaluator(queue, every=1, record=recorder)
    evaluator.begin(0)
    assert evaluator.after_step(1, 0) is None
    queue.done = True
    first = evaluator.after_step(2, 2)
    assert first is not None and first.step == 0
    assert queue.asked == [0, 2]


@pytest.mark.parametrize("every", [0, 1])
def test_an_evaluation_that_nobody_plays_is_skipped_at_the_end(every: int, caplog: pytest.LogCaptureFixture) -> None:
    queue, recorder = Queue(done=False, unattended_s=280.0), Recorder()
    evaluations = Evaluator(queue, every, recorder)
    evaluations.after_step(1, 1)
    assert evaluations.finish(2, 0.0) == [] and recorder.results == []
    assert queue.asked == ([1] if every else [2]), "behind a skipped one, none is asked for"
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


class Returning(Queue):
    """For two replies nobody plays; then somebody comes, and has played with the fifth."""

    replies = 0

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        self.replies += 1
        self.unattended_s, self.done = 280.0 if self.replies < 3 else 0.0, self.replies == 5
        return super().eval_result(eval_id, wait_s)


def test_a_program_that_comes_back_late_has_time_to_play() -> None:
    clock = iter([0.0, 0.0, 30.0, 60.0, 64.0, 66.0, 120.0])
    (result,) = Evaluator(Returning(done=False), 0, Recorder(), lambda: next(clock)).finish(7, 65.0)
    assert result.step == 7


class Slow(Queue):
    """One of ten groups is finished with each reply, the tenth with the last."""

    def __init__(self) -> None:
        super().__init__(done=False)
        self.finished = 0

    def not_ready(self) -> NotReady:
        self.finished += 1
        self.done = self.finished == 9
        return NotReady(why="some are missing", finished=self.finished, groups=10)


def test_the_deadline_is_for_the_next_group_not_for_all() -> None:
    clock, waits = map(float, range(0, 100_000, 60)).__next__, list[int]()
    (result,) = Evaluator(Slow(), 0, Recorder(), clock).finish(7, 65.0, lambda: waits.append(1))
    assert result.step == 7 and len(waits) == 10, "other ranks hear of each question"


class Losing(Slow):
    """After the sixth reply the rows of all groups are lost; they are played again."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = iter([1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])

    def not_ready(self) -> NotReady:
        finished = next(self.counts)
        self.done = finished == 9
        return NotReady(why="some are missing", finished=finished, groups=10)


def test_groups_that_are_played_again_are_progress() -> None:
    clock = map(float, range(0, 100_000, 60)).__next__
    (result,) = Evaluator(Losing(), 0, Recorder(), clock).finish(7, 125.0)
    assert result.step == 7


class Pausing(Queue):
    """Somebody plays for five replies, and nobody for the next five, again and again."""

    replies = 0

    def eval_result(self, eval_id: int, wait_s: float) -> Reserved | NotReady:
        self.replies += 1
        assert self.replies < 1000, "it waits without end"
        self.unattended_s = 11.0 if self.replies // 5 % 2 else 0.0
        return super().eval_result(eval_id, wait_s)


def test_programs_that_come_and_go_do_not_keep_a_run_waiting() -> None:
    clock = map(float, range(100_000)).__next__
    with pytest.raises(RlAsyncError, match=r"trainer\.batch_timeout_s"):
        Evaluator(Pausing(done=False), 0, Recorder(), clock).finish(7, 65.0)
