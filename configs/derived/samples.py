"""How many trajectories a task becomes, and which of them is there only to be compared with."""

from rl_async.configs.schema.formulas import advantage_needs
from rl_async.configs.schema.run import RunConfig


def samples_per_group(config: RunConfig) -> int:
    """Trajectories of one training group: ``rollout.group_size``, and a greedy one if the estimator asks for it."""
    return config.rollout.group_size + ("greedy" in advantage_needs(config.algorithm.advantage))


def is_baseline(config: RunConfig, partition: str, sample: int) -> bool:
    """Whether this sample of a group is the greedy episode, which is never trained."""
    return partition == "train" and sample >= config.rollout.group_size
