"""Rules for episodes that may have several rows, which some algorithms would take for episodes: those of agent programs
behind a gateway, and those whose past reasoning is dropped."""

import re

from rl_async.configs.schema.algorithm import ShapingConfig
from rl_async.configs.schema.formulas import ADVANTAGES, Advantage
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.userload import is_user_reference

# Keys of `agent` that only agent workers read.
WORKERS_KEYS = (
    *(
        "loop",
        "environment",
        "environment_hosts",
        "max_turns",
        "max_parallel_calls",
        "on_timeout",
        "tool_timeout_s",
        "tool_response_tokens",
    ),
    *("workers", "concurrency", "check_rendering"),
)
PER_ROW_SHAPING = ("overlong_filter", "reward_scale", "resample")  # of algorithm.shaping


def gateway_problem(c: RunConfig) -> str | None:
    """Say why agent programs cannot play the episodes of this config; None if they can."""
    name = c.algorithm.advantage
    if "parts" in ADVANTAGES.get(name, Advantage()).needs:
        return (
            f"algorithm.advantage={name} needs every named part of the reward, and an agent program may post a reward "
            "without parts; with a gateway use another estimator, such as grpo or rloo"
        )
    if c.agent.mcp:
        return (
            "agent.mcp gives tools to agent workers; agent programs behind a gateway connect to MCP servers themselves"
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
    """Apply ``gateway_problem`` to configs that start a gateway themselves, and refuse what only workers could do."""
    if c.agent.gateway is None:
        return None
    for pattern in c.agent.gateway.untrained:
        try:
            re.compile(pattern)
        except re.error as error:
            return f"agent.gateway.untrained: {pattern!r} is not a regular expression: {error}"
    if plays_itself(c):
        if not (c.agent.environment or "").startswith("verifiers:"):
            return (
                f"agent.environment_hosts.python: agent.environment={c.agent.environment} does not play through a "
                "gateway, as verifiers:NAME does; leave out agent.environment_hosts.python and agent.gateway"
            )
    elif c.agent.environment is not None:
        return (
            f"agent.environment={c.agent.environment} has no effect with agent.gateway: agent programs bring their own "
            "tools and state; set agent.environment=null, or leave out agent.gateway (verifiers:NAME plays through it "
            "in a Python of its own: agent.environment_hosts.python)"
        )
    if is_user_reference(c.agent.loop):
        return (
            f"agent.loop={c.agent.loop} has no effect with agent.gateway: agent programs are the loop; leave it out, "
            "or leave out agent.gateway"
        )
    return gateway_problem(c)


def without_effect(c: RunConfig) -> list[str]:
    """Return the keys of `agent` that are not at their defaults and that nothing in a run with a gateway reads."""
    if c.agent.gateway is None:
        return []
    default, read = AgentConfig(), ("environment", "environment_hosts", "concurrency") if plays_itself(c) else ()
    keys = [key for key in WORKERS_KEYS if key not in read]
    return [f"agent.{key}" for key in keys if getattr(c.agent, key) != getattr(default, key)]


def plays_itself(c: RunConfig) -> bool:
    """Whether the environment plays the episodes through the run's gateway, in a Python of its own."""
    hosts = c.agent.environment_hosts
    return c.agent.gateway is not None and hosts is not None and bool(hosts.python)


def past_reasoning(c: RunConfig) -> str | None:
    """Refuse algorithms that take rows for episodes where dropped reasoning makes several rows of one."""
    past = c.agent.past_reasoning
    return None if past == "keep" else _row_problem(c, f"with agent.past_reasoning={past}")
