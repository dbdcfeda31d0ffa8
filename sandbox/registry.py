"""The kinds of sandboxes by name."""

from collections.abc import Callable

from rl_async.configs.schema.sandbox import SandboxConfig, SandboxKind
from rl_async.sandbox.api import Sandbox
from rl_async.sandbox.bubblewrap import Bubblewrap
from rl_async.sandbox.fusion import SandboxFusion

KINDS: dict[SandboxKind, Callable[[SandboxConfig], Sandbox]] = {
    "bubblewrap": Bubblewrap,
    "sandbox_fusion": SandboxFusion,
}


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the config's sandbox. Raises ConfigError where it cannot work: nothing runs without one."""
    return KINDS[config.kind](config)
