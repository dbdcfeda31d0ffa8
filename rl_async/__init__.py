"""Asynchronous reinforcement learning for language models. Start reading at docs/explanation/architecture.md.

The names below are what notebooks, scripts and users' functions import, such as ``from rl_async import launch, Step``.
They are looked up when they are used: importing the package takes no time, and torch is only imported with the names
that hold tensors. Everything else may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Public names by the modules that define them; editors read the imports below, which a test compares.
PUBLIC = {
    "launcher.handle": ("launch", "load", "Run", "Sample"),
    "reward_loop.api": ("Conversation", "Score"),
    "agent_loop.tools.tool": ("Step", "Tool"),
    "agent_loop.environments.session": ("Environment", "Game"),
    "messages": ("Task", "Turn", "ToolCall", "Trajectory", "Sampling", "Version"),
    "trainer.algorithms.losses": ("LossInputs", "SelectInputs", "PolicyLoss"),
    "trainer.algorithms.advantages": ("AdvantageInputs", "Groups"),
    "trainer.algorithms.correction": ("Corrected",),
    "errors": ("RlAsyncError", "UserError", "ConfigError", "RunFailed"),
}

if TYPE_CHECKING:
    from rl_async.agent_loop.environments.session import Environment as Environment
    from rl_async.agent_loop.environments.session import Game as Game
    from rl_async.agent_loop.tools.tool import Step as Step
    from rl_async.agent_loop.tools.tool import Tool as Tool
    from rl_async.errors import ConfigError as ConfigError
    from rl_async.errors import RlAsyncError as RlAsyncError
    from rl_async.errors import RunFailed as RunFailed
    from rl_async.errors import UserError as UserError
    from rl_async.launcher.handle import Run as Run
    from rl_async.launcher.handle import Sample as Sample
    from rl_async.launcher.handle import launch as launch
    from rl_async.launcher.handle import load as load
    from rl_async.messages import Sampling as Sampling
    from rl_async.messages import Task as Task
    from rl_async.messages import ToolCall as ToolCall
    from rl_async.messages import Trajectory as Trajectory
    from rl_async.messages import Turn as Turn
    from rl_async.messages import Version as Version
    from rl_async.reward_loop.api import Conversation as Conversation
    from rl_async.reward_loop.api import Score as Score
    from rl_async.trainer.algorithms.advantages import AdvantageInputs as AdvantageInputs
    from rl_async.trainer.algorithms.advantages import Groups as Groups
    from rl_async.trainer.algorithms.correction import Corrected as Corrected
    from rl_async.trainer.algorithms.losses import LossInputs as LossInputs
    from rl_async.trainer.algorithms.losses import PolicyLoss as PolicyLoss
    from rl_async.trainer.algorithms.losses import SelectInputs as SelectInputs

    __version__: str


def __getattr__(name: str) -> Any:
    """Look up a public name, or ``__version__``, which pyproject.toml holds and the installed metadata repeat."""
    if name == "__version__":
        from rl_async.installation import version

        return version()
    for module, names in PUBLIC.items():
        if name in names:
            return getattr(import_module(f"rl_async.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "__version__", *(name for names in PUBLIC.values() for name in names)])
