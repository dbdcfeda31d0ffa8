from rl_async.configs.checks.rules import check
from rl_async.configs.load.loader import load_config
from rl_async.launcher.runs.evaluate import report_lines, without_training
from rl_async.messages import Reserved, Task, TrajectoryHeader


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
        tokens_sha256="",
    )


def task(source: str) -> Task:
    return Task(task_id="t", data_source=source, prompt=[], ground_truth="")


def test_mean_reward_per_data_source_and_over_all() -> None:
    result = Reserved(
        step=0,
        headers=[header(1, 1.0), header(2, 0.0), header(3, 0.5)],
        tasks={1: task("math"), 2: task("math"), 3: task("code")},
    )
    assert report_lines(result) == [
        "math: reward 0.5000 over 2 trajectories",
        "code: reward 0.5000 over 1 trajectories",
        "all: reward 0.5000 over 3 trajectories",
    ]


def test_one_data_source_needs_no_total() -> None:
    result = Reserved(step=0, headers=[header(1, 1.0)], tasks={1: task("math")})
    assert report_lines(result) == ["math: reward 1.0000 over 1 trajectories"]


def test_roles_have_a_line_each() -> None:
    headers = [
        header(1, 1.0, "buyer"),
        header(1, 0.0, "seller", 1),
        header(2, 0.0, "buyer"),
        header(2, 0.0, "seller", 1),
    ]
    result = Reserved(step=0, headers=headers, tasks={1: task("market"), 2: task("market")})
    assert report_lines(result) == [
        "market: reward 0.2500 over 2 trajectories",
        "as buyer: reward 0.5000",
        "as seller: reward 0.0000",
    ]


def test_without_any_trajectory_there_is_still_an_answer() -> None:
    assert report_lines(Reserved(step=0, headers=[])) == ["all: reward 0.0000 over 0 trajectories"]


def test_one_small_group_is_left_to_train_on() -> None:
    adapters = ["trainer.lora={}", "weight_sync.adapters=true"]
    config = without_training(load_config("calculator-async", ["trainer.ranks=2", *adapters, "rollout.replay=runs/a"]))
    check(config)
    assert config.rollout.replay == "", "its answers are sampled"
    alive = (config.queue.max_staleness + 1) * config.data.train_batch_groups
    assert (alive, config.trainer.steps, config.rollout.group_size) == (1, 1, 2)
    assert config.model == load_config("calculator-async").model
