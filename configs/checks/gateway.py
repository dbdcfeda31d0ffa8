"""Rules for runs with a gateway: its episodes may have several rows, which some algorithms would take for episodes."""

from rl_async.configs.schema.algorithm import ShapingConfig
from rl_async.configs.schema.formulas import ADVANTAGES, Advantage
from rl_async.configs.schema.run import RunConfig

PER_ROW_SHAPING = ("overlong_max_tokens", "overlong_filter", "reward_scale", "resample")  # of algorithm.shaping


def gateway_problem(c: RunConfig) -> str | None:
    """Say why agent programs cannot play the episodes of this config; None if they can."""
    name = c.algorithm.advantage
    traits = ADVANTAGES.get(name, Advantage())
    if traits.row_is_episode:
        return (
            f"algorithm.advantage={name} compares single rows, and an agent program's episode may have several; with a "
            "gateway use another estimator, such as grpo or rloo"
        )
    if "parts" in traits.needs:
        return (
            f"algorithm.advantage={name} needs every named part of the reward, and an agent program may post a reward "
            "without parts; with a gateway use another estimator, such as grpo or rloo"
        )
    default = ShapingConfig()
    for key in PER_ROW_SHAPING:
        if getattr(c.algorithm.shaping, key) != getattr(default, key):
            return (
                f"algorithm.shaping.{key} treats every row as an episode, and an agent program's episode may have "
                "several; leave it out with a gateway"
            )
    return None


def gateway(c: RunConfig) -> str | None:
    """Apply ``gateway_problem`` to configs that start a gateway themselves."""
    return None if c.agent.gateway is None else gateway_problem(c)
