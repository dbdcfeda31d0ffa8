"""API keys of outside servers, each in an environment variable that the config names; stored nowhere."""

import os

from rl_async.configs.schema.reward import RewardConfig
from rl_async.errors import ConfigError


def read_api_key(variable: str, key: str) -> str:
    """Read an API key from the environment; empty if no variable is named. Raises ConfigError, naming ``key``."""
    if not variable:
        return ""
    if not (value := os.environ.get(variable)):
        raise ConfigError(f"{key}: the environment has no {variable}; export it first")
    return value


def forget_api_keys(config: RewardConfig) -> None:
    """Remove the keys from this process's environment once they are read, so that tools and scorers that run in
    processes of their own do not inherit them."""
    for section in (config.judge, config.model):
        if section is not None:
            os.environ.pop(section.api_key_env, None)
