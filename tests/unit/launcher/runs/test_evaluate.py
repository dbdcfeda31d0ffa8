import io
import json
from pathlib import Path

import msgspec
from rich.console import Console

from rl_async.configs.checks.rules import check
from rl_async.configs.load.loader import load_config
from rl_async.launcher.evaluation.lines import write_lines
from rl_async.launcher.runs.evaluate import print_report, without_training
from rl_async.messages import Reserved, Task, TrajectoryHeader, Turn
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
