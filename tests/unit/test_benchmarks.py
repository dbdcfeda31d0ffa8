"""The parts of benchmarks/real_model.py that compute rather than measure."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.whole_run import Arm, TrlRun
from benchmarks.real.steps import MODES, SHAPES, lengthened, overrides_of, sums
from benchmarks.real.time_to_reward import Step, first_above
from rl_async.configs.load.loader import load_config


class Words:
    """Renders a conversation as its words."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[str]:
        assert options["add_generation_prompt"]
        return [word for message in messages for word in message["content"].split()]


def steps(*rewards: float) -> tuple[list[Step], dict[Path, float]]:
    """Steps of ten seconds each, and what their weights reach."""
    made = [Step(10.0 * number, 0.5, Path(str(number))) for number in range(1, len(rewards) + 1)]
    return made, {step.weights: reward for step, reward in zip(made, rewards, strict=True)}


def test_the_time_to_a_reward_is_that_of_the_first_weights_that_reach_it() -> None:
    made, held_out = steps(0.2, 0.84, 0.85, 0.5, 0.9, 1.0)
    asked: list[Path] = []

    def evaluate(weights: Path) -> float:
        asked.append(weights)
        return held_out[weights]

    assert first_above(0.85, "ours", made, evaluate) == 30.0
    assert asked == [step.weights for step in made[:5]]  # and two more, to see whether it stays there


def test_weights_that_never_reach_the_reward_take_no_time() -> None:
    made, held_out = steps(0.2, 0.4)
    assert first_above(0.85, "TRL", made, held_out.__getitem__) is None


def test_the_median_is_over_the_steps_of_all_runs() -> None:
    arm = Arm()
    arm.add([1.0, 9.0], {"training": 1.0})
    arm.add([2.0], {"training": 3.0})
    assert arm.median == 2.0
    assert arm.parts["training"] == [1.0, 3.0]


def test_steps_of_trl_are_from_the_end_of_one_to_the_end_of_the_next() -> None:
    run = TrlRun(ends=[5.0, 8.0, 12.0], processor=[1.0, 3.0, 6.0], tokens=[12.0] * 3, rewards=[], generating=[2, 1, 3])
    seconds, parts = run.steps(range(1, 3), tokens=12)
    assert seconds == [3.0, 4.0]
    assert parts == {"generation": 2.0, "processor": 2.5}


def test_a_run_of_trl_with_short_answers_is_not_compared() -> None:
    run = TrlRun(ends=[1.0, 2.0], processor=[0.0, 0.0], tokens=[12.0, 9.0], rewards=[], generating=[1.0, 1.0])
    with pytest.raises(SystemExit):
        run.steps(range(1, 2), tokens=12)


def test_a_prompt_is_lengthened_by_examples_before_its_question() -> None:
    asked = lengthened([{"role": "user", "content": "What is 3 + 4?"}], 60, Words())  # type: ignore[arg-type]
    words = asked[-1]["content"].split()
    assert 60 <= len(words) < 66
    assert asked[-1]["content"].endswith("What is 3 + 4?")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_runs_of_a_shape_have_room_for_its_rows(shape: str, mode: str, tmp_path: Path) -> None:
    config = load_config("smollm2", overrides_of(tmp_path, SHAPES[shape], mode, 3))
    assert config.data.train_batch_groups * config.rollout.group_size == SHAPES[shape].groups * SHAPES[shape].group_size
    assert config.rollout.max_model_len >= SHAPES[shape].prompt + config.rollout.max_tokens
    assert config.queue.max_staleness == (mode == "disaggregated")


def test_both_arms_get_the_tasks_of_the_preset(tmp_path: Path) -> None:
    held_out = sums(tmp_path, "test")
    assert len(held_out) == load_config("smollm2").eval.tasks
    asked = {row["prompt"][-1]["content"] for row in held_out}
    assert not asked & {row["prompt"][-1]["content"] for row in sums(tmp_path)}
