"""How many trajectories a task becomes, and which of them is only a baseline to compare with."""

from rl_async.configs.schema.formulas import advantage_needs
from rl_async.configs.schema.run import RunConfig


def samples_per_group(config: RunConfig) -> int:
    """Return how many trajectories a training group has: ``rollout.group_size``, plus a greedy baseline if needed."""
    return config.rollout.group_size + ("greedy" in advantage_needs(config.algorithm.advantage))


def is_baseline(config: RunConfig, partition: str, sample: int) -> bool:
    """Return whether this sample of a group is the greedy episode, which is never trained on."""
    return partition == "train" and sample >= config.rollout.group_size
