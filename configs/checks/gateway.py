"""Which algorithms cannot learn from a gateway's episodes: those that take a row for an episode."""

from rl_async.configs.schema.algorithm import ShapingConfig
from rl_async.configs.schema.formulas import ADVANTAGES, Advantage
from rl_async.configs.schema.run import RunConfig

OF_ROWS = ("overlong_max_tokens", "overlong_filter", "reward_scale", "resample")  # of algorithm.shaping


def gateway_problem(c: RunConfig) -> str | None:
    """Why agent programs cannot play the episodes of this config, if they cannot."""
    name = c.algorithm.advantage
    traits = ADVANTAGES.get(name, Advantage())
    if traits.row_is_episode:
        return (
            f"algorithm.advantage={name} compares rows one by one, and an agent program's episode may be several; use "
            "another estimator with a gateway, such as grpo or rloo"
        )
    if "parts" in traits.needs:
        return (
            f"algorithm.advantage={name} needs every part of the reward by name, and an agent program may post a "
            "reward without them; use another estimator with a gateway, such as grpo or rloo"
        )
    default = ShapingConfig()
    for key in OF_ROWS:
        if getattr(c.algorithm.shaping, key) != getattr(default, key):
            return (
                f"algorithm.shaping.{key} takes every row for an episode, and an agent program's episode may be "
                "several; leave it out with a gateway"
            )
    return None


def gateway_rule(c: RunConfig) -> str | None:
    """The rule for configs that start a gateway."""
    return None if c.agent.gateway is None else gateway_problem(c)
