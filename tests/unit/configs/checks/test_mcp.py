"""Rules for `agent.mcp`."""

from typing import Any

import pytest

from rl_async.configs.checks import mcp
from rl_async.configs.load import from_values
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}


def config(*servers: dict[str, Any], **agent: Any) -> RunConfig:
    return from_values({**BASE, "agent": {"mcp": list(servers), **agent}})


def test_commands_and_urls_are_accepted() -> None:
    made = config(
        {"command": ["npx", "-y", "server"], "env": {"A": "b"}, "env_from": ["KEY"]},
        {"command": "uvx 'a b'", "allow": ["x"], "scope": "worker"},
        {"url": "https://example.com/mcp", "headers_from": {"Authorization": "TOKEN"}},
    )
    assert mcp(made) is None


@pytest.mark.parametrize(
    "server",
    [
        {},
        {"command": "x", "url": "http://h"},
        {"command": "x 'y"},
        {"command": [""]},
        {"command": "  "},
        {"url": "ftp://h"},
        {"url": "127.0.0.1:80"},
        {"url": "http://user:secret@h/mcp"},
        {"url": "http://h", "env": {"A": "b"}},
        {"command": "x", "headers_from": {"A": "B"}},
        {"command": "x", "env_from": ["sk-123"]},
        {"url": "http://h", "headers_from": {"Authorization": "Bearer abc"}},
        {"command": "x", "name": "a b"},
    ],
)
def test_what_cannot_work_is_refused_with_its_key(server: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp\[0\]"):
        config(server)


def test_names_tell_servers_apart() -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp"):
        config({"command": "x", "name": "a"}, {"command": "y", "name": "a"})


def test_programs_behind_a_gateway_have_servers_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"agent\.mcp"):
        config({"command": "x"}, gateway={})
