import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rl_async.configs.checks.rules import check
from rl_async.configs.load.loader import load_config
from rl_async.errors import QueueLost
from rl_async.launcher.evaluation.lines import read_lines, write_lines
from rl_async.launcher.runs.evaluate import (
    EvaluationRun,
    EvaluationTimeout,
    print_report,
    recorded_in,
    without_training,
    write_and_tell,
)
from rl_async.messages import Done, NotReady, Reserved, RowKey, Task, Trajectory, TrajectoryHeader, Turn
from rl_async.process.http_auth import make_tokens
from rl_async.recording import read_trajectories
from tests.conftest import make_rows


def header(group_id: int, reward: float, role: str = "", segment: int = 0) -> TrajectoryHeader:
    return TrajectoryHeader(
        group_id=group_id,
        sample=0,
        attempt=0,
        partition="eval",
        episode_id="e",
        segment=segment,
        role=role,
        tokens=1,
        sampled=1,
        reward=reward,
        finish_reason="stop",
        versions=[],
        tokens_hash="",
    )


def task(source: str, name: str = "t") -> Task:
    return Task(task_id=name, data_source=source, prompt=[], ground_truth="")


def printed(result: Reserved) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(result, 1.0, console)
    return console.export_text()


def test_each_data_source_has_a_line_and_all_together_one() -> None:
    result = Reserved(
        step=0,
        headers=[header(1, 1.0), header(2, 0.0), header(3, 0.5)],
        tasks={1: task("math", "a"), 2: task("math", "b"), 3: task("code", "a")},
    )
    lines = [line.split() for line in printed(result).splitlines() if "[" in line]
    assert [(words[0], words[1], words[3]) for words in lines] == [
        ("code", "1", "0.500"),
        ("math", "2", "0.500"),
        ("all", "3", "0.500"),
    ]


def test_one_data_source_needs_no_total() -> None:
    text = printed(Reserved(step=0, headers=[header(1, 1.0)], tasks={1: task("math")}))
    assert "math" in text and "all" not in text and "scored" not in text


def test_roles_have_a_line_each() -> None:
    headers = [
        header(1, 1.0, "buyer"),
        header(1, 0.0, "seller", 1),
        header(2, 0.0, "buyer"),
        header(2, 0.0, "seller", 1),
    ]
    text = printed(Reserved(step=0, headers=headers, tasks={1: task("market", "a"), 2: task("market", "b")}))
    lines = [line for line in text.splitlines() if "[" in line]
    assert ["0.500" in lines[0], "0.000" in lines[1], "0.250" in lines[2]] == [True] * 3
    assert "market as buyer" in lines[0] and "market as seller" in lines[1] and "all" in lines[2]


def test_an_episode_is_written_with_its_last_answer_and_each_role_by_itself(tmp_path: Path) -> None:
    base = msgspec.structs.replace(make_rows(0)[0], group_id=1, sample=0, reward=1.0, data_source="s", scored=True)
    rows = [
        msgspec.structs.replace(base, segment=segment, role=role, scored=scored, finish_reason=reason, turns=turns)
        for segment, role, scored, reason, turns in [
            (1, "a", True, "length", [Turn(role="assistant", text="last", reward=0.5)]),
            (0, "a", True, "stop", [Turn(role="assistant", text="first")]),
            (2, "b", False, "stop", [Turn(role="assistant", text="other")]),
        ]
    ]
    write_lines(tmp_path / "out.jsonl", rows)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [
        (line["role"], line["answer"], line["finish_reason"], line["reward"], line["scored"]) for line in lines
    ] == [
        ("a", "last", "length", 1.5, True),
        ("b", "other", "stop", 0.0, False),
    ]


def test_episodes_without_a_score_are_told() -> None:
    headers = [header(1, 1.0), msgspec.structs.replace(header(2, 1.0), scored=False)]
    text = printed(Reserved(step=0, headers=headers, tasks={1: task("math", "a"), 2: task("math", "b")}))
    assert "0.500" in text and "1 of 2 episodes could not be scored" in text


def test_without_any_trajectory_there_is_still_a_table() -> None:
    assert "avg@k" in printed(Reserved(step=0, headers=[]))


def test_one_small_group_is_left_to_train_on() -> None:
    adapters = ["trainer.lora={}", "weight_sync.adapters=true"]
    config = without_training(load_config("calculator-async", ["trainer.ranks=2", *adapters, "rollout.replay=runs/a"]))
    check(config)
    assert config.rollout.replay == "", "its answers are sampled"
    alive = (config.queue.max_staleness + 1) * config.data.train_batch_groups
    assert (alive, config.trainer.steps, config.rollout.group_size) == (1, 1, 2)
    assert config.model == load_config("calculator-async").model


class Queue:
    """Ten groups of one sample. One is finished with each answer, until ``stuck`` are; then it ``hangs`` or repeats."""

    def __init__(self, stuck: int = 10, hangs: bool = False, lost: bool = False) -> None:
        self.stuck, self.hangs, self.lost = stuck, hangs, lost
        self.finished = 0
        self.hung = asyncio.Event()
        self.rows = [msgspec.structs.replace(make_rows(0)[0], group_id=group, sample=0) for group in range(10)]

    async def evaluate(self, eval_id: int) -> Done:
        return Done()

    async def eval_result(self, eval_id: int, wait_s: float, *, so_far: bool = False) -> Reserved | NotReady:
        await asyncio.sleep(0.01)
        if self.lost and so_far:
            raise QueueLost("no answer")
        if so_far or self.finished == 10:
            headers = [row.header() for row in self.rows[: self.finished]]
            return Reserved(step=0, headers=headers, tasks={group: task("s", str(group)) for group in range(10)})
        if self.finished == self.stuck and self.hangs:
            self.hung.set()
            await asyncio.Event().wait()
        self.finished = min(self.finished + 1, self.stuck)
        return NotReady(why="some are missing", finished=self.finished, groups=10)

    async def fetch(self, keys: Sequence[RowKey]) -> list[Trajectory]:
        return [row for row in self.rows if row.header().key in keys]


def evaluation_of(queue: Any, folder: Path) -> EvaluationRun:
    make_tokens(folder / "keys")
    config = load_config("calculator", ["eval.samples=1", "trainer.batch_timeout_s=0.001"])
    return EvaluationRun(queue, config, folder, Console(file=io.StringIO()))


def kept(evaluation: EvaluationRun, folder: Path) -> tuple[str, int, int]:
    """What is printed, and how many episodes are in the file of lines and in the run folder."""
    console = Console(width=300, record=True, file=io.StringIO())
    write_and_tell(evaluation, 1.0, folder / "out.jsonl", console)
    files = folder / "out.jsonl", recorded_in(folder)
    lines, rows = (len(read(file)) if file.exists() else 0 for read, file in zip(READERS, files, strict=True))
    return console.export_text(), lines, rows


READERS: Sequence[Any] = (read_lines, lambda file: list(read_trajectories(file)))


async def test_an_evaluation_may_take_longer_than_its_deadline_as_long_as_tasks_are_finished(tmp_path: Path) -> None:
    evaluation = evaluation_of(Queue(), tmp_path)
    await evaluation.run()
    text, *counts = kept(evaluation, tmp_path)
    assert counts == [10, 10] and "avg@k" in text and "10 of 10" not in text


async def test_what_was_finished_is_kept_when_no_further_task_is(tmp_path: Path) -> None:
    evaluation = evaluation_of(Queue(stuck=3), tmp_path)
    with pytest.raises(EvaluationTimeout, match=r"trainer\.batch_timeout_s"):
        await evaluation.run()
    text, *counts = kept(evaluation, tmp_path)
    assert counts == [3, 3] and "3 of 10" in text and "out.jsonl" in text and "avg@k" in text


async def test_what_was_finished_is_kept_when_a_signal_ends_it(tmp_path: Path) -> None:
    queue = Queue(stuck=4, hangs=True)
    evaluation = evaluation_of(queue, tmp_path)
    running = asyncio.create_task(evaluation.run())
    await queue.hung.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    text, *counts = kept(evaluation, tmp_path)
    assert counts == [4, 4] and "4 of 10" in text


@pytest.mark.parametrize("queue", [{"stuck": 0}, {"stuck": 2, "lost": True}])
async def test_nothing_is_written_where_nothing_is_complete_or_the_queue_is_gone(
    tmp_path: Path, queue: dict[str, Any]
) -> None:
    evaluation = evaluation_of(Queue(**queue), tmp_path)
    with pytest.raises(EvaluationTimeout):
        await evaluation.run()
    text, *counts = kept(evaluation, tmp_path)
    assert counts == [0, 0] and "avg@k" not in text
