"""The list of all rules, ``check``, and the rules that concern several sections."""

import re
from collections.abc import Iterator

from rl_async.configs.checks.algorithm import ALGORITHM_RULES, Rule
from rl_async.configs.checks.data import DATA_RULES
from rl_async.configs.checks.engine import ENGINE_RULES
from rl_async.configs.checks.finetune import finetune, warm_start
from rl_async.configs.checks.fsdp2 import fsdp2, kernels
from rl_async.configs.checks.gateway import gateway, past_reasoning
from rl_async.configs.checks.mcp import mcp
from rl_async.configs.checks.megatron import data_parallel, megatron, sharing
from rl_async.configs.checks.queue import QUEUE_RULES
from rl_async.configs.checks.reward import REWARD_RULES
from rl_async.configs.checks.weight_sync import WEIGHT_SYNC_RULES
from rl_async.configs.derived.sandbox import plays_harbor
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError


def _truncation(c: RunConfig) -> str | None:
    if c.rollout.top_p < 1 or c.rollout.top_k > 0:
        return (
            "rollout.top_p < 1 and rollout.top_k > 0 truncate the distribution, so the trainer cannot compute the "
            "log-probabilities of what was sampled; train with top_p=1 and top_k=0"
        )
    return None


def _minibatches(c: RunConfig) -> str | None:
    rows = c.data.train_batch_groups * c.rollout.group_size
    if c.finetune is None and rows < c.trainer.minibatches * data_parallel(c):
        return (
            f"{rows} trajectories per step (data.train_batch_groups * rollout.group_size) cannot fill "
            f"trainer.minibatches={c.trainer.minibatches} on {data_parallel(c)} copies of the model (trainer.ranks="
            f"{c.trainer.ranks})"
        )
    return None


def _lengths(c: RunConfig) -> str | None:
    if c.agent.max_tokens > c.rollout.max_model_len:
        return (
            f"agent.max_tokens={c.agent.max_tokens} is more than an engine accepts "
            f"(rollout.max_model_len={c.rollout.max_model_len})"
        )
    return None


def _sandbox(c: RunConfig) -> str | None:
    url = c.sandbox.url
    if plays_harbor(c) and c.sandbox.kind in ("container", "sandbox_fusion"):
        return (
            f"agent.environment={c.agent.environment} needs folders at the root of its sandbox, which "
            f"sandbox.kind={c.sandbox.kind} cannot have; use bubblewrap"
        )
    if (c.sandbox.kind == "container") != bool(c.sandbox.image):
        return "sandbox.image belongs to sandbox.kind=container, which needs one: set both, or neither"
    if c.sandbox.kind != "sandbox_fusion":
        return "sandbox.url has an effect with sandbox.kind=sandbox_fusion only; leave it out" if url else None
    if not re.fullmatch(r"https?://[^\s@?#]+", url):
        return (
            "sandbox.url must be http://... or https://... of a Sandbox Fusion server, without a password and a query"
        )
    return None


def _environment_hosts(c: RunConfig) -> str | None:
    if c.agent.environment_hosts is None or c.agent.gateway is not None:
        return None
    if c.agent.environment is None:
        return "agent.environment_hosts hold the environments of agent.environment; name one, or leave them out"
    if c.agent.environment == "simulated_user":
        return (
            "agent.environment_hosts cannot hold agent.environment=simulated_user, whose model the worker asks; leave "
            "them out"
        )
    if c.agent.environment_hosts.python:
        return (
            "agent.environment_hosts.python: an environment in a Python of its own plays through a gateway; add "
            "agent.gateway={}, or leave it out"
        )
    return None


RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    *ENGINE_RULES,
    *(sharing, megatron, fsdp2, kernels),
    *QUEUE_RULES,
    *DATA_RULES,
    *WEIGHT_SYNC_RULES,
    *REWARD_RULES,
    *(_truncation, _minibatches, _lengths, _sandbox, _environment_hosts),
    *(gateway, past_reasoning, mcp),
    finetune,
    warm_start,
)


def problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each broken rule."""
    for rule in RULES:
        if message := rule(config):
            yield message


def check(config: RunConfig) -> None:
    """Raise ConfigError with the messages of all broken rules."""
    if found := list(problems(config)):
        raise ConfigError("; ".join(found))
