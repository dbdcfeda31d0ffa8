"""A server of `agent.mcp` as a worker starts or reaches it: command line, environment, headers, log."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from rl_async.configs.derived.mcp import PASSED, argv_of, secret_variables
from rl_async.configs.schema.mcp import McpServerConfig
from rl_async.errors import ConfigError

SAID_BYTES = 4096  # at the end of a log, where a server's last line is looked for
SAID = 300  # characters of it
INSTALL = "python -m pip install 'rl-async[mcp]'"


class McpServer:
    """One server with all that is needed to begin sessions. ``log_path``: where its standard error goes.

    Raises ConfigError, naming the key, for a command or variable that does not exist here, or without the SDK.
    """

    def __init__(self, config: McpServerConfig, place: int, log_path: Path) -> None:
        self.config, self.log_path = config, log_path
        self.key = f"agent.mcp[{place}]"
        self.name = config.name or f"server {place}"
        argv = argv_of(config)
        self.label = f"{self.key} ({config.name or config.url.partition('?')[0] or shlex.join(argv)})"
        self.environment = {
            **{name: os.environ[name] for name in PASSED if name in os.environ},
            **config.env,
            **{name: self._variable(name, "env_from") for name in config.env_from},
        }
        self.headers = {name: self._variable(at, "headers_from") for name, at in config.headers_from.items()}
        self.argv = [] if config.url else [self._program(argv[0]), *argv[1:]]

    def _variable(self, name: str, key: str) -> str:
        if not (value := os.environ.get(name)):
            raise ConfigError(f"{self.key}.{key}: the environment has no {name}; export it first")
        return value

    def _program(self, name: str) -> str:
        path = self.environment.get("PATH", os.defpath)
        if (found := shutil.which(name, path=path)) is None:
            raise ConfigError(f"{self.key}.command: there is no program {name!r} on PATH")
        return found

    @contextlib.contextmanager
    def log(self) -> Iterator[TextIO]:
        """Open the file that gets the server's standard error."""
        with self.log_path.open("a") as file:
            yield file

    def said(self) -> str:
        """Return, as the end of a message, the last line that the server wrote to its standard error."""
        if self.config.url or not self.log_path.is_file():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SAID_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        printable = "".join(c if c.isprintable() else "?" for c in line[:SAID])
        return f"; it said last: {printable}"


def mcp_servers(configs: Sequence[McpServerConfig], log_folder: Path, owner: str) -> list[McpServer]:
    """Return the servers of a config, whose logs are called after ``owner``.

    Raises ConfigError for what can be told to be wrong without starting one.
    """
    if configs and find_spec("mcp") is None:
        raise ConfigError(f"agent.mcp: the SDK for MCP servers is not installed; run `{INSTALL}`")
    return [McpServer(config, place, log_folder / f"mcp-{place}-{owner}.log") for place, config in enumerate(configs)]


def forget_variables(configs: Sequence[McpServerConfig]) -> None:
    """Remove what was read from the environment, so that other processes of tools and scorers do not inherit it."""
    for name in secret_variables(configs):
        os.environ.pop(name, None)
