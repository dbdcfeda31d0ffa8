"""What follows from a server's config in `agent.mcp`: its words, and the variables that are meant for it alone."""

import shlex
from collections.abc import Sequence

from rl_async.configs.schema.mcp import McpServerConfig

PASSED = ("HOME", "LANG", "LOGNAME", "PATH", "TERM", "TMPDIR", "USER")  # from our environment to every command's


def argv_of(config: McpServerConfig) -> list[str]:
    """Return the words of the command; none for a server at a URL. Raises ValueError for an open quotation."""
    return shlex.split(config.command) if isinstance(config.command, str) else list(config.command)


def secret_variables(configs: Sequence[McpServerConfig]) -> list[str]:
    """Return the variables of our environment that are meant for servers alone."""
    named = [name for config in configs for name in (*config.env_from, *config.headers_from.values())]
    return [name for name in named if name not in PASSED]
