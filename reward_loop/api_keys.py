"""API keys of outside servers, each in an environment variable that the config names; stored nowhere."""

import os

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError


def read_api_key(variable: str, key: str) -> str:
    """Read an API key from the environment; empty if no variable is named. Raises ConfigError, naming ``key``."""
    if not variable:
        return ""
    if not (value := os.environ.get(variable)):
        raise ConfigError(f"{key}: the environment has no {variable}; export it first")
    return value


def api_key_variables(config: RunConfig) -> list[str]:
    """List the variables that hold the keys of the outside servers of a run."""
    speakers = (config.agent.user, *config.agent.opponents.values(), config.eval.endpoint)
    sections = (config.reward.judge, config.reward.model, *speakers)
    return [section.api_key_env for section in sections if section is not None and section.api_key_env]


def forget_api_keys(config: RunConfig) -> None:
    """Remove the keys from this process's environment once they are read, so that tools and scorers that run in
    processes of their own do not inherit them."""
    for variable in api_key_variables(config):
        os.environ.pop(variable, None)
