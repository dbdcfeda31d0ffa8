"""Values that follow from several keys."""

import pytest

from rl_async.configs.derived import compute_type, is_baseline, samples_per_group
from rl_async.configs.schema.algorithm import ADVANTAGES, AlgorithmConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.transfer_queue.admission import QueueSettings


def test_a_role_refuses_a_type_that_is_not_settled() -> None:
    assert compute_type(ModelConfig(path="m", dtype="bfloat16")) == "bfloat16"
    with pytest.raises(ConfigError, match=r"model\.dtype=auto"):
        compute_type(ModelConfig(path="m"))


def config(advantage: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        rollout=RolloutConfig(group_size=5),
        algorithm=AlgorithmConfig(advantage=advantage),
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_remax_alone_asks_the_queue_for_one_more(name: str) -> None:
    expected = 6 if name == "remax" else 5
    assert samples_per_group(config(name)) == QueueSettings.of(config(name)).group_size == expected


def test_the_last_sample_of_a_training_group_is_the_greedy_one() -> None:
    remax = config("remax")
    assert [is_baseline(remax, "train", sample) for sample in range(6)] == [False] * 5 + [True]
    assert not is_baseline(remax, "eval", 5)
