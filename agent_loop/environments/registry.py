"""The built-in environments by name, and users' own."""

from collections.abc import Callable
from typing import Any, cast

from rl_async.agent_loop.environments.shop import Shop
from rl_async.errors import ConfigError
from rl_async.messages import Task
from rl_async.userload import is_user_reference, load_user_object

EnvironmentFactory = Callable[[Task], Any]  # an interface.Environment, or whatever has some of its methods
ENVIRONMENTS: dict[str, EnvironmentFactory] = {"shop": Shop}


def get_environment(name: str) -> EnvironmentFactory:
    """Return a built-in environment or the user's class ``path.py:name``. Raises ConfigError if there is none."""
    if is_user_reference(name):
        factory = load_user_object(name, "agent.environment")
        if not callable(factory):
            raise ConfigError(f"agent.environment: {name} is not a class")
        return cast(EnvironmentFactory, factory)
    if name not in ENVIRONMENTS:
        raise ConfigError(
            f"agent.environment: no environment {name!r}; built in: {', '.join(ENVIRONMENTS)}; or path.py:class"
        )
    return ENVIRONMENTS[name]
