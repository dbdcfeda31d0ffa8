"""Rules for episodes that may have several rows, which some algorithms would take for episodes: those of agent programs
behind a gateway, and those whose past reasoning is dropped."""

from rl_async.configs.schema.algorithm import ShapingConfig
from rl_async.configs.schema.formulas import ADVANTAGES, Advantage
from rl_async.configs.schema.run import RunConfig

PER_ROW_SHAPING = ("overlong_max_tokens", "overlong_filter", "reward_scale", "resample")  # of algorithm.shaping


def gateway_problem(c: RunConfig) -> str | None:
    """Say why agent programs cannot play the episodes of this config; None if they can."""
    name = c.algorithm.advantage
    if "parts" in ADVANTAGES.get(name, Advantage()).needs:
        return (
            f"algorithm.advantage={name} needs every named part of the reward, and an agent program may post a reward "
            "without parts; with a gateway use another estimator, such as grpo or rloo"
        )
    return _row_problem(c, "behind a gateway")


def _row_problem(c: RunConfig, where: str) -> str | None:
    name = c.algorithm.advantage
    if ADVANTAGES.get(name, Advantage()).row_is_episode:
        return (
            f"algorithm.advantage={name} compares single rows, and an episode {where} may have several; use another "
            "estimator, such as grpo or rloo"
        )
    default = ShapingConfig()
    for key in PER_ROW_SHAPING:
        if getattr(c.algorithm.shaping, key) != getattr(default, key):
            return (
                f"algorithm.shaping.{key} treats every row as an episode, and an episode {where} may have several; "
                "leave it out"
            )
    return None


def gateway(c: RunConfig) -> str | None:
    """Apply ``gateway_problem`` to configs that start a gateway themselves."""
    return None if c.agent.gateway is None else gateway_problem(c)


def past_reasoning(c: RunConfig) -> str | None:
    """Refuse algorithms that take rows for episodes where dropped reasoning makes several rows of one."""
    past = c.agent.past_reasoning
    return None if past == "keep" else _row_problem(c, f"with agent.past_reasoning={past}")
