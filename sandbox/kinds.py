"""The kinds of sandboxes by name, and users' own."""

from collections.abc import Callable

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.sandbox.api import Sandbox
from rl_async.sandbox.bubblewrap import Bubblewrap, find_place
from rl_async.sandbox.container import Containers
from rl_async.sandbox.fusion import SandboxFusion
from rl_async.userload import is_user_reference, load_user_object

KINDS: dict[str, Callable[[SandboxConfig], Sandbox]] = {
    "bubblewrap": lambda config: Bubblewrap(config, find_place()),
    "container": Containers,
    "sandbox_fusion": SandboxFusion,
}


def make_sandbox(given: SandboxConfig | None) -> Sandbox:
    """Return the config's sandbox, one of ours or the user's class ``path.py:name``, made from the config.

    Without a config its defaults hold.
    Raises ConfigError where there is none or it cannot work: nothing runs without one.
    """
    config = given or SandboxConfig()
    if is_user_reference(config.kind):
        made: Sandbox = load_user_object(config.kind, "sandbox.kind")(config)
        return made
    if config.kind not in KINDS:
        raise ConfigError(f"sandbox.kind: no sandbox {config.kind!r}; built in: {', '.join(KINDS)}; or path.py:class")
    return KINDS[config.kind](config)
